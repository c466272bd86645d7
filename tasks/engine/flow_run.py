"""The run of a flow: the threads and the cluster that make its shards, and the account of them.

This one needs no server. `flows/tracked.py` has the one that tells a Prefect server of each shard;
stages do not know which of the two they run in.
"""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from typing import Any

from storage.pieces import Piece
from tasks.engine.places import Cluster

RETRY_SECONDS = 2.0
MOST_THREADS = 4096
"""Threads are started as shards come; how many may be under way is the build's decision."""

_LATEST: ContextVar["FlowRun | None"] = ContextVar("flow_run", default=None)


def latest_run() -> "FlowRun | None":
    """The run that was begun last, also after its end."""
    return _LATEST.get()


def current_run() -> "FlowRun | None":
    """The run of the flow around this call."""
    run = latest_run()
    return run if run is not None and run.is_open else None


class FlowRun:
    """One run of a flow. Use as a context manager: builds inside find it by `current_run`."""

    ahead = 1
    """Shards under way for each worker of a stage that runs in threads."""

    def __init__(self, cluster: Cluster | None = None, stack: ExitStack | None = None):
        self.id = str(uuid.uuid4())
        self.is_open = False
        self.error: BaseException | None = None
        """What ended it, once it has ended."""
        self.cluster = cluster
        self.shards: dict[tuple[str, str], str] = {}
        """Stage and shard to its state, for those under way ("running") and those that failed."""
        self._open = stack or ExitStack()
        self._pool = ThreadPoolExecutor(MOST_THREADS)
        self._stopped = threading.Event()

    def __enter__(self) -> "FlowRun":
        self.is_open = True
        _LATEST.set(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.is_open, self.error = False, error
        self._stopped.set()
        self._open.close()  # the cluster first, so that threads that wait for it end at once
        stopped = error is not None and not isinstance(error, Exception)
        self._pool.shutdown(wait=not stopped, cancel_futures=True)

    def submit(
        self, benchmark: str, stage: Any, shard: str, make: Callable[[], Piece]
    ) -> "Future[Piece]":
        """Have `make` called in a thread, again if it fails and the stage has retries."""
        return self._pool.submit(copy_context().run, self._made, benchmark, stage, shard, make)

    def _made(self, benchmark: str, stage: Any, shard: str, make: Callable[[], Piece]) -> Piece:
        self.shards[stage.name, shard] = "running"
        try:
            piece = self.attempt(benchmark, stage, shard, make)
        except Exception:
            self.shards[stage.name, shard] = "failed"
            raise
        del self.shards[stage.name, shard]
        return piece

    def attempt(self, benchmark: str, stage: Any, shard: str, make: Callable[[], Piece]) -> Piece:
        """What `make` returns; it is called again after a failure as often as the stage says."""
        for _ in range(stage.retries):
            try:
                return make()
            except Exception:
                if self._stopped.wait(RETRY_SECONDS):
                    raise
        return make()

    def open_shards(self) -> list[tuple[str, str, str]]:
        """Stage, shard and state of those that failed, else of those under way."""
        known = dict(self.shards)
        failed = {place: state for place, state in known.items() if state == "failed"}
        return sorted((*place, state) for place, state in (failed or known).items())

    def note(self, key: str, markdown: str, description: str | None) -> None:
        """Show a table to those who follow the run; without a server nobody does."""

    def link(self, key: str, address: str, description: str) -> None:
        """Show a link to those who follow the run."""
