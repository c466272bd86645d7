"""The one decorator that turns a plain function into a stage, and the build that runs stages.

Enters: a function from a shard and its settings to frames. Leaves: committed pieces, published as
tables. A stage's output is named by the hash of (stage, its version, versions of the tables it
writes, settings, digests of its inputs), so what is committed is never made again. The skip happens
here, before a shard is even submitted to the run of the flow.
"""

import errno
import importlib
import logging
import os
import queue
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import polars as pl

from schemas.config import Settings
from schemas.errors import (
    LakeError,
    MissingExtra,
    NoveltyError,
    RecordError,
    RunsFailed,
    SourceError,
    TooManyRejects,
)
from schemas.manifest import BuildRecord, Input, PieceManifest, RunMark, Snapshot, SourceListing
from schemas.table import Table
from schemas.tables import (
    METRICS,
    PROTOCOLS,
    QUARANTINE,
    RUNS,
    SCORE_SETTINGS,
    SPLITS,
    tables_of,
)
from storage.filehash import HashCache
from storage.layout import content_key, hash_cache_path, lake_root, pieces_path, work_path
from storage.locks import benchmark_locked
from storage.parquet import WRITER_VERSION
from storage.pieces import Part, Piece, find_piece, find_pieces, pieces_of_stage, write_piece
from storage.raw import RawFile, RawSource, open_raw
from storage.remote import at_once
from storage.snapshots import publication_base
from storage.tables import (
    Contents,
    TableVersion,
    current_version,
    last_versions,
    pieces_by_run,
    pieces_of,
    publish,
    versions_of,
)
from storage.unchanged import read_unchanged
from storage.upkeep import ancestors_of, read_build_record, write_build_record
from tasks.engine.estimates import (
    DryRun,
    DryRunEnds,
    Pace,
    current_dry_run,
    note_time,
    paces,
    raw_of,
)
from tasks.engine.flow_run import FlowRun, current_run
from tasks.engine.places import SLOTS, WORKERS, Spread, make_apart, make_on_cluster, make_shard
from tasks.engine.progress import progress
from tasks.engine.reference import Raw, shipped_reference
from tasks.engine.threads import one_blas_thread

log = logging.getLogger(__name__)

STOPS = (LakeError, SourceError, MissingExtra, TooManyRejects)
"""Errors that are no matter of one run: they stop a build, as a full or broken disk does."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
FAILURES = "record_failure"
"""Stage whose pieces say that a run failed; a run that succeeds later takes their place."""
REFUSED = dict.fromkeys(("table_name", "record", "rule", "message"), pl.String)
WAKE_SECONDS = 0.5
"""How often a build looks up while no shard gets done: was it stopped, has its cluster grown?"""
PUBLISH_SECONDS = 10.0
"""Finished runs of one stage are published together unless so much time has passed."""
PUBLISH_SHARE = 0.05
"""Share of a build's time that may be spent on showing what is finished."""


@dataclass(frozen=True)
class Reject:
    """A record that did not become a row."""

    record: str
    rule: str
    message: str
    table: str = ""

    @classmethod
    def of(cls, record: str, error: RecordError, table: str = "") -> "Reject":
        return cls(record, error.rule, error.message, table)


@dataclass(frozen=True)
class Produced:
    """What a stage made of a shard. `records` counts what went in for the first table."""

    tables: dict[str, pl.DataFrame]
    records: int
    rejects: Sequence[Reject] = ()
    files: Mapping[str, Path] = field(default_factory=dict)

    def unreadable(self) -> str | None:
        """Why a raw file could not be read. It could when it was listed, so this is no record."""
        faults = (r for r in self.rejects if r.rule == "unreadable")
        return next((f"{reject.record}: {reject.message}" for reject in faults), None)


@dataclass(frozen=True)
class Failure:
    """A shard of a run that could not be made."""

    shard: "Shard"
    stage: str
    reason: str


@dataclass(frozen=True)
class Shard:
    """A unit of work: its name, what it is made from, and whatever else the function needs to know.

    `about` must be JSON and is part of the content key; `source` (a raw root) is not, nor is
    `work`: a folder for checkpoints that outlives a killed run, set when a build runs the stage,
    nor `earlier`: what a stage that `reuses` made of the shard of this name in the last build, nor
    `threads`: how many cores its process takes where a stage runs `apart`.

    A shard that uses only some rows of its parts says so by `depends`: JSON that stands in the key
    in the place of the parts' digests. The manifest lists the parts that were read all the same.
    `run` is the run that the piece belongs to; the piece stays in the tables of later builds as
    long as the rows of its protocol are the same.
    """

    name: str
    files: tuple[RawFile, ...] = ()
    parts: tuple[Part, ...] = ()
    source: str | None = None
    about: Any = None
    depends: Any = None
    run: RunMark | None = None
    work: Path | None = None
    earlier: Piece | None = None
    threads: int = 1

    def inputs(self) -> list[Input]:
        raw = [Input(name=file.name, digest=file.digest, size=file.size) for file in self.files]
        return raw + [part.as_input() for part in self.parts]

    def size(self) -> int:
        """Bytes that go in, to tell large shards from small ones."""
        return 1 + sum(file.size for file in self.files) + sum(part.bytes for part in self.parts)

    def identity(self) -> Any:
        """What of its inputs is in the content key."""
        if self.depends is None:
            return [[i.name, i.digest] for i in self.inputs()]
        return [[[file.name, file.digest] for file in self.files], self.depends]

    def part(self, table: str) -> Part:
        """The one part of that table."""
        (table_part,) = (part for part in self.parts if part.table == table)
        return table_part

    def read(self, table: str, columns: list[str] | None = None) -> pl.DataFrame:
        """All rows of that table among the shard's parts."""
        return pl.concat([part.read(columns) for part in self.parts if part.table == table])


