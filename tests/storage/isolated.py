"""Run cases in processes of their own, several at a time: one that is killed by a signal is an outcome, too."""

import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

CASE_S = 90
"""A case that takes longer is killed, in seconds."""
PROCESSES = 3 * (os.cpu_count() or 1)
"""How many run cases at once: a case waits for most of its time, for timers and for its own threads."""

_Case = TypeVar("_Case")
_Outcome = TypeVar("_Outcome")


class Killed(Exception):
    """The process of a case ended by a signal, or without an outcome."""


@contextmanager
def temporary() -> Generator[Path]:
    """A directory for one case: in memory if there is some, because a sync has to do nothing there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="headrace-image-", dir=memory) as folder:
        yield Path(folder)


def warm_up(run: Callable[[], object]) -> None:
    """Run once in this process the code that all cases run: each fork then has its modules and caches, and copies fewer
    pages. Call it before `in_processes`; `run` has to end its threads."""
    run()
    gc.collect()
    gc.freeze()


def isolated(run: Callable[[_Case], _Outcome], case: _Case) -> _Outcome:
    """The outcome of one case, from a process that is forked for it. Raises Killed, or RuntimeError with a traceback.

    Call it in a process that has only one thread.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        _child(run, case, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise Killed(signal.Signals(-code).name)
    if not answer:
        raise Killed(f"exit code {code}")
    succeeded, outcome = pickle.loads(answer)
    if not succeeded:
        raise RuntimeError(outcome)
    return outcome


def _child(run: Callable[[Any], Any], case: Any, sender: int) -> None:
    try:
        signal.alarm(CASE_S)
        try:
            answer = True, run(case)
        except Exception:
            answer = False, traceback.format_exc()
        with os.fdopen(sender, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
    finally:
        os._exit(0)


def in_processes(
    work: Callable[[Sequence[_Case]], Iterator[_Outcome]], cases: Sequence[_Case], processes: int
) -> Iterator[_Outcome]:
    """`work` on the cases, dealt out to several forked processes. Outcomes come as they are ready.

    Call it in a process that has only one thread.
    """
    context = multiprocessing.get_context("fork")
    running: list[ForkProcess] = []
    waiting: list[Connection] = []
    try:
        for number in range(processes):
            if part := cases[number::processes]:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(work, part, sender))
                process.start()
                sender.close()
                running.append(process)
                waiting.append(receiver)
        while waiting:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                try:
                    yield connection.recv()
                except EOFError:
                    waiting.remove(connection)
        for process in running:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a process ended with {process.exitcode}")
    finally:
        for process in running:
            process.kill()
            process.join()


def _work(work: Callable[[Any], Iterator[Any]], cases: Sequence[Any], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for outcome in work(cases):
        sender.send(outcome)
    sender.close()
