"""What nvidia-smi says is read line by line and counted inside the window of counted steps."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from shoal.observe.gpus import read_samples, summary


def test_samples_count_inside_the_window_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    path.write_text(
        "2026/01/02 03:04:05.000, 0, 300, 100.0, 40, 10240\n"
        "2026/01/02 03:04:06.000, 0, 1700, 690.0, 60, 20480\n"
        "2026/01/02 03:04:06.000, 1, 1800, 680.0, 61, 20480\n"
        "2026/01/02 03:04:07.000, 0, [N/A], 1\n"
    )
    at = datetime(2026, 1, 2, 3, 4, 6).timestamp()
    assert summary(read_samples(path), (at - 0.5, at + 0.5)) == {
        "samples": 2,
        "memory_gib": 20.0,
        "clock_mhz": 1750,
        "power_w": 685.0,
        "temperature_c": 61,
    }
    assert summary([], None) is None
