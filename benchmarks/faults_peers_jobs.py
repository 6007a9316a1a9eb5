"""Systems that faults_peers.py disturbs: how each starts the same small job, and where it says what it has done."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.faults_peers_ddp import BATCH, DIM, EVERY, FFN, HEADS, LAYERS, SEQ_LEN, VOCAB, newest
from benchmarks.faults_peers_judge import Row
from shoal.checkpoint.check import one
from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.config import Settings, parse
from shoal.run import read_json_lines
from tests.launch.machines import Machine

HERE = Path(__file__).resolve().parent
DEADLINE_S = 8.0  # of a Gloo operation, of run.deadline_s, of torchft's timeout
RANKS = 2
MARK = "FAULTS_PEERS"  # the environment variable by which a job's processes are known
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Ask(NamedTuple):
    """A job that is to be started: where, how long, and what a rank is to do to itself ("": nothing)."""

    folder: Path
    steps: int
    fault: str = ""


class Process(Protocol):
    """What starts and watches ranks on one machine."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


class System(NamedTuple):
    """One way to run the job."""

    name: str
    nodes: int
    family: str
    """of which all have the same weights in the end: "ddp", "shoal", "torchft" """
    start: Callable[[Ask, int, int], Process]
    """for a job, the machine's number, and a port that is free"""


class Warm:
    """A `shoal train` that has imported torch already."""

    def __init__(self, settings: Settings) -> None:
        self._machine = Machine(settings)
        self.pid = self._machine.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and not self._machine.process.is_alive():
            state = self._machine.end()
            self._code = -signal.SIGKILL if state is None else int(state == "failed")
        return self._code


def systems() -> list[System]:
    """All that can be run here."""
    found = [
        System("torchrun", 1, "ddp", lambda ask, node, port: _torchrun(ask, node, port, 1, {})),
        System("torchrun, unshared store", 1, "ddp", lambda a, n, p: _torchrun(a, n, p, 1, UNSHARED)),
        System("shoal, warm", 1, "shoal", lambda ask, node, port: Warm(settings(ask, 1))),
        System("shoal", 1, "shoal", lambda ask, node, port: _shoal(ask, node, 1)),
        System("torchrun, 2 nodes", 2, "ddp", lambda a, n, p: _torchrun(a, n, p, 2, {})),
        System(
            "torchrun, unshared store, 2 nodes", 2, "ddp", lambda a, n, p: _torchrun(a, n, p, 2, UNSHARED)
        ),
        System("shoal, warm, 2 machines", 2, "shoal", lambda ask, node, port: Warm(settings(ask, 2))),
        System("shoal, 2 machines", 2, "shoal", lambda ask, node, port: _shoal(ask, node, 2)),
    ]
    if has_torchft():
        found.insert(2, System("torchft", 2, "torchft", _torchft))
    return found


