"""The runner of benchmarks/step_1b.py on two CPU ranks, and what it makes of outputs and failures."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.machine import read_samples, summary
from benchmarks.processes import first_error, run_limited
from benchmarks.rows import Measured, Row, figures, obstacle, rows
from benchmarks.setting import JOBS, read_setting
from benchmarks.step_1b import choose, main
from benchmarks.table import headline, markdown_table, rows_table


def test_one_row_of_the_product_is_measured_and_written(tmp_path: Path) -> None:
    code = main(["--out", str(tmp_path), "--size", "tiny", "--steps", "3", "--only", "shoal-replicate"])
    result = json.loads((tmp_path / "step_1b.json").read_text())
    (row,) = result["rows"]
    assert code == 0, row
    assert "error" not in row
    assert row["command"][1:4] == ["-m", "shoal", "train"]
    assert "plan.replicate=2" in row["command"]
    assert len(row["losses"]) == len(row["seconds"]) == 3
    assert row["losses"][0] == pytest.approx(math.log(512), abs=0.1)  # random weights guess evenly
    assert row["tokens_per_s_per_gpu"] == pytest.approx(4 * 64 / row["step_s"], rel=1e-3)
    assert row["allocated_gib"] > 0
    assert result["setting"]["ranks"] == 2
    assert result["machine"]["versions"]["torch"]
    assert "| shoal-replicate" in (tmp_path / "step_1b.md").read_text()


def test_the_1b_job_has_the_dimensions_of_llama_3_2_1b() -> None:
    setting = read_setting(JOBS / "llama_1b.toml", ranks=4, steps=20)
    assert setting.parameters == 1_235_814_400
    assert (setting.job.train.global_batch, setting.warmup, setting.tokens_per_rank) == (16, 5, 8192)


def test_one_gpu_has_no_sharded_rows() -> None:
    assert not [row.name for row in rows(1) if "zero" in row.name]
    assert [row.name for row in rows(4)][:3] == ["shoal-replicate", "torch-fsdp2", "shoal-zero3"]


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"nonsense: no such row; rows: shoal-replicate"):
        choose(rows(2), ["nonsense"])


def test_a_row_without_its_package_says_which() -> None:
    assert obstacle(Row("a", "b", packages=("no_such_package",)), on_gpu=True) == (
        "skipped: no_such_package not installed"
    )
    assert obstacle(Row("a", "b"), on_gpu=False) is None


def test_figures_are_medians_after_the_warm_up() -> None:
    setting = read_setting(JOBS / "tiny.toml", ranks=2, steps=4)  # one step of warm-up
    measured = Measured([9.0, 0.1, 0.3, 0.2], [6.2, 6.1, 6.0, 5.9], 1.5, None, (0.0, 1.0))
    found = figures(measured, setting, flops_per_token=1e6, peak=1e9)
    assert found["step_s"] == 0.2
    assert found["tokens_per_s_per_gpu"] == 1280
    assert found["mfu"] == 1.28
    assert found["reserved_gib"] is None


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


def test_gpu_samples_count_inside_the_window_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    path.write_text(
        "2026/01/02 03:04:05.000, 0, 300, 100.0, 40, 10240\n"
        "2026/01/02 03:04:06.000, 0, 1700, 690.0, 60, 20480\n"
        "2026/01/02 03:04:06.000, 1, 1800, 680.0, 61, 20480\n"
        "2026/01/02 03:04:07.000, 0, [N/A], 1\n"
    )
    at = datetime(2026, 1, 2, 3, 4, 6).timestamp()
    found = summary(read_samples(path), (at - 0.5, at + 0.5))
    assert found == {
        "samples": 2,
        "memory_gib": 20.0,
        "clock_mhz": 1750,
        "power_w": 685.0,
        "temperature_c": 61,
    }
    assert summary([], None) is None


def test_a_table_lines_up_and_escapes_bars() -> None:
    assert markdown_table(["row", "W"], [["a|b", "1"], ["c", "700"]]).splitlines() == [
        "| row  |   W |",
        "|------|----:|",
        "| a\\|b |   1 |",
        "| c    | 700 |",
    ]


def test_a_failed_row_is_a_line_of_dashes_and_its_error() -> None:
    text = rows_table(
        [
            {
                "name": "good",
                "setting": "s",
                "step_s": 0.2,
                "tokens_per_s_per_gpu": 40960.4,
                "losses": [11.76, 9.1],
            },
            {"name": "bad", "setting": "s", "error": "exit code 1: boom\nmore"},
        ]
    )
    assert "|   200.0 |       40,960 |" in text
    assert "11.760 |" in text
    assert text.endswith("- **bad**: exit code 1: boom")
    assert headline("") == "no message"