class Stage:
    """A function with a version. Call it plainly in a test; `Build.run` it in a flow."""

    def __init__(
        self,
        function: Callable[[Shard, Any], Produced],
        writes: Sequence[Table] | Callable[[Any], Sequence[Table]],
        version: int,
        retries: int,
        tags: Sequence[str],
        apart: bool,
        reuses: bool,
    ):
        self.function = function
        self.name = function.__name__
        self.code = f"{function.__module__}:{function.__name__}"
        self._writes = writes
        self.version = version
        self.retries = retries
        self.tags = tuple(tags)
        self.apart = apart
        self.reuses = reuses
        self.__doc__ = function.__doc__

    def __call__(self, shard: Shard, settings: Settings) -> Produced:
        return self.function(shard, settings)

    def writes(self, settings: Settings) -> tuple[Table, ...]:
        """The tables it writes; the first is the one that records are counted by."""
        return tuple(self._writes(settings) if callable(self._writes) else self._writes)

    def key(self, benchmark: str, shard: Shard, settings: Settings) -> str:
        return content_key(
            {
                "stage": f"{benchmark}/{self.name}",
                "version": self.version,
                "writer": WRITER_VERSION,
                "schemas": {
                    table.name: table.version for table in (*self.writes(settings), QUARANTINE)
                },
                "settings": settings.model_dump(mode="json"),
                "shard": shard.name,
                "about": shard.about,
                "inputs": shard.identity(),
            }
        )

    def make(self, lake: Path, benchmark: str, shard: Shard, settings: Settings) -> Piece:
        """The committed piece of this shard, made now unless it is there."""
        key = self.key(benchmark, shard, settings)
        piece = find_piece(lake, benchmark, self.name, key)
        if piece is not None:
            return piece
        one_blas_thread()
        start, busy = time.perf_counter(), time.thread_time()
        work = work_path(lake, benchmark, self.name, key)
        produced = read_unchanged(
            shard.source,
            shard.files,
            lambda: self(replace(shard, work=work), settings),
            HashCache(hash_cache_path(lake)),
            Produced.unreadable,
        )
        writes = self.writes(settings)
        frames, quarantine = self._checked(shard, produced, writes)
        first = writes[0].name
        refused = quarantine.filter(pl.col("table_name") == first).height
        kept = frames[first][1].height
        if produced.records != kept + refused:
            raise AssertionError(
                f"stage {self.name}, shard {shard.name}: {produced.records} records went in, but "
                f"{kept} came out and {refused} were quarantined"
            )
        manifest = PieceManifest(
            benchmark=benchmark,
            stage=self.name,
            code=self.code,
            stage_version=self.version,
            key=key,
            shard=shard.name,
            settings=settings.model_dump(mode="json"),
            source=shard.source,
            inputs=shard.inputs(),
            # All reads compare with the digest; rows taken over are as good as their piece.
            inputs_verified=shard.earlier is None or shard.earlier.manifest.inputs_verified,
            rows_in=produced.records,
            rows_out=kept,
            quarantined=quarantine.height,
            parts=[],
            run=shard.run,
        )
        frames[QUARANTINE.name] = (QUARANTINE, quarantine)
        piece = write_piece(lake, manifest, frames, produced.files)
        seconds = time.perf_counter() - start
        note_time(lake, manifest, seconds, time.thread_time() - busy)
        shutil.rmtree(work, ignore_errors=True)
        return piece

    def _checked(
        self, shard: Shard, produced: Produced, writes: Sequence[Table]
    ) -> tuple[dict[str, tuple[Table, pl.DataFrame]], pl.DataFrame]:
        """Frames that keep every rule, and one quarantine row for each record that does not."""
        first = writes[0].name
        refused: list[pl.DataFrame] = []
        if produced.rejects:
            rejects = [(r.table or first, r.record, r.rule, r.message) for r in produced.rejects]
            refused.append(pl.DataFrame(rejects, schema=REFUSED, orient="row"))
        frames: dict[str, tuple[Table, pl.DataFrame]] = {}
        for table in writes:
            rows = produced.tables.get(table.name)
            rows = table.empty() if rows is None else rows
            good, bad = table.check(rows, {name: frame for name, (_, frame) in frames.items()})
            frames[table.name] = (table, good)
            if bad.height:
                refused.append(bad.select(pl.lit(table.name).alias("table_name"), pl.all()))
        if not refused:
            return frames, QUARANTINE.empty()
        quarantine = pl.concat(refused).select(
            pl.lit(self.name).alias("stage"),
            pl.lit(shard.name).alias("shard"),
            "table_name",
            "record",
            pl.int_range(pl.len(), dtype=pl.Int32).over("table_name", "record").alias("number"),
            "rule",
            "message",
        )
        good, bad = QUARANTINE.check(quarantine)
        if bad.height:
            raise AssertionError(f"stage {self.name}: a quarantine row is bad itself: {bad.row(0)}")
        return frames, good


