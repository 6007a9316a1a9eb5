"""`run_ranks` and `run_all`: run a function on several real Gloo ranks, forked from a process that has imported torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from shoal.world import World

Key = TypeVar("Key", bound=Hashable)
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # which torch imports when it is first needed: 0.6 s in every rank
    "shoal.train.setup",
    "shoal.verify.record",
    "transformers.modeling_utils",
    "shoal.config",
    "shoal.world",
    "tests.ranks",
]
SETTLE_S = 1.0  # how long the others may take to fail too, once one rank has failed


class Answer(NamedTuple):
    """What a rank sends back: a value, or an exception with its traceback."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


def run_ranks(
    n: int, fn: Callable[..., Any], *args: object, timeout: float = 120, threads: int = 1, join: bool = True
) -> list[Any]:
    """Run `fn(world, *args)` on `n` Gloo ranks and return what each returned, by rank.

    `fn` is defined at the top level of a module; its results and arguments can be pickled. With `join=False`
    no `World` is made and ranks are called as `fn(rank, size, folder, *args)`.

    Raises:
        the first exception of a rank, with a note that names the rank and holds its traceback.
        TimeoutError: naming the ranks that were still running after `timeout` seconds; they are killed.
        RuntimeError: a rank died without an answer, with its exit code or signal.

    Example:
        >>> def double(world, x):
        ...     return world.rank * x
        >>> run_ranks(2, double, 10)  # doctest: +SKIP
        [0, 10]
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    folder = tempfile.mkdtemp(prefix="ranks-")
    call = pickle.dumps((fn, args))
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    answers: dict[int, Answer] = {}
    try:
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, call, rank, n, folder, timeout, threads, join), daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        answers = _collect(processes, pipes, timeout)
        return _values(answers, processes, timeout)
    finally:
        _stop(processes, answered=len(answers) == n)
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: what each rank returned, or the exception that ended it."""

    values: list[Any]
    error: BaseException | None = None

    def get(self) -> list[Any]:
        """What each rank returned, by rank.

        Raises:
            as `run_ranks` does, if this case failed.
        """
        if self.error is not None:
            raise self.error
        return self.values


def run_all(
    n: int, fn: Callable[..., Any], cases: Mapping[Key, Sequence[object]], timeout: float = 240
) -> dict[Key, Outcome]:
    """`run_ranks(n, fn, *arguments)` for each case, one after the other on the same ranks, as far as none fails.

    What is imported, and what torch learned of operators and placements, is then paid for once. A case that fails ends its
    ranks, and fresh ones go on with the next. Each begins with the same random numbers, and none may leave another state
    of torch behind.

    Example:
        >>> run_all(2, double, {"ten": [10], "one": [1]})["one"].get()  # doctest: +SKIP
        [0, 1]
    """
    arguments = list(cases.values())
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="cases-") as folder:
        while len(outcomes) < len(arguments):
            failed = None
            try:
                run_ranks(n, _each, fn, arguments, len(outcomes), Path(folder), timeout=timeout)
            except Exception as error:
                failed = error
            while len(outcomes) < len(arguments) and _is_done(Path(folder), len(outcomes), n):
                outcomes.append(_outcome(Path(folder), len(outcomes), n))
            if failed is not None:
                if len(outcomes) == len(arguments):  # the ranks could not leave
                    raise failed
                outcomes.append(Outcome([], failed))
    return dict(zip(cases, outcomes, strict=True))


def _each(
    world: World, fn: Callable[..., Any], arguments: Sequence[Sequence[object]], first: int, folder: Path
) -> None:
    """The cases from the first on; each one's value goes to a file of its own."""
    restart, before = _random_numbers(), _global_state()
    for case in range(first, len(arguments)):
        restart()
        value = pickle.dumps(fn(world, *arguments[case]))
        after = _global_state()
        assert after == before, f"{arguments[case]} left another state behind: {after}, was {before}"
        part = folder / f"{case}-{world.rank}.part"
        part.write_bytes(value)
        part.rename(part.with_suffix(".done"))
        gc.collect()  # models and their groups
        gc.freeze()


def _is_done(folder: Path, case: int, n: int) -> bool:
    return all((folder / f"{case}-{rank}.done").exists() for rank in range(n))


def _outcome(folder: Path, case: int, n: int) -> Outcome:
    return Outcome([pickle.loads((folder / f"{case}-{rank}.done").read_bytes()) for rank in range(n)])


def _random_numbers() -> Callable[[], None]:
    """What sets all random numbers to where they are now."""
    import numpy as np
    import torch

    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restart() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    return restart


def _global_state() -> dict[str, Any]:
    import torch

    return {
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matrix multiplication": torch.get_float32_matmul_precision(),
        "garbage collection": gc.isenabled(),
    }


def _rank(
    pipe: Connection, call: bytes, rank: int, size: int, folder: str, timeout: float, threads: int, join: bool
) -> None:
    import torch

    from shoal.world import join_world

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    gc.freeze()  # what was imported is never garbage: looking at it takes 0.3 s, and copies its pages
    try:
        fn, args = pickle.loads(call)
        if join:
            store = f"file://{folder}/store"
            with join_world(
                init_method=store, device="cpu", deadline_s=timeout, rank=rank, size=size, local_rank=rank
            ) as here:
                pipe.send_bytes(pickle.dumps(Answer(fn(here, *args))))
        else:
            pipe.send_bytes(pickle.dumps(Answer(fn(rank, size, Path(folder), *args))))
    except BaseException as error:
        pipe.send_bytes(_pickle_error(error))
    pipe.close()


def _pickle_error(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        message = pickle.dumps(Answer(error=error, traceback=text))
        pickle.loads(message)  # some exceptions pickle and cannot be read back
        return message
    except Exception:
        return pickle.dumps(Answer(error=RuntimeError(f"{type(error).__name__}: {error}"), traceback=text))


def _collect(
    processes: Sequence[ForkServerProcess], pipes: list[Connection], timeout: float
) -> dict[int, Answer]:
    """Answers in the order in which they came; a rank that died or hangs has none."""
    answers: dict[int, Answer] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
            if rank not in answers or answers[rank].error:
                deadline = min(deadline, time.monotonic() + SETTLE_S)
    return answers


def _values(answers: dict[int, Answer], processes: Sequence[ForkServerProcess], timeout: float) -> list[Any]:
    died = [
        rank for rank in range(len(processes)) if rank not in answers and processes[rank].exitcode is not None
    ]
    failed = [rank for rank, answer in answers.items() if answer.error]
    primary = [rank for rank in failed if "onnection" not in str(answers[rank].error)]
    if died and not primary:
        raise RuntimeError(f"rank {died[0]} died: {_exit_text(processes[died[0]].exitcode)}")
    if failed:
        rank = (primary or failed)[0]
        error = answers[rank].error
        assert error is not None
        error.add_note(f"on rank {rank} of {len(processes)}:\n{answers[rank].traceback}")
        raise error
    hung = [rank for rank in range(len(processes)) if rank not in answers]
    if hung:
        raise TimeoutError(f"ranks {hung} of {len(processes)} gave no answer within {timeout} s")
    return [answers[rank].value for rank in range(len(processes))]


def _exit_text(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _stop(processes: Sequence[ForkServerProcess], answered: bool) -> None:
    """Give ranks a moment to leave if all have answered, then kill what is left."""
    deadline = time.monotonic() + 2
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()) if answered else 0)
        if process.is_alive():
            process.kill()
        process.join()
        process.close()
