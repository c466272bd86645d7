"""Runs a plain function on many items in child processes that may hang, crash or eat memory.

Enters: the dotted name of `f(item, out_dir) -> dict` and JSON items. Leaves: one `Outcome` per
item, in the order of the items, the same for any number of workers and any batch size.

- A child works through a batch. The result files tell how far it came (see `worker`): each item has
  its own wall-clock limit, and the first item without a result is the suspect when the child dies
  or is killed, so a poisoned item is found without halving the batch again and again.
- The suspect is tried once more alone in a fresh process and only then blamed; the others run on
  in another. So an item that fails only in company (a leak, a state left behind) is not lost.
- A result counts if it agrees with its hash. The exit code of a child that gave every result is
  never looked at: it is killed at once, since native libraries crash and hang on exit.
- Memory is limited by RLIMIT_DATA: heap and private writable pages, enforced by the kernel however
  fast they grow. RLIMIT_AS would also count the libraries and reserved address space: bpy renders
  within 0.5 GiB of data but needs 1.5 GiB of addresses. Shared memory is not counted.
- A child knows no keys of the environment, has no network where the kernel allows that, and where
  there is Landlock sees no files but libraries, its items and its scratch (see `sandbox`).
- What is wrong with the machine or the installation (a library does not load, the disk is full)
  raises `NativeError`, or `MissingExtra` for an optional library, and puts nobody in quarantine.

Linux only: parent-death signal, pidfd.
"""

import hashlib
import json
import os
import queue
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import MissingExtra, NativeError
from tasks.ingest.native.sandbox import environment, paths_in
from tasks.ingest.native.worker import MISSING, STOP

ROOT = Path(__file__).parents[3]
WORKER = "tasks.ingest.native.worker"
TICK_SECONDS = 0.05
READ_BYTES = 1 << 16
MESSAGE_CHARACTERS = 2000
STARTS = 2
MEMORY_SHARE = 0.8
ADDRESS = re.compile(r"0x[0-9a-fA-F]{5,}")
DUMP = "Fatal Python error:"
"""Python's last words begin with it: files and lines of the installation, for logs only."""
INSTALLED = sorted({str(ROOT), sys.prefix, sys.base_prefix}, key=len, reverse=True)
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


@dataclass(frozen=True)
class Limits:
    """`seconds_start` covers the interpreter and the imports; `output_bytes` is the tail kept of
    stdout and stderr; `memory_bytes` also bounds each file that the child writes."""

    seconds_per_item: float = 30
    seconds_start: float = 60
    memory_bytes: int = 4 << 30
    output_bytes: int = 64 << 10


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Outcome:
    """`value` is what the function returned, or None; then `rule` and `message` say why.

    Rules: native_timeout, native_crash, native_memory, native_no_result, native_error, or that of
    the `RecordError` which the function raised. The message is free of addresses, times and
    temporary paths, so that quarantine tables repeat. `output` is for logs: a traceback, or the
    end of what the blamed process printed.
    """

    item: int
    value: dict[str, Any] | None
    rule: str | None = None
    message: str | None = None
    output: str = ""


