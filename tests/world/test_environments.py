"""Each launcher's variables give the same answers, and half-set ones are refused by name."""

from __future__ import annotations

import pytest

from shoal.world.environments import Place, PlaceError, detect, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}


def test_no_launcher_is_a_world_of_one() -> None:
    assert detect({}) == Place("one process", 0, 1, 0, 1)


def test_torchrun() -> None:
    place = detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place[1:7] == (3, 8, 1, 2, "node0", 29500)
    assert place.generation == "a/2"


def test_a_restart_has_a_generation_of_its_own() -> None:
    first, second = (detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": n}) for n in "01")
    assert first.generation != second.generation


def test_pytorchjob_gives_no_local_rank() -> None:
    place = detect({name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")})
    assert (place.rank, place.local_rank, place.local_size) == (3, None, None)


def test_trainer_pods() -> None:
    pod = {
        "PET_NNODES": "4",
        "PET_NODE_RANK": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-0",
        "PET_MASTER_PORT": "29400",
    }
    assert detect(pod)[1:7] == (2, 4, 0, 1, "job-0", 29400)
    with pytest.raises(PlaceError, match="PET_NPROC_PER_NODE = '8'"):
        detect({**pod, "PET_NPROC_PER_NODE": "8"})


def test_slurm() -> None:
    place = detect(SLURM)
    assert place[1:6] == (5, 8, 1, 4, "gpu07")
    assert place.port is not None and 15_000 <= place.port < 29_000


def test_slurm_steps_and_jobs_have_ports_of_their_own() -> None:
    ports = {
        detect({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port
        for job in ("4711", "4712")
        for step in "01"
    }
    assert len(ports) == 4


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "interactive"}, {"SLURM_NTASKS": "1"}]
)
def test_a_shell_inside_an_allocation_is_a_world_of_one(change: dict[str, str]) -> None:
    assert detect({**SLURM, **change}).size == 1


def test_a_script_of_sbatch_without_srun_is_a_world_of_one() -> None:
    assert detect({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}).size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("a,b", "a"),
        ("gpu[007-010,12],cpu1", "gpu007"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("n[5]-ib", "n5-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_open_mpi() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.0.0.7,172.17.0.1:36085",
        "PMIX_NAMESPACE": "prterun-node0-123@1",
    }
    assert detect(env)[1:6] == (1, 4, 1, 2, "10.0.0.7")
    assert detect({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address == "127.0.0.1"


def test_mpich_and_intel_mpi() -> None:
    env = {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "PMI_PORT": "n0:1",
    }
    assert detect(env)[1:6] == (1, 2, 1, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, but RANK is set"),
        ({"RANK": ""}, "RANK is not set, but WORLD_SIZE is set"),
        ({"RANK": "x"}, "RANK = 'x' is not a whole number"),
        ({"RANK": "8"}, "rank 8 is outside the world of 8"),
        ({"RANK": "-1"}, "rank -1 is outside"),
        ({"WORLD_SIZE": "0"}, "world size 0"),
        ({"LOCAL_RANK": "2"}, "local rank 2 is outside this node's 2 ranks"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http' is not a whole number"),
    ],
)
def test_impossible_variables_are_refused_by_name(change: dict[str, str], message: str) -> None:
    with pytest.raises(PlaceError, match=message):
        detect({**TORCHRUN, **change})


def test_a_local_rank_alone_is_refused() -> None:
    with pytest.raises(PlaceError, match="LOCAL_RANK is set but RANK and WORLD_SIZE are not"):
        detect({"LOCAL_RANK": "0"})