def stage(
    writes: Sequence[Table] | Callable[[Any], Sequence[Table]],
    *,
    version: int = 1,
    retries: int = 0,
    tags: Sequence[str] = (),
    apart: bool = False,
    reuses: bool = False,
) -> Callable[[Callable[[Shard, Any], Produced]], Stage]:
    """Declare a stage: the tables it writes, or a function from its settings to them.

    Raise `version` when the function's output changes for the same input. `retries` only where the
    work is I/O: anything else fails the same way again. `apart` shards run in processes of their
    own, as many at once as there are cores for their `threads`, or places on GPUs
    (`engine/slots.py`): for trainings, and for native code that may crash. A process makes many of
    them: what a shard draws from and how many threads it uses it must set itself.
    A stage that `reuses` finds its last piece in `shard.earlier` and may take over rows of it whose
    inputs did not change: only where a row made anew would be the same to the bit.
    """

    def wrap(function: Callable[[Shard, Any], Produced]) -> Stage:
        return Stage(function, writes, version, retries, tags, apart, reuses)

    return wrap


def _is_found(stage: Stage) -> bool:
    """Whether another process finds the stage by its name."""
    module, name = stage.code.split(":")
    return getattr(sys.modules.get(module), name, None) is stage


def stage_version(code: str) -> int | None:
    """Today's version of the stage recorded as "module:function"; None if it is gone."""
    module, name = code.split(":")
    try:
        member = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return member.version if isinstance(member, Stage) else None