@functools.cache
def has_torchft() -> bool:
    """Whether torchft runs here."""
    command = [sys.executable, "-c", "import torchft.coordination"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def lighthouse(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """torchft's own service, with the timeout of its README."""
    text = (
        "import time; from torchft.coordination import LighthouseServer; "
        f"server = LighthouseServer(bind='[::]:{port}', min_replicas=1, join_timeout_ms=10000); time.sleep(3600)"
    )
    return _spawn([sys.executable, "-c", text], folder, "lighthouse", {})


def _torchrun(ask: Ask, node: int, port: int, nodes: int, env: dict[str, str]) -> Process:
    words = ["--nproc-per-node", str(RANKS // nodes), "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nnodes", str(nodes)]
    words += ["--rdzv-id", "faults", "--rdzv-conf", f"is_host={int(node == 0)}"]
    script = [str(HERE / "faults_peers_ddp.py"), *_script_words(ask)]
    return _spawn(
        [sys.executable, "-m", "torch.distributed.run", *words, *script], ask.folder, f"{node}", env
    )


def _torchft(ask: Ask, node: int, port: int) -> Process:
    words = ["--nproc-per-node", "1", "--max-restarts", "3", "--nnodes", "1", "--local-addr", "127.0.0.1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    script = [str(HERE / "faults_peers_torchft.py"), *_script_words(ask), "--replica", str(node)]
    env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    return _spawn(
        [sys.executable, "-m", "torch.distributed.run", *words, *script], ask.folder, f"{node}", env
    )


def _script_words(ask: Ask) -> list[str]:
    words = ["--dir", str(ask.folder), "--steps", str(ask.steps), "--deadline-s", str(DEADLINE_S)]
    return [*words, "--fault", ask.fault] if ask.fault else words


def _shoal(ask: Ask, node: int, nodes: int) -> Process:
    job = ask.folder / "job.given.toml"
    job.write_text(settings(ask, nodes).to_toml())
    return _spawn([sys.executable, "-m", "shoal", "train", str(job)], ask.folder, f"{node}", {})


def _spawn(command: list[str], folder: Path, name: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARK: str(folder), "PYTHONUNBUFFERED": "1"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    (folder / "said").mkdir(exist_ok=True)
    with (folder / "said" / f"{name}.txt").open("a") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **own, **env}, start_new_session=True
        )


def settings(ask: Ask, nodes: int) -> Settings:
    """The job for Shoal: as large as the script's."""
    dims = {"dim": DIM, "layers": LAYERS, "heads": HEADS, "kv_heads": HEADS, "ffn": FFN, "vocab": VOCAB}
    run: dict[str, Any] = {
        "dir": str(ask.folder),
        "faults": ask.fault,
        "deadline_s": DEADLINE_S,
        "threads": 1,
    }
    run |= {"nodes": "2", "interface": "lo"} if nodes > 1 else {}
    said = {
        "model": {**dims, "tied": False},
        "data": {"source": "synthetic", "vocab": VOCAB, "seq_len": SEQ_LEN, "eval_fraction": 0.0},
        "train": {"steps": ask.steps, "global_batch": BATCH * RANKS},
        "plan": {"replicate": RANKS, "compile": False},
        "checkpoint": {"memory_every": 1, "every": EVERY},
        "run": run,
    }
    return parse(said, where="faults_peers")


def rows_of(folder: Path) -> list[Row]:
    """Steps that were done, by whoever wrote them down."""
    if (folder / "metrics.jsonl").exists():
        records = [row for row in read_json_lines(folder / "metrics.jsonl") if "loss" in row]
        return [Row(row["step"], row["time"]) for row in records]
    return [Row(**row) for row in read_json_lines(folder / "steps.jsonl")]


def redone_by_shoal(folder: Path) -> int:
    """Steps that were taken again: its metrics have each once, its events say from where it went on."""
    again, done = 0, None
    for event in read_json_lines(folder / "events.jsonl"):
        if event["event"] == "restart":
            done = event["step"]
        elif event["event"] == "start" and done is not None:
            again, done = again + max(0, done - event["step"]), None
    return again


def struck_at(folder: Path) -> float | None:
    """When a rank struck itself."""
    for path in (folder / "struck", folder / "ranks" / "faults.struck"):
        if path.exists() and (words := path.read_text().split()):
            return float(words[-1])
    return None


def saved(folder: Path) -> int:
    """The step of the newest checkpoint that is whole."""
    if (folder / "checkpoints").exists():
        return max((found.step for found in list_checkpoints(folder / "checkpoints")[0]), default=0)
    if not (found := [torch.load(path)["manager"]["step"] for path in folder.glob("saves/*.pt")]):
        return newest(folder)
    return int(min(found))


def weights(folder: Path, steps: int) -> str | None:
    """A hash of the weights after the last step; None: it was not done."""
    final = folder / "final.json"
    if final.exists():
        return str(json.loads(final.read_text())["weights"])
    path = folder / "checkpoints" / f"step-{steps:08d}"
    if not path.exists():
        return None
    sums = hashlib.sha256()
    for name, tensor in sorted(whole_tensors(one(path))):
        if name.startswith("model."):
            sums.update(name.encode() + tensor.numpy().tobytes())
    return sums.hexdigest()


def said_by(folder: Path) -> dict[str, str]:
    """What each launcher printed, by its machine's number."""
    files = [*(folder / "said").glob("*.txt"), *(folder / "machines").glob("*.txt")]
    return {path.stem: path.read_text(errors="replace") for path in files}


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that belong to a job: those that were started with its mark, or that have a file of it open."""
    found, mark = {}, f"{MARK}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked or any(f"{folder}/" in str(link.readlink()) for link in (process / "fd").iterdir()):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:120]
    return found


def leading_node(folder: Path, pids: dict[int, int]) -> int:
    """The machine that leads: of Shoal the one whose process claimed the newest epoch; of torchrun the store's host."""
    epochs = sorted((folder / "epochs").glob("????????.json"))
    text = epochs[-1].read_text() if epochs else ""
    return next((node for node, pid in pids.items() if f"process {pid})" in text), 0)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
