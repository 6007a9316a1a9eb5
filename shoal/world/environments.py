"""Which rank is this process? One small function a launcher, each answering the same questions.

A function returns `None` when its launcher did not start this process, and raises when it did but left a
variable out or set it to something impossible. `detect` asks them in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

Env = Mapping[str, str]


class PlaceError(ValueError):
    """A launcher's variables are incomplete or contradict each other; the message names the variable."""


class Place(NamedTuple):
    """Where a launcher put this process.

    `local_rank` and `local_size` are None when the launcher does not say; `address` and `port` are where
    rank 0's store listens. `agent_store` says that the store is held by the launcher's agent and not by rank
    0. `generation` differs between two starts of the same job, so that one never reads what the other left.
    """

    source: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    generation: str = ""
    agent_store: bool = False


def detect(env: Env) -> Place:
    """Ask each launcher in turn; a process that nobody placed is rank 0 of 1.

    Raises:
        PlaceError: naming the variable that is missing, not a number, or out of range.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).rank
        1
    """
    for question in (torchrun, torchrun_pods, open_mpi, slurm, pmi):
        place = question(env)
        if place is not None:
            return _checked(place)
    return Place("one process", rank=0, size=1, local_rank=0, local_size=1)


def torchrun(env: Env) -> Place | None:
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun, a PyTorchJob, Ray Train, `shoal train`."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        if "LOCAL_RANK" in env:
            raise PlaceError("LOCAL_RANK is set but RANK and WORLD_SIZE are not: set all three, or none")
        return None
    size = _integer(env, "WORLD_SIZE", because="RANK is set")
    return Place(
        "RANK and WORLD_SIZE",
        rank=_integer(env, "RANK", because="WORLD_SIZE is set"),
        size=size,
        local_rank=_optional(env, "LOCAL_RANK"),
        local_size=_optional(env, "LOCAL_WORLD_SIZE"),
        address=_address(env, size),
        port=_port(env, size),
        generation=f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def torchrun_pods(env: Env) -> Place | None:
    """PET_NNODES, PET_NODE_RANK, ...: a pod of Kubernetes Trainer that runs one process, without torchrun."""
    if "PET_NNODES" not in env or "PET_NODE_RANK" not in env:
        return None
    if env.get("PET_NPROC_PER_NODE", "1") != "1":
        raise PlaceError(
            f"PET_NPROC_PER_NODE = {env['PET_NPROC_PER_NODE']!r} asks for several processes in this pod, but "
            "only "
            "this one was started: start them with 'torchrun -m shoal job.toml', which reads the PET_ "
            "variables"
        )
    size = _integer(env, "PET_NNODES", because="PET_NODE_RANK is set")
    return Place(
        "PET_NNODES and PET_NODE_RANK",
        rank=_integer(env, "PET_NODE_RANK", because="PET_NNODES is set"),
        size=size,
        local_rank=0,
        local_size=1,
        address=_required(env, "PET_MASTER_ADDR", because="PET_NNODES is set") if size > 1 else None,
        port=_integer(env, "PET_MASTER_PORT", because="PET_NNODES is set") if size > 1 else None,
    )


def open_mpi(env: Env) -> Place | None:
    """OMPI_COMM_WORLD_*: mpirun of Open MPI. Rank 0 is on its head node unless MASTER_ADDR says otherwise."""
    if "OMPI_COMM_WORLD_RANK" not in env and "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = _integer(env, "OMPI_COMM_WORLD_SIZE", because="OMPI_COMM_WORLD_RANK is set")
    local_size = _optional(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    return Place(
        "Open MPI",
        rank=_integer(env, "OMPI_COMM_WORLD_RANK", because="OMPI_COMM_WORLD_SIZE is set"),
        size=size,
        local_rank=_optional(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        address=env.get("MASTER_ADDR") or _loopback_if(local_size == size) or _hnp_host(env),
        port=_optional(env, "MASTER_PORT") or _port_from(job),
        generation=job,
    )


def slurm(env: Env) -> Place | None:
    """SLURM_*: a task of srun. What an interactive shell or an sbatch script inherits does not count."""
    if (
        "SLURM_PROCID" not in env
        or "SLURM_STEP_ID" not in env
        or env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    ):
        return None
    size = _integer(env, "SLURM_NTASKS", because="SLURM_PROCID is set")
    if size == 1:
        return None
    job, step = env.get("SLURM_JOB_ID", ""), env["SLURM_STEP_ID"]
    nodes = env.get("SLURM_STEP_NODELIST") or _required(env, "SLURM_NODELIST", because="SLURM_PROCID is set")
    return Place(
        "Slurm",
        rank=_integer(env, "SLURM_PROCID", because="SLURM_NTASKS is set"),
        size=size,
        local_rank=_optional(env, "SLURM_LOCALID"),
        local_size=_tasks_here(env),
        address=env.get("MASTER_ADDR") or first_host(nodes),
        port=_optional(env, "MASTER_PORT") or _port_from(f"{job}.{step}"),
        generation=f"{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def pmi(env: Env) -> Place | None:
    """PMI_RANK, PMI_SIZE: mpirun of MPICH, Intel MPI, MVAPICH."""
    if "PMI_RANK" not in env and "PMI_SIZE" not in env:
        return None
    size = _integer(env, "PMI_SIZE", because="PMI_RANK is set")
    local_size = _optional(env, "MPI_LOCALNRANKS")
    return Place(
        "PMI",
        rank=_integer(env, "PMI_RANK", because="PMI_SIZE is set"),
        size=size,
        local_rank=_optional(env, "MPI_LOCALRANKID"),
        local_size=local_size,
        address=env.get("MASTER_ADDR") or _loopback_if(local_size == size),
        port=_optional(env, "MASTER_PORT") or _port_from(env.get("PMI_PORT", env.get("PMI_ID", ""))),
        generation=env.get("PMI_PORT", ""),
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list, without calling scontrol.

    Example:
        >>> first_host("gpu[007-010,12],cpu1")
        'gpu007'
    """
    match = re.match(r"([^,\[]+)((?:\[[^\]]*\][^,\[]*)*)", nodelist.strip())
    if not match:
        raise PlaceError(f"SLURM_NODELIST = {nodelist!r} names no host; set MASTER_ADDR to rank 0's host")
    ranges = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[2])
    return match[1] + ranges


def _checked(place: Place) -> Place:
    where = f"started by {place.source}: "
    if place.size < 1:
        raise PlaceError(f"{where}world size {place.size} must be at least 1")
    if not 0 <= place.rank < place.size:
        raise PlaceError(
            f"{where}rank {place.rank} is outside the world of {place.size}: expected 0 to {place.size - 1}; "
            "give each process its own RANK below WORLD_SIZE"
        )
    if place.local_rank is not None and place.local_rank < 0:
        raise PlaceError(f"{where}local rank {place.local_rank} must be at least 0")
    if place.local_rank is not None and place.local_size is not None and place.local_rank >= place.local_size:
        raise PlaceError(
            f"{where}local rank {place.local_rank} is outside this node's {place.local_size} ranks: "
            f"expected LOCAL_RANK 0 to {place.local_size - 1}"
        )
    return place


def _integer(env: Env, name: str, because: str) -> int:
    text = _required(env, name, because)
    try:
        return int(text)
    except ValueError:
        raise PlaceError(f"{name} = {text!r} is not a whole number") from None


def _required(env: Env, name: str, because: str) -> str:
    if not env.get(name):
        raise PlaceError(f"{name} is not set, but {because}: set it, or start with 'shoal train' or torchrun")
    return env[name]


def _optional(env: Env, name: str) -> int | None:
    return _integer(env, name, because="") if env.get(name) else None


def _address(env: Env, size: int) -> str | None:
    return _required(env, "MASTER_ADDR", because=f"WORLD_SIZE = {size}") if size > 1 else None


def _port(env: Env, size: int) -> int | None:
    return _integer(env, "MASTER_PORT", because=f"WORLD_SIZE = {size}") if size > 1 else None


def _tasks_here(env: Env) -> int | None:
    """Tasks on this node: SLURM_STEP_TASKS_PER_NODE is such as "4(x2),3", in the order of the node list."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts = [
        int(count)
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(repeat or 1))
    ]
    node = _optional(env, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _loopback_if(one_node: bool) -> str | None:
    return "127.0.0.1" if one_node else None


def _hnp_host(env: Env) -> str | None:
    """Open MPI 4 puts the address of the host of mpirun, where rank 0 runs by default, into this URI."""
    match = re.search(r"tcp://([^:,/]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    return match[1] if match else None


def _port_from(job: str) -> int | None:
    """A port in 15000-28999, below the kernel's ephemeral range, equal on all ranks of a job and step."""
    if not job:
        return None
    digits = 0
    for character in job:
        digits = (digits * 31 + ord(character)) % 14_000
    return 15_000 + digits
