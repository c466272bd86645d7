"""How long pieces took, and what a build would do: timings and the dry run.

Enters: each piece made, with its seconds; or the shards that a flow plans. Leaves: one line of JSON
per piece in `.novelty/timings/<host>.jsonl` (outside the manifests, which must not depend on the
clock; nothing breaks when it is lost), and for `--dry-run` one `StagePlan` per stage.

A dry run goes through the flow's own code. Where pieces are missing it carries on with those of the
last build, so later stages are planned by the rows of then; a shard that reads such a piece is
said to be made "after" the stage that makes it anew. Where there is no earlier piece at all, the
flow ends there; what comes after is told by what settings and raw files ask for (`foresee`).
"""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from schemas.config import Settings
from schemas.manifest import Input, PieceManifest
from storage.layout import file_slug, inner
from storage.pieces import Piece, pieces_of_stage
from tasks.engine.reference import Raw, Reference, Work

RECENT = 500
"""Pieces that a stage's pace is taken from: the last ones."""


def note_time(lake: Path, made: PieceManifest, seconds: float, busy: float | None = None) -> None:
    """Remember how long a piece took, and its thread was busy. A line is one write, so writers do
    not mix."""
    line = {
        "benchmark": made.benchmark,
        "stage": made.stage,
        "shard": made.shard,
        "records": made.rows_in,
        "seconds": round(seconds, 4),
        "busy": None if busy is None else round(busy, 4),
        "when": round(time.time(), 1),
    }
    path = inner(lake) / "timings" / f"{file_slug(socket.gethostname())}.jsonl"
    with contextlib.suppress(OSError):  # the piece is committed; its time is a convenience
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(orjson.dumps(line) + b"\n")


@dataclass(frozen=True)
class Pace:
    """What a stage's last pieces took."""

    shards: int
    records: int
    seconds: float
    busy: float
    """Processor time of the threads that made them; all of their time where it is not known."""

    def expect(self, records: int | None) -> float:
        """Seconds for a shard of so many records, or for one whose records are not known."""
        if records is None or not self.records:
            return self.seconds / self.shards
        return self.seconds / self.records * records


def paces(lake: Path, benchmark: str) -> dict[str, Pace]:
    """The pace of every stage of the benchmark that was ever timed in this lake."""
    import duckdb

    if not list((inner(lake) / "timings").glob("*.jsonl")):
        return {}
    rows = duckdb.execute(
        """
        select stage, count(*), sum(records)::bigint, sum(seconds), sum(coalesce(busy, seconds))
        from (
            select *, row_number() over (partition by stage order by "when" desc) as place
            from read_json(
                $files, format = 'newline_delimited', ignore_errors = true,
                columns = {benchmark: 'varchar', stage: 'varchar', records: 'bigint',
                           seconds: 'double', busy: 'double', "when": 'double'}
            )
            where benchmark = $benchmark and records is not null and seconds is not null
        ) where place <= $recent group by stage
        """,
        {
            "files": str(inner(lake) / "timings" / "*.jsonl"),
            "benchmark": benchmark,
            "recent": RECENT,
        },
    ).fetchall()
    return {stage: Pace(*rest) for stage, *rest in rows}


@dataclass
class StagePlan:
    """What a build would do for one stage."""

    stage: str
    shards: int
    missing: int = 0
    after: dict[str, int] = field(default_factory=dict)  # stage made before: shards that read it
    reasons: dict[str, list[str]] = field(default_factory=dict)  # why: what, one for each shard
    seconds: float | None = 0.0  # None: never timed
    raw: dict[str, Raw] = field(default_factory=dict)  # by shard
    foreseen: bool = False  # shards are an estimate, as the rows that tell them are not there
    referred: bool = False  # seconds are by the rates of another machine
    bytes: float | None = None  # None: not known
    lacking: list[str] = field(default_factory=list)  # models that the reference has no rate of

    @property
    def waiting(self) -> int:
        """Shards that are there, but may have to be made again."""
        return sum(self.after.values())

    def why(self) -> str:
        clauses = []
        for reason, details in self.reasons.items():
            first = next((detail for detail in details if detail), "")
            more = ", …" if len(set(details)) > 1 else ""
            count = f"{len(details)} x " if len(self.reasons) > 1 else ""
            clauses.append(f"{count}{reason}" + (f" ({first}{more})" if first else ""))
        clauses += [f"perhaps {count} after {stage}" for stage, count in self.after.items()]
        return "; ".join(clauses)


