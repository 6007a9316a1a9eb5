"""`shoal checkpoint`: what checkpoints a run has, whether they are what was written, and the way in and out for plain tensors."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.checkpoint.check import Checked
    from shoal.checkpoint.folder import Checkpoint, Refused

app = typer.Typer(
    name="checkpoint",
    help="List, check, reshard, export and import checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AS_JSON = typer.Option(False, "--json", help="Print as JSON, for machines.")


@app.command("ls")
def ls(
    run: Path = typer.Argument(help="A run directory, or a checkpoint."),
    as_json: bool = AS_JSON,
) -> None:
    """List a run's checkpoints: step, plan, size, age, and whether they are complete. Tensors are not read: see check.

    Example: shoal checkpoint ls runs/quickstart
    """
    from shoal.checkpoint.check import find
    from shoal.cli.show import fail

    try:
        rows = [_row(found) for found in find(run)]
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if rows:
        typer.echo(f"{'step':>9}  {'size':>14}  {'age':>8}  is        plan and folder")
    for row in rows:
        if row["complete"]:
            age = _age(time.time() - row["written"])
            size = f"{row['bytes'] / 2**20:,.1f} MiB"
            typer.echo(f"{row['step']:>9,}  {size:>14}  {age:>8}  complete  {row['plan']}  {row['path']}")
        else:
            typer.echo(f"{'-':>9}  {'':>14}  {'':>8}  refused   {row['path']}: {row['reason']}")
    if not rows:
        typer.echo("no checkpoint")


def _row(found: Checkpoint | Refused) -> dict[str, Any]:
    from shoal.checkpoint.folder import Refused
    from shoal.plan import Plan

    if isinstance(found, Refused):
        return {"path": str(found.path), "complete": False, "reason": found.reason}
    plan = found.manifest.get("plan")
    return {
        "path": str(found.path),
        "complete": True,
        "step": found.step,
        "plan": Plan.model_validate(plan).describe() if plan else "",
        "bytes": sum(found.manifest["files"].values()),
        "written": found.manifest["written"],
    }


def _age(seconds: float) -> str:
    """In the largest unit of which there is more than one.

    Example:
        >>> _age(7300)
        '2 h'
    """
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command("check")
def check(
    path: Path = typer.Argument(help="A run directory, or a checkpoint."),
    as_json: bool = AS_JSON,
) -> None:
    """Read every byte of a checkpoint, or of all in a run, and compare it with its checksums. Exits with 1 on damage.

    A save that did not finish is no damage: no run goes on from it.

    Example: shoal checkpoint check runs/quickstart
    """
    from shoal.checkpoint import check as checking
    from shoal.checkpoint.folder import Refused
    from shoal.cli.show import fail

    try:
        found = checking.find(path)
    except ValueError as error:
        raise fail(str(error)) from error
    checked = [
        checking.check(entry) for entry in found if not isinstance(entry, Refused) or entry.was_complete
    ]
    if as_json:
        typer.echo(json.dumps([entry._asdict() | {"path": str(entry.path)} for entry in checked]))
    for entry in [] if as_json else checked:
        _tell(entry)
    if not checked and not as_json:
        typer.echo("no checkpoint")
    raise typer.Exit(1 if any(entry.damage for entry in checked) else 0)


def _tell(checked: Checked) -> None:
    if not checked.damage:
        speed = checked.size_bytes / max(checked.seconds, 1e-9) / 1e6
        typer.echo(f"whole    {checked.path}  {checked.size_bytes:,} bytes, {speed:,.0f} MB/s")
    for damage in checked.damage:
        typer.echo(f"DAMAGED  {checked.path}  {damage}")


@app.command("export")
def export(
    path: Path = typer.Argument(help="A checkpoint, or a run directory: then its newest."),
    out: Path = typer.Argument(
        help="A folder for safetensors files, or a file that ends in .pt for torch.load."
    ),
    weights: bool = typer.Option(
        False, "--weights", help="Only parameters and buffers, under their names in the model."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Write the whole tensors of a checkpoint as they are. For a folder that transformers reads: shoal export.

    Example: shoal checkpoint export runs/quickstart weights.pt --weights
    """
    from shoal.checkpoint.check import one
    from shoal.checkpoint.folder import CheckpointError
    from shoal.checkpoint.plain import export_plain
    from shoal.cli.show import fail

    try:
        checkpoint = one(path)
        count = export_plain(checkpoint, out, weights=weights)
    except ValueError as error:
        raise fail(str(error)) from error
    except (CheckpointError, OSError) as error:
        raise fail(str(error), code=1) from error
    told = {"step": checkpoint.step, "tensors": count, "out": str(out)}
    typer.echo(
        json.dumps(told) if as_json else f"exported {count} tensors of step {checkpoint.step} into {out}"
    )


