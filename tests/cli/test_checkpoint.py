"""`shoal checkpoint` lists what there is, finds what is damaged, and takes plain tensors out and in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from typer.testing import CliRunner, Result

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import export_plain, whole_tensors
from shoal.checkpoint.store import alone_is_fine
from shoal.cli import app
from shoal.plan import Plan
from tests.ranks import run_ranks
from tests.train.test_loop import STEPS, losses, run, settings_for


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)], prog_name="shoal")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(2, run, settings_for(folder, Plan(shard=2), checkpoint={"every": 8}))
    return folder


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def newest(done: Path) -> Path:
    return done / "checkpoints" / f"step-{STEPS:08d}"


def tensors(done: Path) -> dict[str, Tensor]:
    return dict(whole_tensors(list_checkpoints(done / "checkpoints")[0][-1]))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)


def test_every_command_has_help_with_an_example() -> None:
    for name in ("ls", "check", "reshard", "export", "import"):
        result = shoal(name, "--help")
        assert result.exit_code == 0 and f"Example: shoal checkpoint {name} " in result.output


def test_a_runs_checkpoints_are_listed_with_why_one_is_refused(done: Path) -> None:
    (newest(done) / "rank-00001.bin").unlink()
    result = shoal("ls", done)
    heads, first, second = result.output.splitlines()
    assert result.exit_code == 0 and heads.split()[:3] == ["step", "size", "age"]
    assert first.split()[0] == "8" and "complete" in first and "shard 2" in first
    assert "refused" in second and "rank-00001.bin is missing" in second
    rows = json.loads(shoal("ls", done, "--json").output)
    assert [row["complete"] for row in rows] == [True, False] and rows[0]["step"] == 8


def test_a_check_of_what_is_whole_says_so_and_damage_ends_it_with_1_and_names(done: Path) -> None:
    result = shoal("check", done)
    assert result.exit_code == 0 and result.output.count("whole    ") == 2
    flip(newest(done) / "rank-00001.bin")
    for path in (done, newest(done)):
        result = shoal("check", path)
        assert result.exit_code == 1
        assert "DAMAGED" in result.output and "rank-00001.bin: tensor 'optimizer." in result.output
    (found,) = json.loads(shoal("check", newest(done), "--json").output)
    assert "rank-00001.bin" in found["damage"][0]
    assert shoal("check", done / "ranks").exit_code == 2


def test_a_save_that_did_not_finish_is_no_damage(done: Path) -> None:
    (done / "checkpoints" / "step-00000099.tmp").mkdir()
    assert shoal("check", done).exit_code == 0
    assert "did not finish" in shoal("ls", done).output


def test_whole_tensors_go_into_a_torch_file(done: Path, tmp_path: Path) -> None:
    result = shoal("export", done, tmp_path / "all.pt", "--json")
    right = tensors(done)
    assert json.loads(result.output) == {
        "step": STEPS,
        "tensors": len(right),
        "out": str(tmp_path / "all.pt"),
    }
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(found) == set(right) and all(torch.equal(found[name], right[name]) for name in right)
    assert shoal("export", done, tmp_path / "all.pt").exit_code == 2  # it is there


def test_weights_go_into_safetensors_files_under_their_names_in_the_model(done: Path, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert shoal("export", newest(done), tmp_path / "one", "--weights").exit_code == 0
    right = {n.partition(".")[2]: t for n, t in tensors(done).items() if n.startswith(("model.", "buffer."))}
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert set(found) == set(right) and all(torch.equal(found[name], right[name]) for name in right)
    checkpoint = list_checkpoints(done / "checkpoints")[0][-1]
    export_plain(checkpoint, tmp_path / "many", weights=True, shard_bytes=20_000)
    places = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(places) == set(right) and len(set(places.values())) > 1
    for name, file in places.items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], right[name])


def test_a_damaged_checkpoint_is_not_exported(done: Path, tmp_path: Path) -> None:
    flip(newest(done) / "rank-00000.bin")
    result = shoal("export", done, tmp_path / "all.pt")
    assert result.exit_code == 1 and not (tmp_path / "all.pt").exists()


@pytest.mark.parametrize("files", [1, 3, 40])
def test_a_checkpoint_is_written_again_in_another_number_of_files(
    files: int, done: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    result = shoal("reshard", done, packed, "--files", files, "--json")
    assert result.exit_code == 0, result.output
    written = Path(json.loads(result.stdout)["path"])
    sizes = [path.stat().st_size for path in written.glob("rank-*.bin")]
    assert len(sizes) == files and max(sizes) < 1.5 * sum(sizes) / files
    right, found = tensors(done), tensors(packed)
    assert list(found) == list(right)
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert shoal("check", packed).exit_code == 0
    old, new = (list_checkpoints(run / "checkpoints")[0][-1].manifest for run in (done, packed))
    assert {key for key in old if old[key] != new[key]} == {
        "save",
        "ranks",
        "written",
        "index_sha256",
        "files",
    }
    assert shoal("reshard", done, packed, "--files", files).exit_code == 2  # it is there already


def test_a_run_goes_on_from_what_was_written_again(done: Path, tmp_path: Path) -> None:
    shutil.rmtree(newest(done))
    assert shoal("reshard", done, tmp_path / "packed", "--files", 5).exit_code == 0
    run_ranks(2, run, settings_for(tmp_path / "packed", Plan(shard=2), checkpoint={"every": 8}))
    assert losses(tmp_path / "packed") == losses(done)[8:]


def test_a_damaged_checkpoint_is_not_written_again(done: Path, tmp_path: Path) -> None:
    flip(newest(done) / "rank-00001.bin")
    result = shoal("reshard", done, tmp_path / "packed", "--files", 1)
    assert result.exit_code == 1 and "rank-00001.bin: tensor" in result.output
    assert not any((tmp_path / "packed" / "checkpoints").iterdir())


def as_torch_file(done: Path, out: Path, weights: bool) -> Path:
    words = ["--weights"] * weights
    assert shoal("export", done, out / "weights.pt", *words).exit_code == 0
    return out / "weights.pt"


def as_safetensors(done: Path, out: Path, weights: bool) -> Path:
    pytest.importorskip("safetensors")
    words = ["--weights"] * weights
    assert shoal("export", done, out / "weights", *words).exit_code == 0
    return out / "weights"


def as_dcp(done: Path, out: Path, weights: bool) -> Path:
    state: dict[str, Any] = {n: t for n, t in tensors(done).items() if not weights or n.startswith("model.")}
    with alone_is_fine():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out / "dcp"), no_dist=True)
    return out / "dcp"


@pytest.mark.parametrize("made", [as_torch_file, as_safetensors, as_dcp])
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "all"])
def test_a_run_begins_with_what_is_imported(made: Any, weights: bool, done: Path, tmp_path: Path) -> None:
    source = made(done, tmp_path, weights)
    words = ["import", source, done / "job.toml", f"run.dir={tmp_path}/new", "--step", 5, "--json"]
    result = shoal(*words, *["--trust"] * (made is as_dcp))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["with_optimizer"] is not weights
    right, found = tensors(done), tensors(tmp_path / "new")
    assert set(found) == set(right)
    for name, tensor in found.items():
        expected = torch.zeros_like(tensor) if weights and name.startswith("optimizer.") else right[name]
        assert torch.equal(tensor, expected), name
    assert shoal(*words, *["--trust"] * (made is as_dcp)).exit_code == 2  # it has checkpoints now


def test_a_run_goes_on_from_what_was_imported(done: Path, tmp_path: Path) -> None:
    """Whole state and step: the same numbers as without the detour."""
    shutil.rmtree(newest(done))
    source = as_torch_file(done, tmp_path, weights=False)
    new = tmp_path / "new"
    assert shoal("import", source, done / "job.toml", f"run.dir={new}", "--step", 8).exit_code == 0
    run_ranks(2, run, settings_for(new, Plan(shard=2), checkpoint={"every": 8}))
    assert losses(new) == losses(done)[8:]


def test_a_pickle_is_only_opened_when_it_is_trusted(done: Path, tmp_path: Path) -> None:
    source = as_dcp(done, tmp_path, weights=True)
    with patch("pickle.load", side_effect=AssertionError("unpickled")):
        result = shoal("import", source, done / "job.toml", f"run.dir={tmp_path}/new")
    assert result.exit_code == 2 and "--trust" in result.output
    torch.save({"model.norm.weight": torch.device}, tmp_path / "code.pt")
    result = shoal("import", tmp_path / "code.pt", done / "job.toml", f"run.dir={tmp_path}/new")
    assert result.exit_code == 2 and "code.pt" in result.output and not (tmp_path / "new").exists()


def test_tensors_of_another_model_are_refused_by_name(done: Path, tmp_path: Path) -> None:
    right = tensors(done)
    name = next(name for name in right if name.startswith("model."))
    others = {
        "missing": {n: t for n, t in right.items() if n != name},
        "of no use": right | {"model.other": torch.zeros(1)},
        "has shape": right | {name: torch.zeros(1)},
    }
    for word, found in others.items():
        torch.save(found, tmp_path / "other.pt")
        result = shoal("import", tmp_path / "other.pt", done / "job.toml", f"run.dir={tmp_path}/{word}")
        assert result.exit_code == 2 and word in result.output
        assert (name if word != "of no use" else "model.other") in result.output
