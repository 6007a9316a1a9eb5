"""Machines of this host with networks of their own: a bridge and a namespace each (root, iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


def can_make_networks() -> bool:
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"sh{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


@dataclass(frozen=True)
class Networks:
    """Machines 1, 2, ... on one bridge."""

    prefix: str

    def namespace(self, number: int) -> str:
        return f"{self.prefix}n{number}"

    def plug(self, number: int, *, into: bool) -> None:
        """Put the cable of a machine in, or pull it."""
        _ip("link", "set", f"{self.prefix}v{number}", "up" if into else "down")


@contextmanager
def networks(count: int) -> Generator[Networks]:
    """So many, which are gone after the block."""
    made = Networks(f"sh{os.getpid() % 100_000}")
    _ip("link", "add", made.prefix, "type", "bridge")
    _ip("link", "set", made.prefix, "up")
    try:
        for number in range(1, count + 1):
            name, port = made.namespace(number), f"{made.prefix}v{number}"
            _ip("netns", "add", name)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", made.prefix, "up")
            _ip("-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for number in range(1, count + 1):
            subprocess.run(["ip", "netns", "del", made.namespace(number)], capture_output=True)
        _ip("link", "del", made.prefix)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