def run_batch(
    function: str,
    items: Sequence[Any],
    *,
    limits: Limits = DEFAULT_LIMITS,
    imports: Sequence[str] = (),
    workers: int = 1,
    batch: int = 32,
    threads: int = 1,
    scratch: Path | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    python: str = sys.executable,
) -> Generator[Outcome, None, None]:
    """Call `function` ("package.module:name") on each item; nothing runs until the first `next`.

    The function gets the item and an empty folder that is removed afterwards, and returns a dict of
    JSON values, bytes and numpy arrays. `imports` are loaded at the start of each child, so that a
    slow import is not charged to the first item. `scratch` holds requests and results while they
    are under way. `python` runs the children; it may be that of another environment, in which what
    the function imports is installed. `on_outcome` gets each outcome as soon as it is known, from
    the threads that drive the children. At most 2 * workers batches wait for the consumer; closing
    the generator ends all.
    """
    if workers < 1 or batch < 1 or threads < 1:
        raise ValueError(f"workers={workers}, batch={batch}, threads={threads}: expected 1 or more")
    json.dumps(list(items), allow_nan=False)
    run = _Run(function, items, limits, tuple(imports), threads, on_outcome, python)
    size = max(1, min(batch, -(-len(items) // workers)))
    batches = [range(i, min(i + size, len(items))) for i in range(0, len(items), size)]
    return _stream(run, batches, workers, scratch)


def _stream(
    run: "_Run", batches: Sequence[Sequence[int]], workers: int, scratch: Path | None
) -> Generator[Outcome, None, None]:
    todo: queue.SimpleQueue[tuple[Future, Sequence[int]] | None] = queue.SimpleQueue()

    def drive() -> None:
        while (task := todo.get()) is not None and not run.stopped.is_set():
            future, numbers = task
            try:
                future.set_result(run.resolve(numbers))
            except BaseException as error:
                future.set_exception(error)

    # Daemon threads: a parent that ends on an exception must not wait for its children. They die
    # with the thread that started them (PR_SET_PDEATHSIG is about the thread, not the process).
    drivers = [threading.Thread(target=drive, daemon=True) for _ in batches[:workers]]
    waiting: deque[Future] = deque()
    with tempfile.TemporaryDirectory(
        prefix="native-", dir=scratch and scratch.absolute(), ignore_cleanup_errors=True
    ) as run.scratch:
        try:
            for driver in drivers:
                driver.start()
            for numbers in batches:
                waiting.append(Future())
                todo.put((waiting[-1], numbers))
                if len(waiting) >= 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            run.stopped.set()
            for _ in drivers:
                todo.put(None)
            for driver in drivers:
                driver.join()


@dataclass
class _Run:
    function: str
    items: Sequence[Any]
    limits: Limits
    imports: tuple[str, ...]
    threads: int
    on_outcome: Callable[[Outcome], None] | None
    python: str = sys.executable
    scratch: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    def resolve(self, numbers: Sequence[int]) -> list[Outcome]:
        """The outcomes of one batch, in order, with as many children as that takes."""
        outcomes: dict[int, Outcome] = {}
        left = list(numbers)
        while left:
            outcomes |= self._started(left, alone=False).outcomes
            left = [number for number in left if number not in outcomes]
            if left:
                suspect = left.pop(0)
                child = self._started([suspect], alone=True)
                outcomes |= child.outcomes
                if suspect not in outcomes:
                    outcomes[suspect] = child.blame(suspect)
                    self.tell(outcomes[suspect])
        return [outcomes[number] for number in numbers]

    def _started(self, numbers: list[int], alone: bool) -> "_Child":
        """A child that has ended after it got as far as its first item."""
        for _ in range(STARTS):
            with tempfile.TemporaryDirectory(
                dir=self.scratch, ignore_cleanup_errors=True
            ) as folder:
                child = _Child(self, Path(folder), numbers, alone)
                child.work()
                if child.code == STOP and (missing_file := Path(folder) / MISSING).exists():
                    raise MissingExtra(missing_file.read_text())
            if child.finished or (child.ready and child.code != STOP):
                return child
            if child.code == STOP:
                break
        raise NativeError(
            f"{self.function}: the child process {child.ending()}, which is not the fault of a "
            f"record; imported at start: {', '.join(self.imports) or 'nothing more'}. Mend what it "
            f"printed, then run again:\n{child.printed()[-MESSAGE_CHARACTERS:]}"
        )

    def tell(self, outcome: Outcome) -> None:
        if self.on_outcome is not None:
            self.on_outcome(outcome)


class _Child:
    """One process and what is known of it: `outcomes` so far, `code` once it has ended."""

    def __init__(self, run: _Run, folder: Path, numbers: list[int], alone: bool):
        self.run, self.folder, self.numbers, self.alone = run, folder, numbers, alone
        self.outcomes: dict[int, Outcome] = {}
        self.position = 0
        self.ready = False
        self.late = False
        self.code: int | None = None
        self.peak_bytes = 0
        self.tail = bytearray()

    def work(self) -> None:
        """Start the process, take its results as they come, and leave it dead."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        request = {
            "function": self.run.function,
            "imports": self.run.imports,
            "items": [self.run.items[number] for number in self.numbers],
            "memory_bytes": self.run.limits.memory_bytes,
            "parent": os.getpid(),
        }
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [
                self.run.python,
                "-P",
                "-X",
                "faulthandler",
                "-m",
                WORKER,
                str(path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **environment(os.environ),
                **dict.fromkeys(THREAD_VARIABLES, str(self.run.threads)),
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "TMPDIR": str(temporary),
                "HOME": str(temporary),
            },
        )
        try:
            self._watch(process)
        finally:
            # The process is not reaped yet, so its number cannot belong to another group.
            os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            self.code = process.returncode = os.waitstatus_to_exitcode(status)
            # The peak of a child starts at that of its parent: below that it tells nothing.
            inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.peak_bytes = usage.ru_maxrss << 10 if usage.ru_maxrss > inherited else 0
            self._drain(process)

    def _watch(self, process: subprocess.Popen) -> None:
        """Return when every item has its result, the process has ended, or its time is up."""
        limits = self.run.limits
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        ended = os.pidfd_open(process.pid)
        deadline = time.monotonic() + limits.seconds_start
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.register(process.stdout, selectors.EVENT_READ)
                while not self.run.stopped.is_set():
                    seen = {key.fileobj for key, _ in selector.select(TICK_SECONDS)}
                    if process.stdout in seen and not self._read_output(process):
                        selector.unregister(process.stdout)
                    if self._take_results():
                        deadline = time.monotonic() + limits.seconds_per_item
                    if self.finished or ended in seen:
                        return
                    if time.monotonic() > deadline:
                        self.late = True
                        return
        finally:
            os.close(ended)
        raise CancelledError

    @property
    def finished(self) -> bool:
        return self.position == len(self.numbers)

    def _take_results(self) -> bool:
        """Read the results that have appeared since the last call; true if there were any."""
        before = (self.ready, self.position)
        self.ready = self.ready or (self.folder / "ready").exists()
        while not self.finished and (self.folder / f"{self.position}.json").exists():
            number = self.numbers[self.position]
            body = _read(self.folder, self.position)
            self.position += 1
            # Memory that ran out in company may be another item's: not a verdict yet.
            if body is None or (body.get("rule") == "native_memory" and not self.alone):
                continue
            if "value" in body:
                self.outcomes[number] = Outcome(number, body["value"])
            else:
                self.outcomes[number] = self._rejected(number, **body)
            self.run.tell(self.outcomes[number])
        return before != (self.ready, self.position)

    def _rejected(self, number: int, rule: str, message: str, output: str = "") -> Outcome:
        message = message.replace(str(self.folder), "<scratch>")
        if rule in ("native_error", "native_memory"):
            message = f"{self.run.function} {ADDRESS.sub('0x…', message)}"
        return Outcome(number, None, rule, self._placeless(number, message), self._clean(output))

    def _placeless(self, number: int, message: str) -> str:
        """The same message wherever the files and this project stand."""
        for path in sorted(paths_in(self.run.items[number]), key=len, reverse=True):
            message = message.replace(path, Path(path).name)
        for path in INSTALLED:
            message = message.replace(path, "<installed>")
        return message

    def blame(self, number: int) -> Outcome:
        """The verdict on an item that got no result although it had a process of its own."""
        if self.late:
            rule = "native_timeout"
        elif self.finished or self.code == 0:
            rule = "native_no_result"
        elif (
            self.peak_bytes > MEMORY_SHARE * self.run.limits.memory_bytes
            or b"bad_alloc" in self.tail
        ):
            rule = "native_memory"
        else:
            rule = "native_crash"
        message = f"{self.run.function} failed twice; alone in a process it {self.ending()}"
        if rule == "native_memory":
            message += f", near its limit of {self.run.limits.memory_bytes} bytes"
        output = self.printed()
        # What a killed process printed last depends on the moment of the kill.
        output_tail = "" if self.late else output.partition(DUMP)[0].strip()
        if output_tail:
            message += f"; it printed: {output_tail[-MESSAGE_CHARACTERS:]}"
        return Outcome(number, None, rule, self._placeless(number, message), output)

    def ending(self) -> str:
        limits = self.run.limits
        if self.late and self.ready:
            return f"gave no result within {limits.seconds_per_item:g} s and was killed"
        if self.late:
            return f"did not start within {limits.seconds_start:g} s and was killed"
        if self.finished:
            return "left a result that does not agree with its hash"
        if self.code == -signal.SIGKILL:
            return "was killed from outside (by the kernel for want of memory?)"
        if self.code is not None and self.code < 0:
            return f"died of signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"ended with exit code {self.code} and left no result"

    def printed(self) -> str:
        return self._clean(self.tail.decode(errors="replace")).strip()

    def _clean(self, text: str) -> str:
        return ADDRESS.sub("0x…", text.replace(str(self.folder), "<scratch>"))

    def _read_output(self, process: subprocess.Popen) -> bool:
        """Keep the tail of one read; false at the end of the stream or when nothing is there."""
        assert process.stdout is not None
        try:
            data = os.read(process.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        self.tail += data
        del self.tail[: max(0, len(self.tail) - self.run.limits.output_bytes)]
        return bool(data)

    def _drain(self, process: subprocess.Popen) -> None:
        """What the dead process left in the pipe; bounded, since a stranger may still hold it."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        for _ in range(16):
            if not self._read_output(process):
                break
        process.stdout.close()


def _read(folder: Path, i: int) -> dict[str, Any] | None:
    """The body of result `i`, arrays and bytes in place; None unless it agrees with its hash."""
    path = folder / f"{i}.json"
    try:
        digest, _, encoded = path.read_bytes().partition(b"\n")
        if hashlib.sha256(encoded).hexdigest().encode() != digest:
            return None
        body: dict[str, Any] = json.loads(encoded)
        for key, (name, expected) in body.get("parts", {}).items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    return None
                file.seek(0)
                is_array = name.endswith(".npy")
                body["value"][key] = np.load(file, allow_pickle=False) if is_array else file.read()
            (folder / name).unlink()
    except (FileNotFoundError, RecursionError):
        return None
    return body
