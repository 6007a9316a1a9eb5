"""Before ranks start nothing is left to be chosen, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cluster import Cluster
from shoal.config import ConfigError, Settings, apply_overrides, parse
from shoal.data.format import read_index
from shoal.launch import ready
from shoal.launch.ready import complete_plan, make_ready, vocab_of, which_cluster, workload
from shoal.layout import Layout
from shoal.models.llama import Llama
from shoal.models.presets import num_parameters, resolve
from shoal.plan import Plan


def settings(*words: str, **tables: Any) -> Settings:
    base: dict[str, Any] = {
        "model": {"preset": "1m"},
        "data": {"source": "synthetic", "vocab": 300, "seq_len": 32},
        "train": {"global_batch": 8},
    }
    return parse(apply_overrides(base | tables, words), where="test")


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two CPU ranks, whatever this one is."""
    monkeypatch.setattr(ready, "detect_cluster", lambda: Cluster.parse("2 cpu"))


def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "detect_cluster", lambda: Cluster.parse("8 h100"))


def test_with_nothing_said_this_machine_is_used_whole() -> None:
    assert make_ready(settings()).plan == Plan(replicate=2, micro_batch=4)


def test_a_plan_that_is_said_is_kept_as_it_is() -> None:
    said = settings("plan.shard=4", "plan.zero=1", "plan.micro_batch=2")
    assert make_ready(said).plan == said.plan


def test_of_a_plan_without_degrees_the_degrees_are_chosen() -> None:
    plan = make_ready(settings("plan.micro_batch=2", "plan.recompute=full")).plan
    assert plan == Plan(replicate=2, micro_batch=2, recompute="full")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "shard 8 (ZeRO-2), micro-batch 2, CUDA graphs"),
        (["plan.cuda_graphs=true"], "shard 8 (ZeRO-2), micro-batch 2, CUDA graphs"),
        (["plan.recompute=full"], "replicate 8, micro-batch 2, recompute full, compiled as a whole"),
        (
            ["plan.offload=optimizer"],
            "replicate 8, micro-batch 2, optimizer in host memory, compiled as a whole",
        ),
        (["plan.compile=model"], "replicate 8, micro-batch 2, compiled as a whole"),
        (["plan.cuda_graphs=false"], "replicate 8, micro-batch 2, compiled as a whole"),
        (["plan.shard=8", "plan.recompute=full"], "shard 8 (ZeRO-3), recompute full"),
        (["plan.zero=3"], "shard 8 (ZeRO-3), micro-batch 2, CUDA graphs"),
    ],
)
def test_small_llamas_on_gpus_are_recorded_where_what_is_said_allows_it(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    eight_gpus(monkeypatch)
    plan = make_ready(settings(*words, "train.global_batch=16")).plan
    assert plan is not None and plan.describe() == expected


def test_once_ready_always_ready() -> None:
    once = make_ready(settings())
    assert make_ready(once) == once
    assert make_ready(Settings.from_toml(once.to_toml())) == once


def test_more_cpu_ranks_than_cores_may_be_asked_for() -> None:
    assert which_cluster(settings("plan.replicate=4", "plan.shard=2")).describe() == "8 cpu"
    assert which_cluster(settings(), ranks=3).describe() == "3 cpu"


def test_gpus_that_are_not_there_are_refused_with_degrees_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch)
    with pytest.raises(ConfigError, match=r"16 ranks, but the cluster has 8 devices .*plan\.shard=8"):
        make_ready(settings("plan.shard=16", "train.global_batch=16"))


def test_a_cluster_that_is_not_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cluster = '4x8 h100', but this machine is 2 cpu; .*torchrun"):
        make_ready(settings("cluster=4x8 h100"))
    eight_gpus(monkeypatch)
    assert which_cluster(settings("cluster=4 h100")).num_devices == 4


def test_ranks_that_a_launcher_started_may_be_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch)
    assert which_cluster(settings("cluster=4x8 h100"), ranks=32).num_devices == 32
    assert which_cluster(settings(), ranks=32).describe() == "4x8 h100"
    assert which_cluster(settings(), ranks=12).describe() == "12 h100"


