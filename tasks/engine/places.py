"""Where a shard is made: in this process, in one of its own, or on a worker of a cluster.

Enters: a shard by reference (the stage's "module:function", the lake, the shard, its settings).
Leaves: its piece, committed to the lake. A cluster gives nothing back but that it is done: the
piece is found in the lake, which every worker must therefore see under the same address.
"""

import importlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from schemas.config import Settings
from schemas.errors import ConfigError, LakeError
from storage.layout import lake_address, lake_root
from storage.locks import nothing_removed
from storage.pieces import Piece, find_piece
from tasks.engine.slots import Slots, gpu_count
from tasks.engine.workers import Workers

SEEN_WITHIN_SECONDS = 90.0
"""How long a committed piece may stay unseen: network file systems remember absence for a while."""

GPU, CORES = "GPU", "CORES"
"""What workers of a cluster declare."""
LONG_SECONDS = 1.0
"""Work for each thread from which on a stage is spread over processes; less stays in threads."""
WARM_SECONDS = 0.5
"""The same where processes wait that were started for an earlier stage."""
SLOTS = Slots(os.cpu_count() or 1, gpu_count())
"""What shards in processes of their own share on this machine."""
WORKERS = Workers()
"""Processes of this one that make shards."""


class Cluster(Protocol):
    """Worker processes elsewhere, each with some threads."""

    def run(
        self,
        name: str,
        needs: Mapping[str, float],
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Wait until the function has run on some worker that has what it needs, and meanwhile
        gives that to no other."""

    def most(self, resource: str) -> float:
        """How much of a resource (`GPU`, `CORES`) any one worker declares; 0: none does."""

    def workers(self) -> int:
        """How many workers there are now."""

    def threads(self) -> int:
        """How many functions they run at once."""


class Spread:
    """Whether the shards of a stage are made in threads or also in other processes.

    Threads of one process share one interpreter, but starting others and their imports takes half
    a second: a few short shards are made here. What a shard takes grows with its `size`; it is told
    by `seconds` for all that are missing, where those are known, and by the shards made here: by
    the processor time of their threads, as one that waits keeps no other from its work. If
    nothing is known the smallest shard is made first, else the largest, so that all ends together.
    Once a shard was long the rest are too: one at a time is made here, where all is imported, the
    others in processes. `warm`: processes are there already.
    """

    def __init__(
        self, workers: int, sizes: Mapping[int, float], seconds: float | None, warm: bool = False
    ) -> None:
        self._workers = workers
        self._long = WARM_SECONDS if warm else LONG_SECONDS
        self._elsewhere = False
        self._made_here = threading.Lock()
        self._sizes = sizes
        self._left = deque(sorted(sizes, key=lambda number: (sizes[number], -number)))
        self._size_left = total = sum(sizes.values())
        self._pace = seconds / total if seconds is not None else None
        self._made = self._made_seconds = 0.0

    def __len__(self) -> int:
        """Shards that wait."""
        return len(self._left)

    def next(self) -> int:
        """The shard to begin now."""
        number = self._left.popleft() if self._pace is None else self._left.pop()
        self._size_left -= self._sizes[number]
        return number

    @contextmanager
    def measured(self, number: int) -> Iterator[None]:
        """Around the making of one shard in this process."""
        start = time.thread_time()
        yield
        self._made_seconds += time.thread_time() - start
        self._made += self._sizes[number]
        self._pace = self._made_seconds / self._made

    @contextmanager
    def free(self) -> Iterator[bool]:
        """Whether this process has none of the long shards yet; if so, it has one meanwhile."""
        is_free = self._made_here.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._made_here.release()

    def is_long(self, number: int) -> bool:
        """Whether this shard and those that wait would keep the threads busy for long.

        A single one would not end sooner elsewhere.
        """
        if self._workers == 1 or self._pace is None or len(self._sizes) == 1:
            return False
        size = self._size_left + self._sizes[number]
        self._elsewhere |= self._pace * size / self._workers > self._long
        return self._elsewhere


def make_shard(code: str, lake: str, benchmark: str, shard: Any, settings: Settings) -> Piece:
    """The piece of one shard, made on this machine as the stage demands."""
    if _stage_of(code).apart:
        return make_apart(code, lake, benchmark, shard, settings)
    return _make_here(code, lake, benchmark, shard, settings)


def make_apart(code: str, lake: str, benchmark: str, shard: Any, settings: Settings) -> Piece:
    """The piece of one shard, made by another process once there is a place for it."""
    apart = _stage_of(code).apart
    with SLOTS.taken(*places_wanted(shard, settings) if apart else ("cpu",)) as device:
        if apart and hasattr(settings, "device"):
            settings = settings.model_copy(update={"device": device})
        return WORKERS.run(shard.name, _make_here, code, lake, benchmark, shard, settings)


def places_wanted(shard: Any, settings: Settings) -> tuple[str, int, int | None, int]:
    """What `Slots.taken` is asked for: a device, threads, and how many share a CPU or a GPU."""
    return (
        getattr(settings, "device", "cpu"),
        shard.threads,
        getattr(settings, "trainings", None),
        getattr(settings, "trainings_per_gpu", 1),
    )


def _make_here(code: str, lake: str, benchmark: str, shard: Any, settings: Settings) -> Piece:
    return _stage_of(code).make(lake_root(lake), benchmark, shard, settings)


def _stage_of(code: str) -> Any:
    module, function = code.split(":")
    return getattr(importlib.import_module(module), function)


def make_on_cluster(
    cluster: Cluster, stage: Any, lake: Path, benchmark: str, shard: Any, settings: Settings
) -> Piece:
    """The piece of one shard, made on some worker of the cluster."""
    key = stage.key(benchmark, shard, settings)
    needs = resources_wanted(cluster, stage, shard, settings)
    what = (stage.code, lake_address(lake), benchmark, shard, settings, key)
    cluster.run(f"{stage.name}/{shard.name}", needs, _make_on_worker, *what)
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while (piece := find_piece(lake, benchmark, stage.name, key)) is None:
        if time.monotonic() > deadline:
            raise LakeError(
                f"{stage.name}/{shard.name} was made on the cluster, but {lake} here does not show "
                "it: choose a lake that every worker sees under the same address"
            )
        time.sleep(0.2)
    return replace(piece, made_now=True)


def resources_wanted(
    cluster: Cluster, stage: Any, shard: Any, settings: Settings
) -> dict[str, float]:
    """What a worker must have free: a GPU or a share of one, or cores; nothing that none declares.

    As `places_wanted`, but of the cluster's machines; more than any of them has is all of one.
    """
    device = getattr(settings, "device", "auto")
    if "gpu" in stage.tags and device != "cpu" and cluster.most(GPU) >= 1:
        return {GPU: 1 / getattr(settings, "trainings_per_gpu", 1)}
    cores = cluster.most(CORES) if stage.apart else 0
    return {CORES: min(shard.threads, cores)} if cores else {}


def _make_on_worker(
    code: str, lake: str, benchmark: str, shard: Any, settings: Settings, key: str
) -> None:
    if _stage_of(code).key(benchmark, shard, settings) != key:
        raise ConfigError(
            f"worker {socket.gethostname()} has another version of {code} than the flow: install "
            "the same version of this project on every worker and start the workers again"
        )
    # Also after the flow died: what is being made here is no leftover.
    with nothing_removed(lake_root(lake), SEEN_WITHIN_SECONDS):
        make_shard(code, lake, benchmark, shard, settings)
