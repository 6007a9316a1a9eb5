"""What DeepSpeed's optimizer had is what is taken over, to the bit, and what is missing or mixed up is named.

The folders in `deepspeed/` were written by DeepSpeed 0.19.8 itself (`deepspeed/write.py`), with a hash of each tensor that its
live optimizer held. Other numbers of ranks and other alignments are made here, in the same form.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from shoal.checkpoint.deepspeed import Taken, deepspeed_folder, read_deepspeed
from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.checkpoint.unpickle import Inert, load_inert
from shoal.cli import app
from shoal.config import Settings
from shoal.plan import Plan
from shoal.run import read_json_lines
from tests.checkpoint.deepspeed.write import CASES, MODEL, STEPS, VOCAB, digest
from tests.ranks import run_ranks
from tests.train.test_loop import run, settings_for

HERE = Path(__file__).parent / "deepspeed"
KINDS = ("exp_avg", "exp_avg_sq", "step")


def read(folder: Path, **how: bool) -> Taken:
    found = deepspeed_folder(folder)
    assert found is not None
    return read_deepspeed(found, **how)


def hashes(case: str) -> dict[str, str]:
    return json.loads((HERE / case / "hashes.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights_and_state_are_those_of_deepspeeds_optimizer_to_the_bit(case: str) -> None:
    taken, right = read(HERE / case), hashes(case)
    assert taken.step == STEPS and right
    assert {name: digest(taken.tensors[name]) for name in right} == right
    kinds = ("momentum_buffer",) if case == "stage2-sgd" else KINDS
    weights = [name for name in taken.tensors if not name.startswith("optimizer.")]
    trained = [name for name in weights if case != "stage3-frozen" or not name.startswith("blocks.0.")]
    assert set(taken.tensors) == {
        *weights,
        *(f"optimizer.{name}.{kind}" for name in trained for kind in kinds),
    }
    assert all(taken.tensors[name].dtype == torch.float32 for name in trained)
    assert all(tensor == STEPS for name, tensor in taken.tensors.items() if name.endswith(".step"))


def test_a_step_is_found_by_the_file_latest_or_by_its_own_folder() -> None:
    case = HERE / "stage2-bf16"
    assert deepspeed_folder(case) == deepspeed_folder(case / "global_step4") == case / "global_step4"
    assert deepspeed_folder(HERE) is None and deepspeed_folder(HERE / "write.py") is None


def shoal_import(source: Path, new: Path, *words: object) -> Result:
    new.parent.mkdir(parents=True, exist_ok=True)
    job = new.with_suffix(".toml")
    job.write_text(settings(new).to_toml())
    words = ("checkpoint", "import", source, job, *words)
    return CliRunner().invoke(app, list(map(str, words)), prog_name="shoal")


def settings(folder: Path, plan: Plan | None = None) -> Settings:
    data = {"source": "synthetic", "vocab": VOCAB, "seq_len": 16, "eval_fraction": 0.0}
    return settings_for(folder, plan or Plan(), model=MODEL, data=data, train={"steps": STEPS + 4})


def newest(folder: Path) -> dict[str, Tensor]:
    return dict(whole_tensors(list_checkpoints(folder / "checkpoints")[0][-1]))


@pytest.mark.parametrize("case", ["stage1-fp16", "stage1-bf16", "stage2-bf16", "stage3-bf16"])
def test_a_run_begins_with_what_deepspeed_had(case: str, tmp_path: Path) -> None:
    result = shoal_import(HERE / case, tmp_path / "new", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["step"] == STEPS and told["with_optimizer"]
    found, right = newest(tmp_path / "new"), hashes(case)
    for name, tensor in found.items():
        name = name.removeprefix("model.")
        if name in right:
            assert digest(tensor) == right[name], name
        else:
            assert name.startswith("optimizer.") and torch.equal(tensor, read(HERE / case).tensors[name]), (
                name
            )


def test_training_goes_on_after_deepspeeds_steps_under_any_plan(tmp_path: Path) -> None:
    assert shoal_import(HERE / "stage3-bf16", tmp_path / "new").exit_code == 0
    before = newest(tmp_path / "new")
    run_ranks(2, run, settings(tmp_path / "new", Plan(shard=2)))
    lines = read_json_lines(tmp_path / "new" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 6, 7, 8] and all(
        math.isfinite(line["loss"]) for line in lines
    )
    after = newest(tmp_path / "new")
    assert all(after[name] == STEPS + 4 for name in after if name.endswith(".step"))
    assert not torch.equal(after["model.embedding.weight"], before["model.embedding.weight"])


@pytest.mark.parametrize("case", ["stage2-sgd", "stage3-frozen"])
def test_state_that_the_jobs_optimizer_has_no_use_for_can_be_left_out(case: str, tmp_path: Path) -> None:
    result = shoal_import(HERE / case, tmp_path / "new")
    assert result.exit_code == 2 and "optimizer." in result.output
    assert shoal_import(HERE / case, tmp_path / "new", "--weights").exit_code == 0
    found = newest(tmp_path / "new")
    assert digest(found["model.embedding.weight"]) == hashes(case)["embedding.weight"]
    assert not any(tensor.any() for name, tensor in found.items() if name.startswith("optimizer."))


# What is wrong is named.


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a file anew with something in it changed."""
    held = load_inert(path)
    held = {key: held[key] for key in held}
    saved = held.get("optimizer_state_dict")
    if saved and isinstance(saved.get("zero_stage"), Inert):
        saved["zero_stage"] = saved["zero_stage"].args[0]
        saved["loss_scaler"] = None
    change(held)
    torch.save(held, path.with_name("new"))
    path.with_name("new").replace(path)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def of_three_ranks(held: dict[str, Any]) -> None:
    held["optimizer_state_dict"]["partition_count"] = 3