class DryRunEnds(Exception):
    """The flow has been planned as far as it can be."""


class DryRun:
    """Collects what the stages of one flow would do. `Build` asks it instead of making pieces."""

    def __init__(self) -> None:
        self.plans: list[StagePlan] = []
        self.unplanned_after: str | None = None
        self.published = False
        self._redone: dict[str, str] = {}  # address of an earlier piece: the stage that remakes it
        self._grows: dict[str, int] = {}  # stage with shards that were never made: pieces it has
        self._paces: dict[str, Pace] | None = None
        self.at_once = 1
        self.sources: dict[Path, Raw] = {}

    @property
    def incomplete(self) -> bool:
        return bool(self._redone or self._grows)

    def plan(
        self,
        lake: Path,
        benchmark: str,
        stage: Any,
        shards: Sequence[Any],
        known_pieces: Sequence[Piece | None],
        settings: Settings,
        at_once: int,
    ) -> list[Piece]:
        """Note what is to be made; the pieces to plan the next stages by."""
        if self._paces is None:
            self._paces = paces(lake, benchmark)
        self.at_once = at_once
        plan = StagePlan(stage.name, len(shards), raw=raw_of(shards))
        self.plans.append(plan)
        earlier = latest_pieces(lake, benchmark, stage.name) if None in known_pieces else {}
        pieces: list[Piece] = []
        records: list[int | None] = []
        absent = 0
        for shard, piece in zip(shards, known_pieces, strict=True):
            if piece is not None:
                pieces.append(piece)
                if after := self._after(shard.inputs()):
                    plan.after[after] = plan.after.get(after, 0) + 1
                    self._redone[piece.manifest.address] = stage.name
                    records.append(piece.manifest.rows_in)
                continue
            plan.missing += 1
            before = earlier.get(shard.name)
            for reason, what in why_missing(stage, shard, settings, before, bool(earlier)):
                plan.reasons.setdefault(reason, []).append(what)
            records.append(before.manifest.rows_in if before else None)
            if before is None:
                absent += 1
            else:
                pieces.append(before)
                self._redone[before.manifest.address] = stage.name
        pace = self._paces.get(stage.name)
        if records:
            plan.seconds = None
            if pace is not None:
                seconds = sum(pace.expect(count) for count in records)
                plan.seconds = seconds / min(at_once, len(records))
        if absent:
            self._grows[stage.name] = len(pieces)
        if shards and not pieces:
            self.unplanned_after = stage.name
            raise DryRunEnds
        return pieces

    def foresee(self, benchmark: str, works: Sequence[Work], reference: Reference) -> None:
        """Add the stages that could not be planned; fill in what no piece of this lake tells.

        Times of this lake win over those of the reference.
        """
        by_stage: dict[str, list[Work]] = {}
        for work in works:
            by_stage.setdefault(work.stage, []).append(work)
        planned = Counter[str]()
        for plan in self.plans:
            planned[plan.stage] += plan.shards
        for stage, some in by_stage.items() if self.unplanned_after else ():
            count = sum(work.shards for work in some) - planned[stage]
            # Stages of models run in rounds, of which the last may not be planned.
            if count > 0 and (stage not in planned or any(work.model for work in some)):
                planned[stage] += count
                plan = StagePlan(stage, count, missing=count, seconds=None, foreseen=True)
                if (pace := (self._paces or {}).get(stage)) is not None:
                    plan.seconds = pace.expect(None) * count / min(self.at_once, count)
                self.plans.append(plan)
        for plan in self.plans:
            to_make = plan.missing + plan.waiting
            if to_make and plan.stage in by_stage:
                share = to_make / planned[plan.stage]
                self._refer(plan, benchmark, by_stage[plan.stage], reference, share)

    def _refer(
        self,
        plan: StagePlan,
        benchmark: str,
        works: Sequence[Work],
        reference: Reference,
        share: float,
    ) -> None:
        """Bytes of a stage by the reference, and its seconds unless this lake tells them."""
        rates = [(work, reference.of(benchmark, work)) for work in works]
        known = [(work, rate) for work, rate in rates if rate is not None]
        if known:
            plan.bytes = share * sum(work.written * rate.bytes for work, rate in known)
        if plan.seconds is None:
            plan.lacking = [work.model for work, rate in rates if rate is None and work.model]
            if known:
                seconds = share * sum(work.amount * rate.seconds for work, rate in known)
                plan.seconds = seconds / min(self.at_once, plan.missing + plan.waiting)
                plan.referred = True

    def _after(self, inputs: Sequence[Input]) -> str | None:
        """The stage whose missing pieces may change these inputs, if any."""
        read: dict[str, set[str]] = {}
        for source in inputs:
            if source.piece in self._redone:
                return self._redone[source.piece]
            if source.piece is not None:
                read.setdefault(source.piece.split("/")[1], set()).add(source.piece)
        # A shard that reads every piece of a stage will read its new ones too.
        growing = (stage for stage in read if len(read[stage]) == self._grows.get(stage))
        return next(growing, None)


