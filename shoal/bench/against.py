"""A job's step beside its peers': rows of one table, each measured by processes of its own, one after the other.

Peers are files of the repository, not of the package: a checkout has them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shoal.bench.ask import Ask
from shoal.bench.figures import Amount, Record, figures
from shoal.bench.processes import Ended, first_error, last_words, run_limited
from shoal.bench.show import against_table, headline
from shoal.bench.step import BenchError, bench_step, make_folder
from shoal.config import Settings, load
from shoal.data.text import SourceKind, source_kind
from shoal.imports import load_object
from shoal.launch.ready import which_cluster
from shoal.observe.gpus import read_samples, sampled, summary
from shoal.run import write_whole

KNOWN = Path("benchmarks", "peers", "known.py")


class Asked(NamedTuple):
    """A peer that is asked for, with its options."""

    name: str
    known: Any
    options: tuple[str, ...]
    """key=value"""

    @property
    def title(self) -> str:
        return ":".join((self.name, *self.options))


class Contest(NamedTuple):
    """What all rows share."""

    checkout: Path
    job_file: Path
    ranks: int
    steps: int
    folder: Path
    limit_s: float
    """that a peer may take"""
    on_gpus: bool


def find_checkout() -> Path:
    """The folder of the repository: where this package is, or the working directory.

    Raises:
        ValueError: neither has the peers.
    """
    here = Path(__file__).resolve().parents[2]
    for folder in (here, Path.cwd()):
        if (folder / KNOWN).is_file():
            return folder
    raise ValueError(
        f"--against needs the peers' scripts ({KNOWN.parent}), which are in a checkout of the repository and not in the "
        "installed package: run the command in the checkout's folder"
    )


def read_names(text: str, checkout: Path) -> list[Asked]:
    """Names with options, `torchtitan,deepspeed:stage=3`, as peers.

    Raises:
        ValueError: an unknown name, option or value, or an option that is not key=value.
    """
    peers = load_object(f"{checkout / KNOWN}:PEERS")
    found = []
    for word in (word for word in text.split(",") if word):
        name, *options = word.split(":")
        if name not in peers:
            raise ValueError(f"--against {name}: no such peer; peers: {', '.join(peers)}")
        if wrong := [option for option in options if "=" not in option]:
            raise ValueError(
                f"--against {word}: {wrong[0]!r} is no option; expected key=value, as in {name}:key=value"
            )
        _require_known(word, options, peers[name].options)
        found.append(Asked(name, peers[name], tuple(options)))
    return found


def _require_known(word: str, options: Sequence[str], known: Mapping[str, Sequence[str]]) -> None:
    for key, _, value in (option.partition("=") for option in options):
        if value not in known.get(key, ()):
            takes = "; ".join(f"{name}={'|'.join(values)}" for name, values in known.items()) or "no options"
            raise ValueError(f"--against {word}: {key}={value} is not known; it takes {takes}")


def require_equal_work(settings: Settings) -> None:
    """Whether peers can train this job as it is.

    Raises:
        ValueError: they can't; the message says what to change.
    """
    plan, job = settings.plan, settings.job
    if plan is None:
        raise ValueError("settings.plan is not chosen yet")
    if job.model.family != "llama" or source_kind(job.data.source) is SourceKind.USER:
        raise ValueError(
            f'peers train model.family = "llama" on text or synthetic data, not {job.model.family!r}'
        )
    if job.optimizer.name != "adamw" or job.optimizer.schedule != "constant" or job.optimizer.warmup:
        raise ValueError(
            "peers train with AdamW at a constant rate: add optimizer.name=adamw optimizer.schedule=constant "
            "optimizer.warmup=0"
        )
    if job.train.precision not in ("bf16", "fp32"):
        raise ValueError(f"peers train in bf16 or fp32, not {job.train.precision}: add train.precision=bf16")
    if plan.shares:
        raise ValueError("peers give each rank as many samples as any other: leave plan.shares out")
    _, size = plan.micro_batches(job.train.global_batch)
    if job.train.global_batch != size * plan.world_size:
        raise ValueError(
            f"peers take one micro-batch a rank and step: with micro-batches of {size} on {plan.world_size} ranks add "
            f"train.global_batch={size * plan.world_size}"
        )


def against(
    variants: Sequence[tuple[str, Settings]],
    peers: Sequence[Asked],
    ask: Ask,
    folder: Path,
    *,
    device: str,
    limit_s: float,
    tell: Callable[[str], None],
) -> list[Record]:
    """Measure each plan of the product, then each peer; what goes wrong becomes the row's `error`.

    Peers take as many steps of warm-up as the first row, so that losses can be compared step by step. All rows so far are
    written to `against.json` and `against.md` after each.

    Args:
        variants: name and settings of each of the product's rows; peers train the job of the first.
        tell: told a line before and after each row.
    """
    make_folder(folder / "logs")
    records: list[Record] = []

    def add(title: str, measured: Callable[[], Record]) -> None:
        tell(f"{title} ...")
        records.append(measured())
        write_whole(folder / "against.json", json.dumps({"rows": records}, indent=1) + "\n")
        write_whole(folder / "against.md", against_table(records) + "\n")
        tell(f"{title}: {one_line(records[-1])}")

    for name, settings in variants:
        add(name, partial(_own_row, name, settings, ask, folder, device))
        if "step_s" in records[-1] and ask.warmup is None:
            ask = ask._replace(warmup=records[-1]["warmup"])
    settings = variants[0][1]
    on_gpus = device != "cpu" and which_cluster(settings).device.type == "cuda"
    contest = _contest(settings, ask, folder, limit_s, on_gpus)
    model = next((record for record in records if "step_s" in record), None)
    warmup = ask.warmup if ask.warmup is not None else 5
    for peer in peers:
        add(peer.title, partial(_peer_row, peer, contest, warmup, model))
    return records


def one_line(record: Record) -> str:
    """How a row went."""
    if "step_s" not in record:
        return f"ERROR {headline(record['error'])}"
    return f"{record['step_s'] * 1000:.1f} ms, {record['per_s_per_device']:,.0f} {record['unit']}/s/device"


def _own_row(name: str, settings: Settings, ask: Ask, folder: Path, device: str) -> Record:
    assert settings.plan is not None
    row = {"name": name, "setting": settings.plan.describe()}
    place = folder / "logs" / name.replace(" ", "_").replace("/", "_")
    if ask.traces is not None:
        ask = ask._replace(traces=str(place))
    try:
        return row | bench_step(settings, ask, place, device=device, quiet=True)
    except BenchError as error:
        return row | {"error": str(error)}


def _contest(settings: Settings, ask: Ask, folder: Path, limit_s: float, on_gpus: bool) -> Contest:
    assert settings.plan is not None
    job_file = folder / "job.toml"
    write_whole(job_file, settings.to_toml())
    return Contest(find_checkout(), job_file, settings.plan.world_size, ask.steps, folder, limit_s, on_gpus)


def _peer_row(peer: Asked, contest: Contest, warmup: int, model: Record | None) -> Record:
    row: Record = {"name": peer.title, "setting": peer.known.setting}
    if problem := _obstacle(peer, contest.on_gpus):
        return row | {"error": problem}
    log = contest.folder / "logs" / peer.title.replace(":", "_")
    samples = log.with_suffix(".gpus.csv")
    command = _command(peer, contest, warmup)
    row["command"] = ["python", *command[1:]]
    with sampled(samples):
        ended = run_limited(
            command, cwd=contest.checkout, env=_environment(peer, contest), log=log, limit_s=contest.limit_s
        )
    told = read_result(ended.output)
    if told is None or ended.code != 0:
        return row | {"error": _error(ended, contest.limit_s)}
    row["setting"] = ", ".join(part for part in (peer.known.setting, told.pop("says")) if part)
    row |= told | figures(told["seconds"], _amount(model, contest))
    return row | {"warmup": warmup, "gpu": summary(read_samples(samples), told["window"])}


def _obstacle(peer: Asked, on_gpus: bool) -> str | None:
    """Why a peer can't run here, or None."""
    missing = [package for package in peer.known.packages if not _is_there(package)]
    if missing:
        return f"skipped: {' and '.join(missing)} not installed (benchmarks/peers/README.md lists packages)"
    if peer.known.needs_gpu and not on_gpus:
        return "skipped: it needs a GPU"
    return None


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _command(peer: Asked, contest: Contest, warmup: int) -> list[str]:
    """The command line that a user would type in the checkout."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={contest.ranks}"]
    meeting = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    counts = [f"--steps={contest.steps}", f"--warmup={warmup}"]
    options = [f"--{option}" for option in peer.options]
    return [*torchrun, *meeting, "-m", peer.known.module, str(contest.job_file), *counts, *options]


def _free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _environment(peer: Asked, contest: Contest) -> dict[str, str]:
    """The peer's own variables, then the caller's; the checkout on the import path, one cache of compiled kernels."""
    path = [str(contest.checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // contest.ranks)),
        # a build that was killed leaves a lock for which all later ones would wait
        "TORCH_EXTENSIONS_DIR": str(contest.folder / "logs" / "extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "shoal-bench-inductor"),
    }
    return {**defaults, **peer.known.env, **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def read_result(output: Path) -> Record | None:
    """What a peer printed as its last line of JSON; None if there is none."""
    for line in reversed(output.read_text(errors="replace").splitlines()):
        if line.startswith('{"seconds"'):
            return json.loads(line)
    return None


def _amount(model: Record | None, contest: Contest) -> Amount:
    """A step's work, as the product's row tells it; without one, tokens alone."""
    if model is not None:
        return Amount(
            model["units_per_step"],
            model["unit"],
            contest.ranks,
            model["flops_per_step"],
            model["peak_flops"],
        )
    job = load(contest.job_file).job
    return Amount(job.train.global_batch * job.data.seq_len, "tokens", contest.ranks, None, None)


def _error(ended: Ended, limit_s: float) -> str:
    """How a peer ended and what it said of it, then the end of its log."""
    how = f"not done after {limit_s:.0f} s" if ended.code is None else f"exit code {ended.code}"
    log = last_words(ended.errors) or last_words(ended.output)
    return f"{how}: {first_error(ended.errors)}\n{log}".strip()
