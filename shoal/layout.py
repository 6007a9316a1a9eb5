"""`Layout`: what tensor, pipeline, context and expert parallelism need to know of a model. Copies and shards need nothing.

A model offers it as its attribute `layout`, or as a method of that name, which may take the plan. Modules are named by their
dotted path, `*` for any part of one:
"blocks.*.attention.query".
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """How a model can be cut.

    Tensor parallelism: a `column` linear is cut by its outputs and a `row` linear by its inputs, so that what lies between
    needs no communication. `region` names the modules whose inputs all ranks need whole: each begins before its columns
    and ends with its row. With `sequence_dim` what lies outside of regions (norms, dropout, the residual stream) is cut along
    that dim of the activations (sequence parallel); without it is computed on all ranks alike.

    Example:
        Layout(
            column=("layers.*.attention.query", "layers.*.attention.key", "layers.*.attention.value", "layers.*.mlp.up"),
            row=("layers.*.attention.output", "layers.*.mlp.down"),
            region=("layers.*.attention", "layers.*.mlp"),
            counts={"heads": 8},
        )
    """

    column: tuple[str, ...] = ()
    """linears cut by outputs"""
    row: tuple[str, ...] = ()
    """linears cut by inputs; their outputs are summed over ranks"""
    grouped: tuple[str, ...] = ()
    """column linears with fewer groups of outputs (`groups`: key/value heads) than ranks may be: those are on several ranks"""
    groups: int = 1
    """groups of outputs of a `grouped` linear, which stay whole"""
    region: tuple[str, ...] = ()
    """modules between whose entry and exit the columns and rows lie"""
    embedding: str | None = None
    """the token embedding, cut by vocabulary"""
    head: str | None = None
    """the linear that gives logits, cut by vocabulary; a region of its own"""
    sequence_dim: int | None = None
    """the dim of activations along which they are cut outside of regions"""
    attention: tuple[str, ...] = ()
    """modules whose function `attend(query, key, value, mask)` context parallelism replaces; (B, heads, T, width) each"""
    experts: tuple[str, ...] = ()
    """modules that expert parallelism cuts: all their parameters are stacked, dim 0 the expert, and `forward(x, counts)` takes
    rows (N, width) sorted by expert with the number of each, and gives a row for each"""
    experts_call: str = "forward"
    """the method of `experts` that does so, where it is not their forward, which calls it"""
    inputs: dict[str, int] = field(default_factory=dict)
    """entries of a batch that have a sequence, and the dim that it is: {"tokens": 1, "labels": 1}"""
    positions: str | None = None
    """the entry of a batch that says where tokens are, which is added if it is not there"""
    blocks: str | None = None
    """the container of the blocks that follow each other, for pipeline parallelism: its model has methods `begin(*inputs)`, what
    comes before the blocks, `side_inputs(*inputs)`, what each block gets beside, and `end(x)`, what comes after them"""
    begin: tuple[str, ...] = ()
    """modules that `begin` uses"""
    end: tuple[str, ...] = ()
    """modules that `end` uses"""
    counts: dict[str, int] = field(default_factory=dict)
    """what the tensor degree must divide, by the name that a message gives it"""
    refused: dict[str, str] = field(default_factory=dict)
    """axes along which the model cannot be cut, and why: {"pipeline": "its blocks are not in one list"}"""