_current: ContextVar[DryRun | None] = ContextVar("dry_run", default=None)


def current_dry_run() -> DryRun | None:
    """The dry run that builds started now belong to, if any."""
    return _current.get()


@contextlib.contextmanager
def dry_run() -> Iterator[DryRun]:
    """Builds inside the block make nothing; they end with `DryRunEnds`, which is kept here."""
    run = DryRun()
    token = _current.set(run)
    try:
        with contextlib.suppress(DryRunEnds):
            yield run
    finally:
        _current.reset(token)


def raw_of(shards: Sequence[Any]) -> dict[str, Raw]:
    """Raw files by shard; a file that several shards read counts once."""
    seen: set[Any] = set()
    raw_by_shard = {}
    for shard in shards:
        files = {(shard.source, file.name): file.size for file in shard.files}
        new = {file: size for file, size in files.items() if file not in seen}
        seen |= new.keys()
        raw_by_shard[shard.name] = Raw(len(new), sum(new.values()))
    return raw_by_shard


def latest_pieces(lake: Path, benchmark: str, stage: str) -> dict[str, Piece]:
    """The newest piece of every shard that the stage ever made, by the name of the shard."""
    pieces = pieces_of_stage(lake, benchmark, stage)
    pieces.sort(key=lambda pair: (pair[0], pair[1].folder))
    return {piece.shard: piece for _, piece in pieces}


def why_missing(
    stage: Any, shard: Any, settings: Settings, before: Piece | None, built_before: bool
) -> list[tuple[str, str]]:
    """Why a shard has no piece: pairs of a reason and what exactly."""
    if before is None and not built_before:
        return [("first build", "")]
    if before is None:
        new = f"{shard.files[0].name}" if shard.files else shard.name
        return [("new raw file" if shard.files else "new shard", new)]
    old = before.manifest
    reasons = []
    if changed := _differing(old.settings, settings.model_dump(mode="json")):
        reasons.append(("settings changed", ", ".join(changed)))
    if old.stage_version != stage.version:
        reasons.append(("stage version", f"{old.stage_version} to {stage.version}"))
    versions = {part.table: part.schema_version for part in old.parts}
    for table in stage.writes(settings):
        if versions.get(table.name, table.version) != table.version:
            was = f"{table.name} {versions[table.name]} to {table.version}"
            reasons.append(("table version", was))
    now = shard.inputs()
    reasons += _changed_files(_raw(old.inputs), _raw(now))
    was_read, is_read = (
        {(i.name, i.digest) for i in some if i.piece} for some in (old.inputs, now)
    )
    if tables := sorted({name for name, _ in was_read ^ is_read}):
        reasons.append(("input changed upstream", ", ".join(tables)))
    return reasons or [("planned differently", shard.name)]


def _raw(inputs: Sequence[Input]) -> dict[str, str]:
    return {source.name: source.digest for source in inputs if source.piece is None}


def _changed_files(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str]]:
    changed = {
        "changed raw file": sorted(n for n in old.keys() & new.keys() if old[n] != new[n]),
        "new raw file": sorted(new.keys() - old.keys()),
        "removed raw file": sorted(old.keys() - new.keys()),
    }
    return [
        (reason, names[0] + (", …" if len(names) > 1 else ""))
        for reason, names in changed.items()
        if names
    ]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of settings whose values differ, nested ones with a dot."""
    names = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _differing(a, b, f"{prefix}{name}.")
        elif a != b:
            names.append(f"{prefix}{name}")
    return names


def duration(seconds: float | None) -> str:
    """For people: `3 s`, `12 min`, `5.5 h`; `unknown` where nothing was ever timed."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{max(1, round(seconds))} s" if seconds else "-"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