def of_another_step(held: dict[str, Any]) -> None:
    saved = held["optimizer_state_dict"]
    base = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
    for state in base["state"].values():
        state["step"] = torch.tensor(7.0)


def of_a_later_save(held: dict[str, Any]) -> None:
    held["global_steps"] = 7


def of_a_smaller_model(held: dict[str, Any]) -> None:
    saved = held["optimizer_state_dict"]
    name = "fp32_flat_groups" if "fp32_flat_groups" in saved else "single_partition_of_fp32_groups"
    saved[name] = [flat[: len(flat) // 2] for flat in saved[name]]


def of_no_step(held: dict[str, Any]) -> None:
    saved = held["optimizer_state_dict"]
    (saved.get("base_optimizer_state") or saved["optimizer_state_dict"])["state"] = {}


SECOND = {1: "zero_pp_rank_1_mp_rank_00_optim_states.pt"} | dict.fromkeys(
    (2, 3), "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
)
MODELS = dict.fromkeys((1, 2), "mp_rank_00_model_states.pt") | {
    3: "zero_pp_rank_1_mp_rank_00_model_states.pt"
}


@pytest.fixture(params=["stage1-fp16", "stage2-bf16", "stage3-bf16"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[int, Path]:
    """A stage, and the folder of a step."""
    shutil.copytree(HERE / request.param, tmp_path / "saved")
    return int(request.param[5]), tmp_path / "saved" / "global_step4"


def test_a_file_that_is_missing_is_named(saved: tuple[int, Path]) -> None:
    stage, folder = saved
    for name in (SECOND[stage], MODELS[stage]):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(ValueError, match=rf"{name}' is missing"):
            read(folder.parent)
        (folder / name).write_bytes(kept)
    read(folder.parent)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="latest' names 'global_step4', and there is no such folder"):
        read(folder.parent)


def test_a_file_that_was_cut_off_or_is_something_else_is_named(saved: tuple[int, Path]) -> None:
    stage, folder = saved
    for name in (SECOND[stage], MODELS[stage]):
        kept = (folder / name).read_bytes()
        cut_off(folder / name)
        with pytest.raises(ValueError, match=rf"{name}' cannot be read: "):
            read(folder.parent)
        torch.save({"weight": torch.zeros(2)}, folder / name)
        with pytest.raises(ValueError, match=f"{name}' (holds something else|does not say)"):
            read(folder.parent)
        (folder / name).write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (of_three_ranks, "is of 3 ranks, and "),
        (of_another_step, r"is of optimizer step 7\.0, and .* of 4\.0"),
        (of_no_step, "is of optimizer state none, and "),
        (of_a_smaller_model, "a group (has|with) .* weights, and "),
    ],
)
def test_a_rank_of_another_save_is_named(
    change: Callable[[dict[str, Any]], object], told: str, saved: tuple[int, Path]
) -> None:
    stage, folder = saved
    edit(folder / SECOND[stage], lambda held: None)
    read(folder.parent)  # writing it anew is not what is wrong
    edit(folder / SECOND[stage], change)
    if change is of_three_ranks and stage == 3:  # there it is true
        change, told = (
            lambda held: held["optimizer_state_dict"].update(partition_count=2),
            "is of 2 ranks, and ",
        )
        edit(folder / SECOND[stage], change)
    with pytest.raises(ValueError, match=f"{SECOND[stage]}.*{told}"):
        read(folder.parent)


def test_model_files_of_two_steps_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(HERE / "stage3-bf16", tmp_path / "saved") / "global_step4"
    edit(folder / MODELS[3], of_a_later_save)
    with pytest.raises(ValueError, match=f"{MODELS[3]}' is of global_steps 7, and .* of 4"):
        read(folder.parent)


def test_files_of_more_ranks_and_of_two_precisions_are_named(saved: tuple[int, Path]) -> None:
    stage, folder = saved
    extra = folder / SECOND[stage].replace("rank_1", "rank_7")
    shutil.copy(folder / SECOND[stage], extra)
    with pytest.raises(ValueError, match=rf"{extra.name}' is of . ranks, and .*two saves"):
        read(folder.parent)
    extra.rename(folder / f"fp16_{SECOND[1]}")
    with pytest.raises(ValueError, match="holds files of two saves"):
        read(folder.parent)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallel"),
        ("layer_3_expert_0_mp_rank_00_model_states.pt", "experts of a mixture"),
    ],
)
def test_a_model_that_is_cut_in_other_ways_is_refused(name: str, told: str, tmp_path: Path) -> None:
    folder = shutil.copytree(HERE / "stage1-fp16", tmp_path / "saved") / "global_step4"
    (folder / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}' .*{told}"):
        read(folder.parent)


