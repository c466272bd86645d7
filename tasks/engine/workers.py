"""Processes that make one shard after another, so that the second finds its imports done.

A worker is started when none is idle, by a thread that lives as long as this process: workers die
with the thread that started them, and so with a build that is killed. It ends by itself when it has
had nothing to do for a while or has grown large. What it prints comes out here.

What goes through the pipe is pickled. Both ends are processes of this build and the pipe has no
name, so nothing foreign is ever unpickled.
"""

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

from schemas.errors import NativeError

IDLE_SECONDS = 60.0
"""A worker without work ends after this time."""
LARGE_BYTES = 1 << 30
"""A worker that holds more memory than this after its work makes way for a fresh one."""
TORCH_SEED = 67280421310721
"""What torch draws from in a fresh process."""


class Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        # A worker of a cluster is a daemon process itself, which multiprocessing forbids to have
        # children because they would outlive it. Ours die with it.
        multiprocessing.current_process().daemon = False
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A daemon: multiprocessing ends it when this process ends, and does not wait for it.
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, call: bytes) -> bool:
        """Whether it has taken the work; one that has just ended has not."""
        try:
            self.pipe.send_bytes(call)
            return bool(self.pipe.recv() == "begun")
        except (EOFError, OSError):
            return False

    def result(self) -> tuple[bool, Any, bool]:
        """(whether it went well, what came of it, whether the worker goes on)."""
        while True:
            kind, *contents = self.pipe.recv()
            if kind == "done":
                return contents[0], contents[1], contents[2]
            stream = sys.stdout if kind == "out" else sys.stderr
            stream.write(contents[0])
            stream.flush()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Workers:
    """The workers of this process; `run` may be called by many threads."""

    def __init__(self) -> None:
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        self._changed = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; what it raises comes out here, a death as NativeError."""
        here = dict(os.environ), os.getcwd()
        worker = self._started(pickle.dumps((*here, function, arguments)))
        goes_on = False
        try:
            went_well, result, goes_on = worker.result()
        except (EOFError, OSError):
            raise NativeError(
                f"{name}: its process died; what it printed is above. The same command goes on "
                "from the last checkpoint"
            ) from None
        finally:
            with self._changed:
                self._busy.discard(worker)
                if goes_on:
                    self._idle.append(worker)
            if not goes_on:
                worker.end()
        if not went_well:
            raise result
        return result

    def run_each(
        self, name: str, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], at_once: int
    ) -> Iterator[tuple[int, Any]]:
        """(number of the job, its result) as they come; then all workers end.

        Where one fails, or this process is told to stop, they end in the middle of their work.
        """
        with ThreadPoolExecutor(at_once, thread_name_prefix=name) as pool:
            futures = {
                pool.submit(self.run, name, function, *job): number
                for number, job in enumerate(jobs)
            }
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                while not all(future.done() for future in futures):  # one was just starting
                    time.sleep(0.05)
                    self.stop()

    def are_warm(self) -> bool:
        """Whether any waits for work."""
        return bool(self._idle)

    def _started(self, call: bytes) -> Worker:
        """A worker that has begun the work."""
        while True:
            with self._changed:
                worker = self._idle.pop() if self._idle else None
            fresh = worker is None
            worker = worker or self._starter.submit(Worker).result()
            with self._changed:
                self._busy.add(worker)
            if worker.begin(call):
                return worker
            with self._changed:
                self._busy.discard(worker)
            worker.end()
            if fresh:
                raise NativeError("a worker process did not start; what it printed is above")

    def stop(self) -> None:
        """End all of them now, in the middle of their work too."""
        with self._changed:
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.process.kill()


# ---------------------------------------------------------------- in the worker


class _Printed(io.TextIOBase):
    """A stream whose lines go through the pipe, each as a whole.

    All that a worker sends takes turns by one lock, as its threads print too.
    """

    def __init__(self, pipe: Connection, kind: str, turn: threading.Lock) -> None:
        self._pipe, self._kind, self._turn = pipe, kind, turn
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._turn:
            lines, end, self._line = (self._line + text).rpartition("\n")
            if end:
                self._pipe.send((self._kind, lines + end))
        return len(text)

    def finish(self) -> None:
        """End a line that was begun."""
        if self._line:
            self.write("\n")


def _serve(pipe: Connection, parent: int) -> None:
    """Do what comes through the pipe until nothing comes any more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died while this process was starting
        os._exit(1)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    turn = threading.Lock()
    printed, complained = _Printed(pipe, "out", turn), _Printed(pipe, "err", turn)
    while pipe.poll(IDLE_SECONDS):
        try:
            call = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send("begun")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
            went_well, result = _done(call)
        printed.finish()
        complained.finish()
        goes_on = _own_memory() < LARGE_BYTES
        with turn:
            pipe.send(("done", went_well, result, goes_on))
        if not goes_on:
            break
    os._exit(0)  # native libraries crash and hang on exit


def _done(call: bytes) -> tuple[bool, Any]:
    """Whether the call went well, and its result or its error, which can be pickled."""
    try:
        environment, folder, function, arguments = pickle.loads(call)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _as_in_a_fresh_process()
        result = True, function(*arguments)
        pickle.dumps(result)
        return result
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


def _as_in_a_fresh_process() -> None:
    """What an earlier shard may have set and results may depend on."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.manual_seed(TORCH_SEED)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _own_memory() -> int:
    """Bytes in memory that this process shares with no other."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
