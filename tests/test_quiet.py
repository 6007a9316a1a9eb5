"""Lines of libraries that are no use to who runs a job are left out, and only those."""

from __future__ import annotations

import enum
import logging
import subprocess
import sys

import pytest
from torch import nn

from shoal.models.units import find_units
from shoal.parallel.recompute import recomputed
from shoal.plan import Plan
from shoal.quiet import quiet_libraries
from tests.train.toy import DIMS, build

PYTREE = "torch.utils._pytree"
ENUM = "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value type."


class Ours(enum.Enum):
    ONE = 1


def said(logger: str, text: str, *args: object) -> bool:
    record = logging.LogRecord(logger, logging.WARNING, "", 0, text, args, None)
    quiet_libraries()
    return bool(logging.getLogger(logger).filter(record))


def test_kernels_that_torchao_does_not_find_are_left_out_and_whatever_else_it_says_is_not() -> None:
    missing = "Failed to load /venv/site-packages/torchao/_C_mxfp8.so: Could not load this library"
    assert not said("torchao", missing)
    assert said("torchao", "Skipping import of cpp extensions due to incompatible torch version.")
    assert said("torchao", "Failed to load weights.bin: no such file")
    assert said("torchao.float8", missing)


def test_enums_of_torchao_are_left_out_and_enums_of_others_are_not() -> None:
    theirs = enum.Enum("KernelPreference", "AUTO", module="torchao.kernel")
    assert not said(PYTREE, ENUM, theirs)
    assert said(PYTREE, ENUM, Ours)
    assert said(PYTREE, "another line of %s", theirs)


def test_only_blocks_of_ours_are_known_to_change_nothing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, logger = Plan(recompute="selective"), logging.getLogger("torch._higher_order_ops.wrap")
    monkeypatch.setattr(logger, "filters", [])
    line = "\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\n"
    reminder = logging.LogRecord(logger.name, logging.WARNING, "", 0, line, (), None)
    others = logging.LogRecord(logger.name, logging.WARNING, "", 0, "another line", (), None)
    ours = find_units(build(DIMS))[0].module
    for block, is_said in ((nn.Linear(2, 2), True), (ours, False)):
        recomputed(block.forward, block, plan, compiled=True)
        assert bool(logger.filter(reminder)) is is_said
        assert logger.filter(others)


def test_a_job_in_float8_imports_its_library_in_silence() -> None:
    pytest.importorskip("torchao")
    program = "from shoal.parallel.float8 import _torchao; _torchao('float8')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
