"""A command is ended with all that it started, and its log tells the error that came first."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.bench.processes import first_error, run_limited


def test_a_command_over_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run(['sleep', '60'], start_new_session=True)"
    began = time.monotonic()
    ended = run_limited(
        [sys.executable, "-c", child], cwd=tmp_path, env=dict(os.environ), log=tmp_path / "row", limit_s=1.0
    )
    assert ended.code is None
    assert time.monotonic() - began < 10


def test_the_error_of_a_rank_comes_before_torchruns(tmp_path: Path) -> None:
    log = tmp_path / "row.err"
    log.write_text(
        "Traceback (most recent call last):\n  File 'a.py'\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert first_error(log) == "torch.OutOfMemoryError: CUDA out of memory"
