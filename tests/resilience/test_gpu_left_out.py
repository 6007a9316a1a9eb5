"""A run that failed with an error of a GPU is not started again on it, and the report names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.observe import health
from shoal.observe.nvml import Nvml
from tests.observe.nvml import FakeNvml, Gpu
from tests.resilience.test_goes_on import ran


@pytest.mark.usefixtures("warm_nursery")
def test_a_gpu_that_failed_is_named_in_the_report_and_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(), Gpu(), Gpu()]
    monkeypatch.setattr(health, "open_nvml", lambda: Nvml(FakeNvml(gpus)))
    monkeypatch.setattr(health, "visible_gpus", lambda nvml, visible: [0, 1, 2])  # ranks are on CPUs here
    gpus[1].xids = [79]
    found = ran(tmp_path, "kill rank=1 step=2", device="auto")
    assert found.outcome.state == "failed"
    assert found.of("restart") == []
    said = "GPU 1 had Xid 79: it has fallen off the bus; leave it out: CUDA_VISIBLE_DEVICES=0, with plan=auto"
    assert found.of("given up", "reason") == [said]
    assert said in found.outcome.report
    assert found.of("alert", "rank") == [1]
