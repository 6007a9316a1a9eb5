"""How fast one rank saves, loads and checks a checkpoint, beside torch's distributed checkpoint (DCP) with its own files.

    python benchmarks/checkpoints.py [--mib 1024] [--folder DIR] [--out benchmarks/results/checkpoints.json]

Bytes by seconds of this process's CPU, user and system: what a core does, whatever else runs on the machine and however slow its
disk is. Bytes by seconds of the clock are kept too. The best of a few goes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp

from shoal.checkpoint.check import check, one
from shoal.checkpoint.store import alone_is_fine, load, save
from shoal.run import write_whole
from shoal.world import join_world

GOES = 4
TENSOR_MIB = 16


def measure(mib: int, folder: Path) -> dict[str, dict[str, float]]:
    """MB/s of a core and of the clock, by what is done."""
    state = {f"model.{n}": torch.randn(TENSOR_MIB * 2**18) for n in range(mib // TENSOR_MIB)}
    size = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, dict[str, float]] = {}

    def time_it(name: str, do: Callable[[], object]) -> None:
        goes = []
        for _ in range(GOES):
            cpu, clock = time.process_time(), time.perf_counter()
            do()
            goes.append((time.process_time() - cpu, time.perf_counter() - clock))
        of_core, of_clock = (size / min(seconds) / 1e6 for seconds in zip(*goes, strict=True))
        found[name] = {"core_mb_per_s": round(of_core), "clock_mb_per_s": round(of_clock)}

    raw = [tensor.view(torch.uint8).numpy().data for tensor in state.values()]
    time_it("CRC-32 alone", lambda: [zlib.crc32(part) for part in raw])
    with join_world(rank=0, size=1, device="cpu") as world, alone_is_fine():
        time_it("save", lambda: save(folder, 1, state, {}, world, keep=2))
        checkpoint = one(folder / "step-00000001")
        time_it("load and check", lambda: load(checkpoint, state, world, rest=True))
        time_it("check alone", lambda: check(checkpoint))
        there = folder / "dcp"
        time_it("DCP save", lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(there), no_dist=True))
        time_it("DCP load", lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(there), no_dist=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--folder", type=Path, help="where to write; left out: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="file of the results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = {"mib": asked.mib, "torch": torch.__version__, "speeds": measure(asked.mib, Path(folder))}
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if asked.out is not None:
        write_whole(asked.out, text)


if __name__ == "__main__":
    main()