@dataclass
class Build:
    """One build of one benchmark: runs stages, publishes tables, keeps the account.

    Use as a context manager: it holds the benchmark's lock, and at the end publishes what the
    stages made, the quarantine table and the catalogue. If the block fails, what was committed
    stays committed and the old tables stay current. In a dry run (`engine/estimates.py`) it
    only plans.
    """

    benchmark: str
    lake: Path = field(default_factory=lake_root)
    settings: Any = None
    max_reject_share: float = 0.25
    workers: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    pieces: list[Piece] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, TableVersion] = field(default_factory=dict)
    dry: DryRun | None = field(default_factory=current_dry_run)

    def __post_init__(self) -> None:
        self._sources: dict[str, SourceListing] = {}
        self._raw_digests: set[str] = set()
        self._tolerate: set[str] | None = None
        self._tables: dict[str, Table] = {}
        self._stack = ExitStack()
        self._unpublished = False
        self._published_at = self._publish_cost = 0.0
        self._paces: dict[str, Pace] | None = None

    def __enter__(self) -> "Build":
        if self.dry is not None:
            return self
        wait = float(os.environ.get("NOVELTY_LOCK_WAIT", "0"))
        self._stack.enter_context(benchmark_locked(self.lake, self.benchmark, wait))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            WORKERS.stop()  # told to stop: trainings end now, not when they are done
        try:
            if self.dry is not None:
                self._end_dry_run(self.dry, error)
            elif kind is None:
                self.finish()
                if self.failures:
                    raise RunsFailed(self._failure_sentence())
        finally:
            self._stack.close()

    def _end_dry_run(self, dry: DryRun, error: Any) -> None:
        """Leave the flow: whatever it does after the build needs the tables."""
        if error is None:
            last = read_build_record(self.lake, self.benchmark)
            dry.published = last is not None and _apart_from_lake(last) == _apart_from_lake(
                self._record()
            )
            raise DryRunEnds
        if dry.incomplete and isinstance(error, Exception) and not isinstance(error, DryRunEnds):
            dry.unplanned_after = dry.plans[-1].stage  # it asks for rows that are not there yet
            raise DryRunEnds from error

    def source(self, path: Path, **options: Any) -> RawSource:
        """Open a raw folder or archive; its listing is kept so that `status` can tell changes."""
        opened = open_raw(path, HashCache(self._hash_cache()), listed_once=True, **options)
        listed = opened.files()
        if opened.skipped:
            first = opened.skipped[0]
            log.warning(
                f"{self.benchmark}: {len(opened.skipped)} entries of {opened.root} are left out, "
                f"first {first.name} ({first.reason})"
            )
        files = {file.name: file.digest for file in listed}
        if self.dry is not None:
            self.dry.sources[path] = Raw(len(listed), sum(file.size for file in listed))
        self._raw_digests.update(files.values())
        self._sources[opened.root] = SourceListing(
            root=opened.root, files=len(files), digest=content_key(files)
        )
        return opened

    def _hash_cache(self) -> Path:
        if self.dry is None or self.lake.is_dir():
            return hash_cache_path(self.lake)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())  # makes no lake
        return hash_cache_path(Path(folder))

    def run_each(
        self, stage: Stage, shards: Iterable[Shard], settings: Settings
    ) -> list[tuple[Shard, Piece]]:
        """Like `run`, for shards of runs: one that fails is noted and stops no other.

        It is left out of what comes back. A dry run gives the pieces that it plans with.
        """
        shards = list(shards)
        lost: set[str] = set()
        self._tolerate = lost
        try:
            pieces = self.run(stage, shards, settings)
        finally:
            self._tolerate = None
        kept = [shard for shard in shards if shard.name not in lost]
        return list(zip(kept, pieces, strict=self.dry is None))

    def _failed(self, stage: Stage, shard: Shard, error: Exception) -> None:
        """Note the failure of a run, or raise where it must stop the build."""
        if self._tolerate is None or shard.run is None or isinstance(error, STOPS):
            raise error
        if isinstance(error, OSError) and error.errno in DISK:
            raise error
        reason = str(error)
        if not isinstance(error, NoveltyError):
            traceback.print_exception(error)
            reason = f"{type(error).__name__}: {error}"
        what = f"run {shard.name} failed in {stage.name}"
        log.error(f"{self.benchmark}: {what}: {reason}")
        self._tolerate.add(shard.name)
        self.failures.append(Failure(shard, stage.name, reason))

    def run(self, stage: Stage, shards: Iterable[Shard], settings: Settings) -> list[Piece]:
        """The pieces of all shards, in shard order; only those not yet committed are made."""
        shards = list(shards)
        keys = [stage.key(self.benchmark, shard, settings) for shard in shards]
        shard_pieces = find_pieces(self.lake, self.benchmark, stage.name, keys)
        if self.dry is not None:
            at_once = self.workers
            what = (self.lake, self.benchmark, stage, shards, shard_pieces, settings, at_once)
            planned = self.dry.plan(*what)
            self.pieces += planned
            return planned
        missing = [number for number, piece in enumerate(shard_pieces) if piece is None]
        if stage.reuses and missing:
            earlier = self.earlier(stage, settings)
            shards = [replace(shard, earlier=earlier.get(shard.name)) for shard in shards]
        if missing:
            self._publish_finished()
        self._tables |= {table.name: table for table in stage.writes(settings)}
        evaluates = any(table.name == METRICS.name for table in stage.writes(settings))
        left = Counter(mark.run_id for number in missing if (mark := shards[number].run))
        for number, piece in self._make_missing(stage, shards, missing, settings):
            shard_pieces[number] = piece
            if evaluates and (mark := shards[number].run) is not None:
                left[mark.run_id] -= 1
                self._unpublished |= not left[mark.run_id]
                self._publish_finished(shard_pieces, +left, PUBLISH_SECONDS)
        pieces = [piece for piece in shard_pieces if piece is not None]
        self._check_rejects(stage, pieces)
        self._say(stage, pieces, len(missing))
        addresses = {piece.manifest.address for piece in self.pieces}
        self.pieces += [piece for piece in pieces if piece.manifest.address not in addresses]
        return pieces

    def missing(self, stage: Stage, shards: Sequence[Shard], settings: Settings) -> list[Shard]:
        """Shards of which there is no piece yet."""
        keys = [stage.key(self.benchmark, shard, settings) for shard in shards]
        pieces = find_pieces(self.lake, self.benchmark, stage.name, keys)
        return [shard for shard, piece in zip(shards, pieces, strict=True) if piece is None]

    def at_once(self) -> int:
        """How many shards the cluster, or else this machine, makes at once."""
        run = current_run()
        cluster = run.cluster if run is not None else None
        return self.workers if cluster is None else max(1, cluster.threads())

    def earlier(self, stage: Stage, settings: Settings) -> dict[str, Piece]:
        """Pieces behind the current version that the same code made with the same settings."""
        try:
            version = current_version(self.lake, self.benchmark, stage.writes(settings)[0].name)
        except LakeError:
            return {}
        addresses = [part.piece.split("/") for part in version.manifest.parts if part.piece]
        keys = [key for _, name, key in addresses if name == stage.name]
        version_and_settings = (stage.version, settings.model_dump(mode="json"))
        return {
            piece.shard: piece
            for piece in find_pieces(self.lake, self.benchmark, stage.name, keys)
            if piece is not None
            and (piece.manifest.stage_version, piece.manifest.settings) == version_and_settings
        }

    def _make_missing(
        self, stage: Stage, shards: list[Shard], missing: list[int], settings: Settings
    ) -> Iterable[tuple[int, Piece]]:
        """The pieces of the missing shards as they get done, by the run of the flow around us."""
        if not missing:
            return
        with ExitStack() as stack:
            run = current_run() or stack.enter_context(FlowRun())
            cluster = run.cluster
            sizes = {number: shards[number].size() for number in missing}
            spreads = _is_found(stage) and not stage.apart and cluster is None
            to_make = [shards[number] for number in missing]
            seconds = self._expected(stage, to_make) if spreads else 0.0
            workers = self.workers if spreads else 1
            left = Spread(workers, sizes, seconds, WORKERS.are_warm())

            def make(number: int) -> Piece:
                what = (self.benchmark, shards[number], settings)
                if cluster is not None:
                    return make_on_cluster(cluster, stage, self.lake, *what)
                if stage.apart:
                    return make_shard(stage.code, str(self.lake), *what)
                if not left.is_long(number):
                    with left.measured(number):
                        return stage.make(self.lake, *what)
                with left.free() as free:
                    if free:
                        with SLOTS.taken("cpu"):
                            return stage.make(self.lake, *what)
                    return make_apart(stage.code, str(self.lake), *what)

            done: queue.SimpleQueue[Future[Piece]] = queue.SimpleQueue()
            waiting: dict[Future[Piece], int] = {}
            title = f"{self.benchmark}/{stage.name}, shards"
            advance = stack.enter_context(progress(title, len(missing)))
            try:
                while left or waiting:
                    while left and len(waiting) < self._at_once(stage, run, settings):
                        number = left.next()
                        work = partial(make, number)
                        future = run.submit(self.benchmark, stage, shards[number].name, work)
                        waiting[future] = number
                        future.add_done_callback(done.put)
                    try:
                        # Not for ever: polars keeps Ctrl-C from waking a thread that waits.
                        future = done.get(timeout=WAKE_SECONDS)
                    except queue.Empty:
                        continue
                    number = waiting.pop(future)
                    try:
                        yield number, future.result()
                    except Exception as error:
                        self._failed(stage, shards[number], error)
                    advance(1)
            except Exception:
                if cluster is None:
                    wait(waiting)  # what is under way is committed while the lake is still ours
                raise

    def _expected(self, stage: Stage, shards: Sequence[Shard]) -> float | None:
        """Seconds of one process for these shards, by earlier builds or else by the reference.

        The reference tells the pace of stages that read raw files, which are taken for a megabyte
        where it counts by something else: the first shard made here then tells better.
        """
        if len(shards) < 2:
            return None
        if self._paces is None:
            self._paces = paces(self.lake, self.benchmark)
        if (pace := self._paces.get(stage.name)) is not None:
            return pace.busy / pace.shards * len(shards)
        raw = Raw.sum(raw_of(shards).values())
        rate = shipped_reference().rates.get((self.benchmark, stage.name, ""))
        return rate.seconds * raw.megabytes if rate is not None and raw.files else None

    def _at_once(self, stage: Stage, run: FlowRun, settings: Settings) -> int:
        """How many of a stage's shards may be under way now; a cluster may have grown."""
        if run.cluster is not None:
            return max(1, 2 * run.cluster.threads())
        if stage.apart:
            return max(self.workers, getattr(settings, "trainings", None) or 0)
        return run.ahead * self.workers

    def _check_rejects(self, stage: Stage, pieces: list[Piece]) -> None:
        rows_in = sum(piece.manifest.rows_in for piece in pieces)
        refused = rows_in - sum(piece.manifest.rows_out for piece in pieces)
        if refused > self.max_reject_share * rows_in:
            rows = pl.concat([piece.part(QUARANTINE.name).read() for piece in pieces])
            first = "; ".join(f"{r['record']}: {r['message']}" for r in rows.head(3).to_dicts())
            raise TooManyRejects(
                f"{stage.name} refused {refused} of {rows_in} records, more than the allowed share "
                f"{self.max_reject_share:g}. First ones: {first}. Mend the source or raise "
                "max_reject_share."
            )

    def _say(self, stage: Stage, pieces: list[Piece], made: int) -> None:
        rows_in = sum(piece.manifest.rows_in for piece in pieces)
        rows_out = sum(piece.manifest.rows_out for piece in pieces)
        refused = sum(piece.manifest.quarantined for piece in pieces)
        line = (
            f"{self.benchmark}/{stage.name}: {made} of {len(pieces)} shards made, "
            f"{rows_in} records in, {rows_out} out, {refused} quarantined"
        )
        log.info(line)
        if made and (run := current_run()) is not None:
            table = (
                "| shards | made now | records in | rows out | quarantined |\n"
                "|---|---|---|---|---|\n"
                f"| {len(pieces)} | {made} | {rows_in} | {rows_out} | {refused} |\n"
            )
            key = f"{self.benchmark}-{stage.name}".replace("_", "-").lower()
            run.note(key, table, stage.__doc__)

    def publish(self) -> dict[str, TableVersion]:
        """Show what is finished while the build goes on: data, and each run with all its tables.

        The snapshot is marked as partial. A run is finished once it is evaluated, or has failed;
        runs of earlier builds stay. Runs that finish later are published by themselves.
        """
        if self.dry is None:
            self._publish_partial(self.pieces)
        return self.versions

    def _publish_finished(
        self,
        shard_pieces: Sequence[Piece | None] = (),
        pending: Iterable[str] = (),
        seconds: float = 0.0,
    ) -> None:
        """Publish runs that are finished now, unless it was done just before.

        Of a stage that is under way: the pieces found so far, and runs that wait for more.
        """
        wait = max(seconds, self._publish_cost / PUBLISH_SHARE)
        if self._unpublished and time.monotonic() >= self._published_at + wait:
            self._publish_partial([*self.pieces, *filter(None, shard_pieces)], pending)

    def _publish_partial(self, pieces: Sequence[Piece], pending: Iterable[str] = ()) -> None:
        start = time.monotonic()
        visible = _finished(pieces, pending)
        before = publication_base(self.lake, self.benchmark).snapshot
        if self._publish(visible, partial=True) != before:
            _refresh_catalog(self.lake)  # the end of the build does it in any case
        self._unpublished = False
        self._published_at = time.monotonic()
        self._publish_cost = self._published_at - start

    def _publish(self, made: Sequence[Piece], partial: bool) -> Snapshot:
        table_names = {part.table for piece in made for part in piece.manifest.parts}
        tables = {n: table for n, table in self._tables.items() if n in table_names or not partial}
        snapshot = publish(
            self.lake,
            self.benchmark,
            lambda old: self._contents(old, made, tables),
            partial=partial,
            finished=not partial,
            settings=self._record().settings,
        )
        versions = versions_of(self.lake, snapshot)
        self.versions = {version.manifest.table: version for version in versions}
        return snapshot

    def _contents(
        self, old: Snapshot | None, made: Sequence[Piece], tables: Mapping[str, Table]
    ) -> Contents:
        """The tables of these pieces, with earlier pieces that are still true.

        Other tables of the last snapshot stay as they are, unless they were made from something
        that this build made anew.
        """
        made = _without_parts_of_failed(made)
        carried = self.carried(made, old)
        pieces = [*made, *carried]
        declared = tables_of(self.benchmark)
        names = {part.table for piece in carried for part in piece.manifest.parts}
        tables = {name: declared[name] for name in sorted(names & declared.keys())} | dict(tables)
        tables[QUARANTINE.name] = QUARANTINE
        kept = {}
        outdated = self._outdated(pieces)
        others = set(old.tables if old is not None else ()) - tables.keys()
        for version in versions_of(self.lake, old, sorted(others)) if old is not None else []:
            name, gathered = version.manifest.table, pieces_of(self.lake, [version])
            if name in declared and any(piece.manifest.run is not None for piece in gathered):
                tables[name] = declared[name]  # none of its runs is true any more
            elif not any(outdated(piece.manifest.address) for piece in gathered):
                kept[name] = version.manifest.key
            else:
                log.warning(
                    f"{version.name}: left out, as it was made from what is another now; a build "
                    "that asks for it makes it anew"
                )
        return Contents(list(tables.values()), pieces, kept, pieces_by_run(pieces))

    def _outdated(self, pieces: Iterable[Piece]) -> Callable[[str], bool]:
        """Whether a piece was made from something that this build made anew or found changed."""
        addresses = {piece.manifest.address for piece in pieces}
        stages = {piece.manifest.stage for piece in self.pieces}
        known: dict[str, bool] = dict.fromkeys(addresses, False)

        def outdated(address: str) -> bool:
            if address not in known:
                piece = find_piece(self.lake, *address.split("/"))
                known[address] = address.split("/")[1] in stages or (
                    piece is not None and _is_outdated(piece.manifest)
                )
            return known[address]

        def _is_outdated(manifest: PieceManifest) -> bool:
            raw = {origin.digest for origin in manifest.inputs if origin.piece is None}
            seen = manifest.source in self._sources
            return (seen and not raw <= self._raw_digests) or any(
                outdated(origin.piece) for origin in manifest.inputs if origin.piece is not None
            )

        return outdated

    def carried(
        self, made: Sequence[Piece] | None = None, old: Snapshot | None = None
    ) -> list[Piece]:
        """Pieces of runs that are not among those made in this build and that are still true.

        A run stays as long as its protocol has the rows that the run was made on; splits,
        protocols and outputs of frozen models that this build did not make stay as long as the
        tables that they were made from are there. What an older version of a stage or table made
        is left out, and so is a run that lacks a piece which `old` lists; that is said.
        """
        made = self.pieces if made is None else made
        register = old.runs if old is not None else {}
        names = {(piece.manifest.stage, piece.shard) for piece in made}
        addresses = {piece.manifest.address for piece in made}
        versions = self._last_versions(old)
        published = _addresses(versions)
        published |= {address for pieces in register.values() for address in pieces}
        lost = {SPLITS.name, PROTOCOLS.name} - {version.manifest.table for version in versions}
        if register and lost:
            published |= self._behind(versions, lost)
        published_pieces = at_once(
            lambda address: find_piece(self.lake, *address.split("/")),
            sorted(published - addresses),
        )
        earlier = [
            piece
            for piece in published_pieces
            if piece is not None and (piece.manifest.stage, piece.shard) not in names
        ]
        declared = tables_of(self.benchmark)
        mended = {piece.manifest.run.run_id for piece in made if piece.manifest.run}
        known_addresses = addresses | {
            piece.manifest.address for piece in published_pieces if piece is not None
        }
        broken = {
            run for run, pieces in register.items() if not known_addresses.issuperset(pieces)
        } - mended
        if broken:
            log.warning(
                f"{self.benchmark}: {len(broken)} runs lack a piece and leave the tables; name "
                f"them in a build to make what is lost ({', '.join(sorted(broken))})"
            )
        earlier = [p for p in earlier if not p.manifest.run or p.manifest.run.run_id not in broken]
        fresh = [piece for piece in earlier if _made_by_todays_code(piece.manifest, declared)]
        digests = {part.sha256 for piece in made for part in piece.manifest.parts}
        digests |= self._raw_digests
        kept: list[Piece] = []
        # Protocols are made from splits, so splits come first.
        for table in (SPLITS.name, PROTOCOLS.name):
            for piece in fresh:
                inputs = {i.digest for i in piece.manifest.inputs}
                if piece.has(table) and piece.manifest.run is None and inputs <= digests:
                    kept.append(piece)
                    digests |= {part.sha256 for part in piece.manifest.parts}
        kept += [piece for piece in fresh if piece.has(SCORE_SETTINGS.name)]
        keys = self._data_keys([*made, *kept])
        kept += _frozen(fresh, digests)
        current = [
            piece
            for piece in fresh
            if _is_true_of(piece.manifest.run, keys)
            and not (piece.manifest.stage == FAILURES and piece.manifest.run.run_id in mended)
        ]
        true = {p.manifest.run.run_id for p in earlier if _is_true_of(p.manifest.run, keys)}
        true -= mended
        if lost := true - {p.manifest.run.run_id for p in current if p.manifest.run}:
            log.warning(
                f"{self.benchmark}: {len(lost)} runs of older versions of this software leave the "
                "tables; name them in a build to make them again"
            )
        return kept + current

    def _last_versions(self, old: Snapshot | None) -> list[TableVersion]:
        """What the last build left of each table, without those whose manifest is damaged."""
        try:
            return last_versions(self.lake, self.benchmark)
        except LakeError as error:
            log.warning(f"{self.benchmark}: {error}")
        versions: list[TableVersion] = []
        if old is not None:
            for name in old.tables:
                with suppress(LakeError):
                    versions += versions_of(self.lake, old, [name])
        return versions

    def _behind(self, versions: Sequence[TableVersion], tables: Iterable[str]) -> set[str]:
        """Pieces of tables whose own manifest is lost: the youngest that the versions were made
        from, or that were made from the same as they.
        """
        names = set(tables)
        origins = {manifest.address for manifest in ancestors_of(self.lake, *versions)}
        youngest: dict[tuple[str, str], tuple[float, str]] = {}
        for stage_folder in sorted((pieces_path(self.lake) / self.benchmark).glob("[!.]*")):
            for age, piece in pieces_of_stage(self.lake, self.benchmark, stage_folder.name):
                address = piece.manifest.address
                inputs = {origin.piece for origin in piece.manifest.inputs}
                if not any(piece.has(name) for name in names):
                    continue
                if address in origins or (inputs and inputs <= origins):
                    key = (piece.manifest.stage, piece.shard)
                    youngest[key] = max((age, address), youngest.get(key, (0.0, "")))
        return {address for _, address in youngest.values()}

    def _data_keys(self, pieces: Iterable[Piece]) -> dict[str, str]:
        """The rows that each protocol has now."""
        return {
            protocol: key
            for piece in pieces
            if piece.has(PROTOCOLS.name)
            for protocol, key in piece.part(PROTOCOLS.name)
            .read(["protocol", "data_key"])
            .iter_rows()
        }

    def take_over(self, name: str) -> list[Piece]:
        """The pieces of a table as the last build left it, as if this build had made them.

        For a source that this command does not name: what is known of it stays.
        """
        old = publication_base(self.lake, self.benchmark).snapshot
        versions = self._last_versions(old)
        addresses = _addresses(v for v in versions if v.manifest.table == name)
        if not addresses and old is not None and name in old.tables:
            addresses = self._behind(versions, {name})
        published_pieces = [find_piece(self.lake, *address.split("/")) for address in addresses]
        declared = tables_of(self.benchmark)
        pieces = [
            p
            for p in published_pieces
            if p is not None and _made_by_todays_code(p.manifest, declared)
        ]
        pieces.sort(key=lambda piece: piece.shard)
        self.pieces += pieces
        self._tables |= {name: declared[name]} if pieces else {}
        return pieces

    def table(self, name: str) -> tuple[Part, ...]:
        """The parts of a table made in this build, to be another shard's input."""
        return tuple(piece.part(name) for piece in self.pieces if piece.has(name))

    def read(self, name: str) -> pl.DataFrame:
        """All rows of a table made in this build, to plan the next stage by."""
        return pl.concat([part.read() for part in self.table(name)])

    def finish(self) -> None:
        """Publish everything, with the quarantine table and the catalogue."""
        self._publish(self.pieces, partial=False)
        write_build_record(self.lake, self._record())
        _refresh_catalog(self.lake)

    def _failure_sentence(self) -> str:
        names = ", ".join(f"{failed.stage} {failed.shard.name}" for failed in self.failures)
        return (
            f"{self.benchmark}: {len(self.failures)} shards of runs failed ({names}), all others "
            f"are published; what was printed above tells why, and `novelty runs list` which runs "
            f"failed whole. The first: {self.failures[0].reason}"
        )

    def _record(self) -> BuildRecord:
        return BuildRecord(
            benchmark=self.benchmark,
            settings=self.settings.model_dump(mode="json") if self.settings is not None else {},
            sources=sorted(self._sources.values(), key=lambda source: source.root),
        )


