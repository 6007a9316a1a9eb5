"""Writes tables of docs/: from the models that check a job file (job.md, models.md), and from result files (other pages).

python docs/generate.py            # rewrite what is between the marks
python docs/generate.py --check    # exit 1 if anything would change
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.config import Settings
from shoal.job import Model
from shoal.models.moe_presets import MOE_PRESET_NAMES, num_moe_parameters, resolve_moe
from shoal.models.presets import PRESET_NAMES, num_parameters, resolve

DOCS = Path(__file__).parent
MARKS = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
EXAMPLE_VOCAB = 4096


def keys() -> str:
    """A table of keys for each table of a job file, and the keys outside tables first."""
    sections = {name: section_of(field.annotation) for name, field in Settings.model_fields.items()}
    alone = {name: Settings.model_fields[name] for name, section in sections.items() if section is None}
    parts = ["Outside any table:\n\n" + key_table(alone.items())]
    parts += [
        f"### `[{name}]`\n\n{key_table(section.model_fields.items())}"
        for name, section in sections.items()
        if section is not None
    ]
    return "\n\n".join(parts)


def presets() -> str:
    """A row for each preset."""
    rows = ["| preset | parameters | dim | layers | heads | kv_heads | ffn | vocab | tied | rope_theta |"]
    rows.append("| --- " * 10 + "|")
    for name in PRESET_NAMES:
        dims, asks = resolve(Model(preset=name), EXAMPLE_VOCAB), resolve(Model(preset=name)).vocab == 0
        vocab = "the tokenizer's" if asks else f"{dims.vocab:,}"
        numbers = f"{dims.dim} | {dims.layers} | {dims.heads} | {dims.kv_heads} | {dims.ffn}"
        tied = "yes" if dims.tied else "no"
        rows.append(
            f"| `{name}` | {num_parameters(dims):,} | {numbers} | {vocab} | {tied} | {dims.rope_theta:,.0f} |"
        )
    return "\n".join(rows)


def checkpoint_speed() -> str:
    """What a core saves, loads and checks in a second."""
    found = json.loads((DOCS.parent / "benchmarks" / "results" / "checkpoints.json").read_text())
    rows = [f"| {found['mib']:,} MiB, one rank | MB/s of a core |", "| --- | ---: |"]
    rows += [f"| {name} | {speeds['core_mb_per_s']:,} |" for name, speeds in found["speeds"].items()]
    return "\n".join(rows)


def moe_presets() -> str:
    """A row for each preset of the mixture-of-experts family."""
    names = "preset | parameters | of them for one token | dim | layers | heads | kv_heads | experts | top_k | expert_ffn"
    rows = [f"| {names} | shared_experts | scoring | vocab | tied |", "| --- " * 14 + "|"]
    for name in MOE_PRESET_NAMES:
        table = Model(family="moe", preset=name)
        dims, base = resolve_moe(table, EXAMPLE_VOCAB), resolve_moe(table, EXAMPLE_VOCAB).base
        vocab = "the tokenizer's" if resolve_moe(table).base.vocab == 0 else f"{base.vocab:,}"
        sizes = f"{num_moe_parameters(dims):,} | {num_moe_parameters(dims, active=True):,}"
        numbers = (
            f"{base.dim} | {base.layers} | {base.heads} | {base.kv_heads} | {dims.experts} | {dims.top_k}"
        )
        shared = f"{dims.expert_ffn} | {base.ffn // dims.expert_ffn} | `{dims.scoring}`"
        rows.append(
            f"| `{name}` | {sizes} | {numbers} | {shared} | {vocab} | {'yes' if base.tied else 'no'} |"
        )
    return "\n".join(rows)


def key_table(fields: Iterable[tuple[str, FieldInfo]]) -> str:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields:
        default = field.get_default(call_default_factory=True)
        cells = (f"`{name}`", type_text(field), default_text(default), field.description or "")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def default_text(value: Any) -> str:
    """A default as TOML has it; nothing for a key that is left out."""
    return "" if value is None else f"`{json.dumps(value)}`"


def type_text(field: FieldInfo) -> str:
    """A type and its range in words."""
    return ", ".join([annotation_text(field.annotation), *ranges(field.metadata)])


def annotation_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(argument)}`" for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(annotation_text(argument) for argument in arguments if argument is not type(None))
    if origin is list:
        return f"list of {annotation_text(arguments[0])}"
    if origin is tuple and Ellipsis in arguments:
        return f"list of {annotation_text(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} numbers"
    if origin is dict:
        return "table"
    return TYPES[annotation]


def ranges(metadata: list[Any]) -> list[str]:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{text} {getattr(item, key)}"
        for item in metadata
        for key, text in words.items()
        if hasattr(item, key)
    ]
    return found + ["not empty" for item in metadata if hasattr(item, "min_length")]


def section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


SYSTEMS = {
    "torchrun": ("torchrun", "torchrun, 2 nodes"),
    "torchrun, its store not shared": ("torchrun, unshared store", "torchrun, unshared store, 2 nodes"),
    "torchft": ("torchft",),
    "`shoal train`": ("shoal", "shoal, 2 machines"),
}
OF_RANKS = {"kill": "a rank is killed", "raise": "a rank raises"}
STOPPED = {"stop": "a rank is stopped (SIGSTOP)"}
OF_MACHINES = {
    "agent": "a launcher is killed",
    "leading agent": "the launcher that leads is killed",
    "machine": "a launcher is killed with all that it started",
}


def faults_peers() -> str:
    """What other systems make of the same faults: a cell has the first of the runs."""
    rows = [f"| | {' | '.join(SYSTEMS)} |", "| --- " * (1 + len(SYSTEMS)) + "|"]
    kept_in = {
        "faults_peers": OF_RANKS,
        "faults_peers_stopped": STOPPED,
        "faults_peers_machines": OF_MACHINES,
    }
    for file, faults in kept_in.items():
        kept = json.loads((DOCS.parent / "benchmarks" / "results" / f"{file}.json").read_text())
        for fault, said in faults.items():
            found = {run["system"]: run for run in reversed(kept["runs"]) if run["fault"] == fault}
            runs = [
                next((found[name] for name in names if name in found), None) for names in SYSTEMS.values()
            ]
            rows.append(f"| {said} | {' | '.join('' if run is None else _recovery(run) for run in runs)} |")
    return "\n".join(rows)


def _recovery(run: dict[str, Any]) -> str:
    told = {"both": "names who and why", "who": "names who", "cause": "names why", "another": "names another"}
    after = f"{run['next_step_s']:.1f} s" if run["next_step_s"] is not None else "no new step within 60 s"
    if run["next_step_s"] is None and run["done"] > run["struck_after"]:
        after = f"no further than step {run['done']}"
    again = f"{run['redone']} steps again" if run["next_step_s"] is not None and run["redone"] else ""
    left = f"leaves {run['left']} process" if run["left"] else ""
    return ", ".join(filter(None, [after, again, told.get(run["named"], "names nobody"), left]))


PARTS: dict[str, Callable[[], str]] = {
    "keys": keys,
    "presets": presets,
    "moe_presets": moe_presets,
    "checkpoint_speed": checkpoint_speed,
    "faults_peers": faults_peers,
}


def generated(text: str) -> str:
    """A page with what is between its marks made anew."""
    return MARKS.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main(check: bool) -> int:
    """Rewrite the pages, or say which would change."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if generated(text) != text:
            stale.append(page.name)
            if not check:
                page.write_text(generated(text), encoding="utf-8")
    print(f"{'stale' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
