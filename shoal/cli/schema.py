"""`shoal schema`."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of job files, for editors that complete and check TOML.

    Example: shoal schema > shoal.schema.json
    """
    from shoal.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))
