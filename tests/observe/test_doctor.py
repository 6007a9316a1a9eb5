"""The doctor looks at everything in seconds, and finds what is planted."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from shoal.observe import doctor
from shoal.observe.doctor import _software, examine, leftovers, live_ranks
from shoal.parallel import flash


def test_an_examination_is_quick_and_has_no_look_that_fails() -> None:
    begin = time.monotonic()
    findings = {finding.name: finding for finding in examine()}
    assert time.monotonic() - begin < 30  # 4 s on an idle machine
    assert findings["two live ranks"].verdict == "ok", findings["two live ranks"]
    assert {"python", "torch", "gloo", "nccl", "cpu cores", "loopback", "host name", "open files"} <= set(
        findings
    )
    assert not any(finding.meaning == "this could not be examined" for finding in findings.values())
    assert all(finding.meaning for finding in findings.values() if finding.verdict != "ok")


def test_leftovers_of_debugging_are_found() -> None:
    found = list(
        leftovers({"NCCL_P2P_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "detail", "NCCL_NVLS_ENABLE": "1"})
    )
    assert [finding.name for finding in found] == ["NCCL_P2P_DISABLE", "TORCH_DISTRIBUTED_DEBUG"]
    assert [finding.value for finding in leftovers({})] == ["none set"]


@pytest.mark.parametrize(
    ("version", "why", "verdict", "meaning"),
    [
        (None, "", "ok", "attention is faster with it: pip install 'shoal[flash]'"),
        ("4.0.0b36", "", "ok", ""),
        ("5.0", "it is another", "note", "it is another: cuDNN's attention runs"),
    ],
)
def test_a_faster_attention_kernel_is_told_of(
    monkeypatch: pytest.MonkeyPatch, version: str | None, why: str, verdict: str, meaning: str
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _: version)
    monkeypatch.setattr(flash, "why_not", lambda: why)
    assert list(doctor._attention([(8, 0)])) == []
    (finding,) = doctor._attention([(8, 0), (9, 0)])
    assert (finding.verdict, finding.meaning) == (verdict, meaning)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.1", "problem"), ("2.11.0+cu130", "ok"), ("2.14.1", "ok"), ("2.15.0+cu132", "problem")],
)
def test_a_torch_that_is_not_tested_is_a_problem(
    version: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    (found,) = [finding for finding in _software() if finding.name == "torch"]
    assert found.verdict == verdict
    assert verdict == "ok" or "install torch 2.11 to 2.14" in found.meaning


def test_ranks_that_cannot_talk_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    finding = live_ranks()
    assert finding.verdict == "problem"
    assert finding.meaning


def test_a_host_name_that_does_not_resolve_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    problems = [finding for finding in doctor._network() if finding.verdict == "problem"]
    assert [finding.name for finding in problems] == ["host name"]
