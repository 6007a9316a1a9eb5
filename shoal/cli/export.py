"""`shoal export`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

import typer


class Kind(StrEnum):
    """Types in which weights are written."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def export(
    run: Path = typer.Argument(help="A run directory."),
    out: Path = typer.Argument(help="The folder to write."),
    dtype: Kind | None = typer.Option(None, help="Type of the weights; left out: that of the masters."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Write a run's last checkpoint as a folder for transformers' from_pretrained.

    Example: shoal export runs/quickstart exported
    """
    import torch

    from shoal.cli.show import fail
    from shoal.train.export import export_run

    types = {Kind.FP32: torch.float32, Kind.BF16: torch.bfloat16, Kind.FP16: torch.float16}
    try:
        step = export_run(run, out, types[dtype] if dtype else None)
    except ValueError as error:
        raise fail(str(error)) from error
    except RuntimeError as error:
        raise fail(str(error), code=1) from error
    told = {"step": step, "folder": str(out)}
    typer.echo(json.dumps(told) if as_json else f"exported step {step} into {out}")
