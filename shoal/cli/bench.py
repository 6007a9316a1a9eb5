"""`shoal bench`: what a job's step costs on this machine, and what it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import typer

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
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON, for machines."),
) -> None:
    """Time a job's own steps under its plan, and say what they are made of.

    Example: shoal bench step examples/quickstart.toml plan.shard=2 --steps 5 --profile
    """
    from shoal.bench.ask import Ask
    from shoal.bench.show import describe, profile_tables
    from shoal.bench.step import BenchError, bench_step
    from shoal.cli.show import data_progress, fail, stdout_on_stderr
    from shoal.config import load
    from shoal.launch.ready import device_of, make_ready
    from shoal.run import write_whole

    settings = load(job, [*(overrides or []), "run.resume=false"])
    folder = (out or Path("runs", "bench", Path(job).stem)).resolve()
    with data_progress(shown=not as_json) as progress:
        settings = make_ready(settings, progress=progress)
    folder.mkdir(parents=True, exist_ok=True)
    ask = Ask(steps, warmup, str(folder) if profile else None)
    try:
        with stdout_on_stderr(active=as_json):
            record = bench_step(settings, ask, folder, device=device_of(settings), quiet=True)
    except ValueError as error:
        raise fail(str(error)) from error
    except BenchError as error:
        raise fail(str(error), code=1) from error
    write_whole(folder / "step.json", json.dumps(record, indent=1) + "\n")
    text = "\n\n".join([describe(record), *([profile_tables(record["profile"])] if profile else [])])
    write_whole(folder / "step.md", f"{text}\n")
    typer.echo(json.dumps(record) if as_json else f"{text}\n\n{folder / 'step.json'}")