def _refresh_catalog(lake: Path) -> None:
    from storage.catalog import refresh_catalog  # DuckDB, which workers do without

    refresh_catalog(lake)


def _finished(pieces: Sequence[Piece], pending: Iterable[str]) -> list[Piece]:
    """Pieces of no run, and those of runs that are evaluated or failed and have nothing pending.

    A run without a protocol (a frozen model) is finished with its row of `runs`.
    """
    done = {
        piece.manifest.run.run_id
        for piece in pieces
        if piece.manifest.run is not None
        and (
            piece.has(METRICS.name)
            or piece.manifest.stage == FAILURES
            or (piece.manifest.run.protocol is None and piece.has(RUNS.name))
        )
    } - set(pending)
    return [p for p in pieces if p.manifest.run is None or p.manifest.run.run_id in done]


def _without_parts_of_failed(pieces: Sequence[Piece]) -> list[Piece]:
    """Of a run that failed nothing is shown but that it did; what it left speeds up a next try."""
    failed = {
        piece.manifest.run.run_id
        for piece in pieces
        if piece.manifest.stage == FAILURES and piece.manifest.run is not None
    }
    return [
        piece
        for piece in pieces
        if piece.manifest.run is None
        or piece.manifest.run.run_id not in failed
        or piece.manifest.stage == FAILURES
    ]