def test_a_cluster_that_is_not_understood_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster = '8 h1000' is not understood"):
        make_ready(settings("cluster=8 h1000"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.global_batch=7"], "train.global_batch = 7"),
        (["model.preset=6m"], "model.preset = '6m' is unknown"),
        (["model.heads=3"], "model.heads = 3"),
        (["model.vocab=100"], "model.vocab = 100 is smaller than the tokenizer's 300"),
        (["plan.micro_batch=3"], "plan.micro_batch = 3"),
        (["plan.expert=2"], "expert = 2 re-uses the ranks of shard x context x tensor = 1"),
        (["plan.tensor=4"], "plan.tensor = 4 does not divide model.heads = 2"),
        (["plan.shard=3"], "train.global_batch = 8"),
        (["data.source=nosuch.txt"], "nosuch.txt"),
        (["model.family=nosuch_module:build"], "nosuch_module"),
        (["train.objective=nosuch_module:loss"], "nosuch_module"),
        (["train.objective=math:pi"], "is no objective"),
        (["run.backend=mpi"], "backend = 'mpi'"),
        (["run.init_method=tcp://host"], "init_method = 'tcp://host'"),
        (["run.init_method=udp://host:1"], "init_method = 'udp://host:1'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_ready(settings(*words))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_file_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import nosuch_package\n")
    with pytest.raises(
        ConfigError, match=r"ModuleNotFoundError: .*'nosuch_package', at .*net\.py:1 in <module>"
    ):
        make_ready(settings(model={"family": f"{file}:build"}))


def test_an_option_that_a_model_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'torch.nn:Linear' does not take model.options = {'inn': 2}"):
        make_ready(settings(model={"family": "torch.nn:Linear", "options": {"inn": 2}}))


def test_a_plan_that_does_not_fit_is_refused_before_text_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    words = [f"data.source={tmp_path / 'text.txt'}", f"run.cache={tmp_path / 'cache'}", "plan.shard=3"]
    with pytest.raises(ConfigError):
        make_ready(settings(*words))
    assert not (tmp_path / "cache").exists()


def test_text_is_prepared_once_and_gives_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text, long enough to be cut into a few windows. " * 20)
    words = [
        f"data.source={tmp_path / 'text.txt'}",
        f"run.cache={tmp_path / 'cache'}",
        "data.tokenizer=bytes",
        "data.eval_fraction=0",
    ]
    once = make_ready(settings(*words))
    assert once.run.data is not None
    assert read_index(Path(once.run.data)).vocab == vocab_of(once) == 257
    changed = Path(once.run.data, "index.json").stat().st_mtime_ns
    assert make_ready(settings(*words)) == once
    assert Path(once.run.data, "index.json").stat().st_mtime_ns == changed


def test_the_size_of_a_job_is_its_models() -> None:
    ours = settings()
    assert workload(ours).parameters == num_parameters(resolve(ours.model, 300))
    own = settings(
        model={"family": "torch.nn:Linear", "options": {"in_features": 7, "out_features": 3}},
        data={"source": "torch.nn:Linear"},
    )
    assert workload(own).parameters == 7 * 3 + 3


def test_activations_are_about_those_that_autograd_keeps() -> None:
    import torch

    said = settings("model.dim=128", "model.layers=4", "data.seq_len=64")
    model = Llama(resolve(said.model, 300))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.zeros(1, 64, dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.requires_grad
    assert workload(said).activation_bytes_per_sample == pytest.approx(sum(kept.values()), rel=0.5)


def test_a_large_model_is_cut_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch)
    plan = complete_plan(settings("model.preset=8b", "train.precision=bf16"), Cluster.parse("8 h100"))
    assert (plan.shard, plan.zero_stage) == (8, 2)


def test_fp32_gathers_twice_the_bytes_of_bf16_and_is_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch)
    plan = complete_plan(settings("model.preset=8b", "train.precision=fp32"), Cluster.parse("8 h100"))
    assert (plan.shard, plan.zero_stage) == (8, 3)


def test_a_zero_stage_that_is_said_is_kept_and_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch)
    plan = complete_plan(settings("plan.zero=2"), Cluster.parse("8 h100"))
    assert (plan.replicate, plan.shard, plan.zero_stage) == (1, 8, 2)
    whole = complete_plan(settings("plan.zero=0", "model.preset=8b"), Cluster.parse("8 h100"))
    assert (whole.replicate, whole.shard) == (8, 1)


def test_a_zero_stage_is_heeded_on_nodes_of_one_device_and_means_nothing_on_one() -> None:
    plan = complete_plan(settings("plan.zero=2"), Cluster.parse("4x1 cpu"))
    assert (plan.replicate, plan.shard, plan.zero_stage) == (1, 4, 2)
    assert complete_plan(settings("plan.zero=2"), Cluster.parse("1 cpu")).zero_stage == 0


@pytest.mark.parametrize("word", ["model.preset=9b", "train.global_batch=7", "plan.schedule=zbv"])
def test_a_mistake_is_found_before_data_is_prepared(
    word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    eight_gpus(monkeypatch)
    with pytest.raises(ConfigError, match=word.partition("=")[0].rpartition(".")[2]):
        make_ready(settings(word, f"run.cache={tmp_path}", data={"source": "stdlib"}))
    assert not list(tmp_path.iterdir())


def test_a_layout_of_ones_own_is_checked_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "model": {"family": "tests.train.dropout:build"},
        "data": {"source": "tests.train.dropout:dataset"},
        "train": {"objective": "tests.train.dropout:loss", "global_batch": 8},
    }
    for axis in ("tensor", "context", "pipeline"):
        with pytest.raises(ConfigError, match=rf"plan\.{axis} = 2, but Net has no layout"):
            make_ready(settings(f"plan.{axis}=2", "plan.micro_batch=4", **own))
    monkeypatch.setattr("tests.train.dropout.Net.layout", Layout(region=("layers.*.upp",)), raising=False)
    with pytest.raises(ConfigError, match=r"no module of Net is named 'layers\.\*\.upp'"):
        make_ready(settings("plan.tensor=2", **own))
    monkeypatch.setattr("tests.train.dropout.Net.layout", Layout(), raising=False)
    with pytest.raises(ConfigError, match="names no attention, or no inputs that have a sequence"):
        make_ready(settings("plan.context=2", **own))


def test_copies_are_not_compared_where_there_is_one() -> None:
    with pytest.raises(ConfigError, match=r"run\.compare_every = 5, but the plan .* has one copy"):
        make_ready(settings("run.compare_every=5", "plan.shard=2", "plan.compile=false"))


def test_shares_are_of_ranks_in_an_order_that_machines_do_not_keep() -> None:
    with pytest.raises(
        ConfigError, match=r"plan\.shares = \[3, 1\] .* with run\.nodes machines have ranks in the order"
    ):
        make_ready(settings("run.nodes=2", "plan.replicate=2", "plan.shares=3,1"))
