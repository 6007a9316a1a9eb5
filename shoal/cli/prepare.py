"""`shoal prepare`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer


def prepare(
    source: list[str] = typer.Argument(help='"stdlib", files and folders of text, or "hf:<name>"'),
    out: Path = typer.Option(..., "--out", "-o", help="The folder to make."),
    tokenizer: str = typer.Option(
        "bpe", help='"bpe" (trained on the source), "bytes", or "hf:<path or name>"'
    ),
    vocab: int = typer.Option(4096, help="Vocabulary size of a BPE tokenizer that is trained."),
    eval_fraction: float = typer.Option(0.01, help="Part of the documents held out for evaluation."),
    text_key: str = typer.Option("text", help="The field that holds the text in .jsonl files."),
    seed: int = typer.Option(0, help="Picks the held-out documents."),
    workers: int = typer.Option(None, help="Processes that encode; left out: one a core."),
    as_json: bool = typer.Option(False, "--json", help="Print the index as JSON, for machines."),
) -> None:
    """Turn text into token shards that a job can name as its data.source.

    Example: shoal prepare stdlib --out data/stdlib
    """
    from shoal.cli.show import data_progress, fail
    from shoal.config import parse
    from shoal.data.prepare import prepare as make

    table = {
        "source": source[0] if len(source) == 1 else source,
        "tokenizer": tokenizer,
        "vocab": vocab,
        "eval_fraction": eval_fraction,
        "text_key": text_key,
    }
    try:
        data = parse({"data": table}, where="prepare").data
        with data_progress(shown=not as_json) as progress:
            index = make(data, seed, out, workers=workers, progress=progress)
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(index), default=str))
        return
    for name, split in index.splits.items():
        typer.echo(f"{name:<6} {split.tokens:>12,} tokens  {split.documents:>8,} documents")
    typer.echo(f"vocabulary {index.vocab:,}; use it: data.source={out}")