# No code of the files' writers runs.


class Evil:
    """When it is unpickled, makes a file, or calls the system."""

    def __init__(self, call: Any, *args: object) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    import os

    folder = shutil.copytree(HERE / "stage2-bf16", tmp_path / "saved") / "global_step4"
    made = tmp_path / "made"
    evil = Evil(exec, f"open({str(made)!r}, 'w')")
    for name in (SECOND[2], MODELS[2]):
        edit(
            folder / name,
            lambda held: held.update(client=evil, more=[Evil(Path, "x"), torch.nn.Linear(2, 2)]),
        )
    taken = read(folder.parent)
    assert not made.exists()
    assert digest(taken.tensors["norm.weight"]) == hashes("stage2-bf16")["norm.weight"]
    torch.load(folder / SECOND[2], weights_only=False)
    assert made.exists()  # it would have
    edit(folder / SECOND[2], lambda held: held.update(client=Evil(os.system, "true")))
    with pytest.raises(ValueError, match=rf"{SECOND[2]}' cannot be read: .*posix.system"):
        read(folder.parent)


# Other numbers of ranks, and what DeepSpeed writes with other settings.


def made_line(tensors: list[Tensor], ranks: int, align: int) -> tuple[list[Tensor], list[int]]:
    """Tensors end to end, each but the last followed by padding to a multiple of `align`, in equal parts for the ranks."""
    line, paddings = torch.zeros(0), []
    for tensor in tensors:
        line = torch.cat([line, tensor.flatten()])
        paddings.append(0 if tensor is tensors[-1] else -len(line) % align)
        line = torch.cat([line, torch.full((paddings[-1],), math.nan)])
    end = torch.full((-len(line) % (2 * ranks),), math.nan)
    return list(torch.cat([line, end]).chunk(ranks)), paddings


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("form", ["lean", "padded", "elastic"])
def test_lines_over_any_number_of_ranks_are_put_together(
    ranks: int, align: int, form: str, tmp_path: Path
) -> None:
    torch.manual_seed(ranks)
    shapes = {"a": (3, 5), "b": (1,), "c": (7,), "d": (2, 2, 2), "e": ()}
    right = {
        name: torch.randn(shape)
        for key, shape in shapes.items()
        for name in (key, f"optimizer.{key}.exp_avg", f"optimizer.{key}.exp_avg_sq")
    }
    parts: dict[str, list[Tensor]] = {}
    paddings: list[int] = []
    for kind, name in (
        ("", "{}"),
        ("exp_avg", "optimizer.{}.exp_avg"),
        ("exp_avg_sq", "optimizer.{}.exp_avg_sq"),
    ):
        parts[kind], paddings = made_line([right[name.format(key)] for key in shapes], ranks, align)
    used = sum(map(math.prod, shapes.values())) + sum(paddings)
    for rank in range(ranks):
        flat = {kind: part[rank].clone() for kind, part in parts.items()}
        lean = max(0, min(len(flat[""]), used - rank * len(flat[""])))
        weights = flat.pop("")[: None if form == "padded" else lean].clone()
        state: dict[str, Any] = {
            kind: value[: lean if form == "elastic" else None].clone() for kind, value in flat.items()
        }
        saved: dict[str, Any] = {
            "zero_stage": 2,
            "partition_count": [ranks],
            "single_partition_of_fp32_groups": [weights],
            # some optimizers count their steps in the group
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"params": [0], "step": 9}]},
        }
        if form == "elastic":
            saved |= {"base_optimizer_state": [state], "base_optimizer_state_step": 9}
        if align > 1:
            saved["param_alignment_paddings"] = [paddings]
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, path)
    model = {"param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}], "global_steps": 9}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    taken = read(tmp_path)
    right |= {f"optimizer.{name}.step": torch.tensor(9.0) for name in shapes}
    assert set(taken.tensors) == set(right)
    assert all(torch.equal(tensor, right[name]) for name, tensor in taken.tensors.items())
    assert set(read(tmp_path, weights_only=True).tensors) == set(shapes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_pieces_over_any_number_of_ranks_are_put_together(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(ranks)
    right = {
        name: torch.randn(shape) for name, shape in {"a": (3, 5), "b": (1,), "c": (7,), "d": (2, 9)}.items()
    }
    cut = {
        name: torch.cat([tensor.flatten(), torch.full((-tensor.numel() % ranks,), math.nan)]).chunk(ranks)
        for name, tensor in right.items()
    }
    for rank in range(ranks):
        groups = [torch.cat([cut[name][rank] for name in names]) for names in ("a", "bc", "d")]
        saved = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": groups}
        torch.save(
            {"optimizer_state_dict": saved}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
        model = {
            "param_shapes": [{name: tensor.shape for name, tensor in right.items()}],
            "shared_params": {"z": "a"},
        }
        torch.save(model, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    right["z"] = right["a"]
    taken = read(tmp_path)
    assert set(taken.tensors) == set(right) and taken.step == 0
    assert all(torch.equal(tensor, right[name]) for name, tensor in taken.tensors.items())
