"""`shoal sample`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def sample(
    run: Path = typer.Argument(help="A run directory."),
    prompt: str = typer.Argument("", help="Text to go on from."),
    tokens: int = typer.Option(120, help="Tokens to generate."),
    temperature: float = typer.Option(0.8, min=0.0, help="0 takes the likeliest token each time."),
    top_k: int = typer.Option(50, min=1, help="Draw among so many likeliest tokens."),
    seed: int = typer.Option(0, help="Another seed, another text."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Generate text from a run's last checkpoint.

    Example: shoal sample runs/quickstart "def "
    """
    from shoal.cli.show import fail
    from shoal.train.sample import generate, open_run

    try:
        model = open_run(run)
        text = generate(model, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    except ValueError as error:
        raise fail(str(error)) from error
    except RuntimeError as error:
        raise fail(str(error), code=1) from error
    typer.echo(json.dumps({"step": model.step, "prompt": prompt, "text": text}) if as_json else prompt + text)