@app.command("reshard")
def reshard(
    path: Path = typer.Argument(help="A checkpoint, or a run directory: then its newest."),
    out: Path = typer.Argument(help="A run directory, which may be new."),
    files: int = typer.Option(..., min=1, help="Files of tensors in it."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a checkpoint again, in another number of files. No plan needs that: any reads what any other wrote.

    It is for file systems that are slow with thousands of files, and for copies.

    Example: shoal checkpoint reshard runs/quickstart runs/packed --files 1
    """
    from shoal.checkpoint.check import one
    from shoal.checkpoint.folder import CheckpointError
    from shoal.checkpoint.rewrite import rewrite
    from shoal.cli.show import fail

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # all files of the checkpoint are open at once
    try:
        checkpoint = one(path)
        before, written = checkpoint.manifest["ranks"], rewrite(checkpoint, out, files)
    except ValueError as error:
        raise fail(str(error)) from error
    except (CheckpointError, OSError) as error:
        raise fail(str(error), code=1) from error
    told = {"step": checkpoint.step, "files": files, "path": str(written)}
    typer.echo(
        json.dumps(told)
        if as_json
        else f"wrote step {checkpoint.step}, of {before} files, as {files} into {written}"
    )


@app.command("import")
def import_(
    source: Path = typer.Argument(
        help="A torch file, safetensors files, a checkpoint of DeepSpeed ZeRO, or a DCP folder (with --trust)."
    ),
    job: str = typer.Argument(help="The job file of the run that is to begin with it."),
    overrides: list[str] = typer.Argument(None, help="key=value words, such as run.dir=runs/mine"),
    step: int | None = typer.Option(
        None,
        min=0,
        help="Optimizer steps that count as done; left out: as many as DeepSpeed says, else none.",
    ),
    weights: bool = typer.Option(
        False, "--weights", help="Leave optimizer state out, and begin with a new one."
    ),
    trust: bool = typer.Option(
        False, "--trust", help="Read a DCP folder, whose .metadata is a pickle that can run any code."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Begin a run with weights from elsewhere: its first checkpoint, from which shoal train goes on.

    Names are those of the model, or those that shoal checkpoint export writes. Without optimizer state, that of a new run is
    taken. Of DeepSpeed, the folder with the file latest is taken, or one with the files of a step in it.

    Example: shoal checkpoint import weights.pt examples/quickstart.toml run.dir=runs/mine
    """
    from shoal.checkpoint.folder import CheckpointError
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.config import load
    from shoal.launch.begin import begin_with

    settings = load(job, overrides or [])
    try:
        with stdout_on_stderr(active=as_json):
            begun = begin_with(source, settings, step=step, trust=trust, weights_only=weights)
    except ValueError as error:
        raise fail(str(error)) from error
    except (CheckpointError, OSError) as error:
        raise fail(str(error), code=1) from error
    if as_json:
        typer.echo(json.dumps(begun._asdict() | {"path": str(begun.path)}))
        return
    optimizer = "with its optimizer state" if begun.with_optimizer else "with a new optimizer"
    typer.echo(f"imported {begun.tensors} tensors {optimizer}, after step {begun.step}, into {begun.path}")
