"""`shoal bench`: what a job's step costs on this machine and what it is made of, and what its devices and links take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.bench.ask import Ask
    from shoal.bench.figures import Record
    from shoal.config import Settings

app = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.command("step")
def step(
    job: str = typer.Argument(help="A job file."),
    overrides: list[str] = typer.Argument(
        None, help="key=value words, such as plan.shard=2 data.seq_len=512"
    ),
    steps: int = typer.Option(20, min=2, help="Steps that are counted."),
    warmup: int = typer.Option(
        None, min=1, help="Steps before them; left out: 3, on GPUs as many more as heat them for 8 seconds."
    ),
    profile: bool = typer.Option(False, "--profile", help="Profile one more step: a table, and trace files."),
    out: Path = typer.Option(
        None, help="Folder of the results; left out: runs/bench/<name of the job file>."
    ),
    peers: str = typer.Option(
        "", "--against", help="Peers to run on the same job, such as torchtitan,deepspeed:stage=3,fsdp2,ddp."
    ),
    also: list[str] = typer.Option(
        None, help="Words that make one more row of the job, such as another plan; repeatable."
    ),
    limit: float = typer.Option(300.0, min=1.0, help="Seconds that a peer may take."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON, for machines."),
) -> None:
    """Time a job's own steps under its plan, say what they are made of, and set them beside its peers'.

    Example: shoal bench step examples/quickstart.toml plan.shard=2 --steps 5 --profile
    """
    from shoal.bench.ask import Ask
    from shoal.bench.step import BenchError
    from shoal.cli.show import fail, stdout_on_stderr

    words = overrides or []
    folder = (out or Path("runs", "bench", Path(job).stem)).resolve()
    ask = Ask(steps, warmup, str(folder) if profile else None)
    try:
        with stdout_on_stderr(active=as_json):
            if peers or also:
                record, text = _contest(job, words, also or [], peers, ask, folder, limit)
            else:
                record, text = _alone(job, words, ask, folder)
    except ValueError as error:
        raise fail(str(error)) from error
    except BenchError as error:
        raise fail(str(error), code=1) from error
    typer.echo(json.dumps(record) if as_json else text)
    failed = [row["name"] for row in record.get("rows", []) if "step_s" not in row]
    raise typer.Exit(1 if failed else 0)


@app.command("device")
def device(
    out: Path = typer.Option(None, help="File of the profile; left out: runs/bench/<kind of device>.json."),
    ranks: int = typer.Option(
        None, min=1, help="Ranks, one a device; left out: all GPUs of this machine, or 2 on a CPU."
    ),
    seconds: float = typer.Option(
        None, min=0.1, help="How long ranks measure, beside their start; left out: 50, on CPUs 8."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the profile as JSON, for machines."),
) -> None:
    """Measure what this machine's devices, host and links take, and write it as a profile.

    Example: shoal bench device --seconds 5
    """
    from shoal.bench.device import bench_device, ranks_of, require_file
    from shoal.bench.device_show import describe_profile
    from shoal.bench.step import BenchError
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.run import write_whole
    from shoal.world import detect_cluster

    cluster = detect_cluster()
    file = (out or Path("runs", "bench", f"{cluster.device.kind}.json")).resolve()
    try:
        count = ranks_of(cluster, ranks)
        require_file(file)
        with stdout_on_stderr(active=as_json):
            profile = bench_device(cluster, count, seconds, quiet=True)
    except ValueError as error:
        raise fail(str(error)) from error
    except BenchError as error:
        raise fail(str(error), code=1) from error
    text = profile.model_dump_json(indent=1)
    write_whole(file, text + "\n")
    typer.echo(text if as_json else f"{describe_profile(profile)}\n\n{file}")


def _alone(job: str, words: list[str], ask: Ask, folder: Path) -> tuple[Record, str]:
    """The job's step by itself; the record, and the text for a person."""
    from shoal.bench.show import describe, profile_tables
    from shoal.bench.step import bench_step
    from shoal.launch.ready import device_of
    from shoal.run import write_whole

    settings = _ready(job, words)
    record = bench_step(settings, ask, folder, device=device_of(settings), quiet=True)
    tables = [profile_tables(record["profile"])] if "profile" in record else []
    text = "\n\n".join([describe(record), *tables])
    write_whole(folder / "step.json", json.dumps(record, indent=1) + "\n")
    write_whole(folder / "step.md", f"{text}\n")
    return record, f"{text}\n\n{folder / 'step.json'}"


def _contest(
    job: str, words: list[str], also: list[str], peers: str, ask: Ask, folder: Path, limit_s: float
) -> tuple[Record, str]:
    """The job's plans and its peers, as rows."""
    from shoal.bench.against import against, find_checkout, read_names, require_equal_work
    from shoal.bench.show import against_table
    from shoal.launch.ready import device_of

    asked = read_names(peers, find_checkout()) if peers else []
    variants = [("shoal", _ready(job, words))]
    variants += [(f"shoal {more}", _ready(job, [*words, *more.split()])) for more in also]
    if asked:  # peers train the job as it is; what --also changes is its own row
        require_equal_work(variants[0][1])
    rows = against(
        variants,
        asked,
        ask,
        folder,
        device=device_of(variants[0][1]),
        limit_s=limit_s,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return {"rows": rows}, f"{against_table(rows)}\n\n{folder / 'against.json'}"


def _ready(job: str, words: list[str]) -> Settings:
    """The job with its plan chosen and its data prepared."""
    from shoal.cli.show import data_progress
    from shoal.config import load
    from shoal.launch.ready import make_ready

    with data_progress(shown=True) as progress:
        return make_ready(load(job, [*words, "run.resume=false"]), progress=progress)