def _addresses(versions: Iterable[TableVersion]) -> set[str]:
    """Pieces that the versions were gathered from."""
    return {part.piece for version in versions for part in version.manifest.parts if part.piece}


def _made_by_todays_code(manifest: PieceManifest, declared: Mapping[str, Table]) -> bool:
    version = stage_version(manifest.code)
    return (version is None or version == manifest.stage_version) and all(
        part.table in declared and part.schema_version == declared[part.table].version
        for part in manifest.parts
    )


def _frozen(pieces: Sequence[Piece], digests: set[str]) -> list[Piece]:
    """Pieces of runs without a protocol whose parts are all there: outputs, then the runs' rows."""
    frozen = [p for p in pieces if p.manifest.run is not None and p.manifest.run.protocol is None]
    kept: list[Piece] = []
    known_digests = set(digests)
    for is_row in (False, True):
        for piece in frozen:
            read = {origin.digest for origin in piece.manifest.inputs if origin.piece}
            if piece.has(RUNS.name) == is_row and read <= known_digests:
                kept.append(piece)
                known_digests |= {part.sha256 for part in piece.manifest.parts}
    return kept


def _is_true_of(run: RunMark | None, keys: Mapping[str, str]) -> TypeGuard[RunMark]:
    return run is not None and run.protocol is not None and keys.get(run.protocol) == run.data_key


def _apart_from_lake(record: BuildRecord) -> BuildRecord:
    """Where a lake stands and which version wrote the record do not matter."""
    settings = {name: value for name, value in record.settings.items() if name != "lake"}
    return record.model_copy(update={"settings": settings, "software": None})
