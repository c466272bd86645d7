"""Files of outputs, scores or predictions of any model become runs like all others.

Enters: a file (`output_files.py`), a protocol of the lake. Leaves: `outputs` and `predictions` of
an imported run, which `measure_runs` scores and evaluates. The run's key holds the digest of the
file, so the same file is the same run. It also holds the rows of the protocol: like every run, this
one stays as long as they do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import polars as pl

from schemas.errors import ConfigError, LakeError, SourceError
from schemas.manifest import BuildRecord, Snapshot
from schemas.runs import RunFacts
from schemas.similar import did_you_mean
from schemas.table import Table
from schemas.tables import OUTPUTS, PROTOCOLS, SAMPLES, SCORE_SETTINGS, SPLITS
from storage.catalog import refresh_catalog
from storage.filehash import sha256_file
from storage.pieces import Part, Piece
from storage.raw import RawFile
from storage.snapshots import current_snapshot
from storage.tables import Contents, pieces_by_run, pieces_of, versions_of
from storage.upkeep import read_build_record
from tasks import scores as score_files
from tasks.engine.stage import Build, Shard
from tasks.evaluation.imported import IMPORT_VERSION, KIND, PARTIAL, visible_rows
from tasks.evaluation.runs import FILES, as_json, run_id, run_mark
from tasks.evaluation.stages import EVALUATED, HEAD, PassedRun, ScoreChoice, chosen_scores

HEAD_FILE = "head"
PRESET = "small"
"""Of scores, as builds have it by default."""


@dataclass(frozen=True)
class Import:
    """What a user asks for."""

    kind: str
    path: Path
    benchmark: str
    protocol: str
    name: str
    seed: int | None = None
    head: Path | None = None
    partial: bool = False
    """Whether it may lack test samples."""


class Addition(Build):
    """A build that adds runs to what the lake has, and leaves all else as it is."""

    def __enter__(self) -> Self:
        super().__enter__()
        current = current_snapshot(self.lake, self.benchmark)
        self.within_partial = current is not None and current.partial
        return self

    def parts(self, table: str) -> tuple[Part, ...]:
        """The parts of a table as the current snapshot has it."""
        return tuple(piece.part(table) for piece in self._current_pieces([table]))

    def read_current(self, table: str) -> pl.DataFrame:
        return pl.concat([part.read() for part in self.parts(table)])

    def finish(self) -> None:
        """Publish; a build that was stopped half-way stays marked as such."""
        self._publish(self.pieces, partial=self.within_partial)
        refresh_catalog(self.lake)

    def _current_pieces(self, tables: Sequence[str]) -> list[Piece]:
        snapshot = current_snapshot(self.lake, self.benchmark)
        names = [name for name in tables if snapshot is not None and name in snapshot.tables]
        if snapshot is None or not names:
            raise LakeError(
                f"no tables of {self.benchmark} in {self.lake}; `novelty build {self.benchmark}` "
                "makes them"
            )
        pieces = pieces_of(self.lake, versions_of(self.lake, snapshot, names))
        return sorted(
            (piece for piece in pieces if any(piece.has(name) for name in names)),
            key=lambda piece: (piece.manifest.stage, piece.shard),
        )

    def _contents(
        self, old: Snapshot | None, made: Sequence[Piece], tables: Mapping[str, Table]
    ) -> Contents:
        versions = versions_of(self.lake, old) if old is not None else []
        touched = [version for version in versions if version.manifest.table in tables]
        names = {(piece.manifest.stage, piece.shard) for piece in made}
        others = [
            piece
            for piece in pieces_of(self.lake, touched)
            if (piece.manifest.stage, piece.shard) not in names
        ]
        kept, runs = (old.tables, old.runs) if old is not None else ({}, {})
        return Contents(
            list(tables.values()), [*made, *others], kept, {**runs, **pieces_by_run(made)}
        )

    def _record(self) -> BuildRecord:
        """What the last build said of its settings and sources stays."""
        return read_build_record(self.lake, self.benchmark) or super()._record()


# ---------------------------------------------------------------- plans


def raw_file(path: Path, name: str) -> RawFile:
    """A file of the user as an input: what it is called does not matter."""
    if not path.is_file():
        raise SourceError(f"file {path} does not exist; name a CSV, Parquet or npz file")
    return RawFile(name, path.stat().st_size, sha256_file(path), str(path.absolute()))


def plan_import(build: Addition, request: Import) -> Shard:
    """The shard that makes the run; a protocol that is not there is refused."""
    protocols = build.read_current(PROTOCOLS.name)
    keys = {row["protocol"]: row for row in protocols.iter_rows(named=True)}
    if request.protocol not in keys:
        names = ", ".join(sorted(keys)[:20]) + (", …" if len(keys) > 20 else "")
        hint = did_you_mean(request.protocol, keys)
        raise ConfigError(
            f"{request.benchmark} has no protocol {request.protocol!r}; there are: {names}{hint}"
        )
    files = [raw_file(request.path, request.kind)]
    if request.head is not None:
        files.append(raw_file(request.head, HEAD_FILE))
    facts = RunFacts(
        benchmark=request.benchmark,
        protocol=request.protocol,
        model=request.name,
        settings={
            KIND: request.kind,
            FILES: {file.name: file.digest for file in files},
            PARTIAL: request.partial,
        },
        changed={PARTIAL: True} if request.partial else {},
        seed=request.seed,
        origin="imported",
        versions={"import": IMPORT_VERSION},
        fit_key=keys[request.protocol]["fit_key"],
    )
    mark = run_mark(facts, keys[request.protocol]["data_key"])
    splits = _of_protocol(build.parts(SPLITS.name), request.protocol)
    return Shard(
        mark.run_id,
        files=tuple(files),
        parts=(*splits, *build.parts(SAMPLES.name)),
        about=facts.model_dump(mode="json"),
        depends={"run": mark.run_id, "rows": mark.data_key},
        run=mark,
    )


def _of_protocol(parts: Sequence[Part], protocol: str) -> tuple[Part, ...]:
    same_name = tuple(part for part in parts if part.shard == protocol)
    return same_name or tuple(
        part for part in parts if (part.read(["protocol"])["protocol"] == protocol).any()
    )


def passed_import(shard: Shard, piece: Piece, phase: str) -> PassedRun:
    """What the scores of an imported run are planned from; `phase` is that of the benchmark."""
    assert shard.run is not None
    facts = RunFacts.model_validate(shard.about)
    outputs = piece.part(OUTPUTS.name)
    rows = visible_rows(shard, str(facts.protocol))
    train = rows.filter(split="train")["sample_id"].implode()
    sequences = rows.filter(pl.col("split").is_in(EVALUATED))["sequence"]
    # One sequence alone, such as a test of CONDDA, says nothing of how numbers vary.
    samples = [part for part in shard.parts if part.table == SAMPLES.name]
    return PassedRun(
        facts,
        shard.run,
        (outputs,),
        tuple(part for part in shard.parts if part.table == SPLITS.name),
        tuple(samples) if sequences.drop_nulls().n_unique() > 1 else (),
        piece.file(HEAD) if len(shard.files) > 1 else None,
        phase,
        reference=bool(outputs.read(["sample_id"])["sample_id"].is_in(train).any()),
    )


def import_scores(build: Addition) -> list[ScoreChoice]:
    """All scores by their defaults, and those that other runs of the benchmark were scored by."""
    choices = {choice.score_id: choice for choice in chosen_scores({"all": {}}, PRESET)}
    snapshot = current_snapshot(build.lake, build.benchmark)
    if snapshot is not None and SCORE_SETTINGS.name in snapshot.tables:
        for row in build.read_current(SCORE_SETTINGS.name).iter_rows(named=True):
            name, version = row["score"], row["version"]
            if name in score_files.names() and score_files.find(name).version == version:
                choice = ScoreChoice(
                    name=name, version=version, settings=json.loads(row["settings"])
                )
                if choice.score_id == row["score_id"]:
                    choices[choice.score_id] = choice
    return list(choices.values())


def other_file(runs: pl.DataFrame, shard: Shard) -> str | None:
    """The run of the same name, kind, seed and protocol that another file made."""
    facts = RunFacts.model_validate(shard.about)
    same = runs.filter(
        pl.col("origin") == "imported",
        pl.col("model") == facts.model,
        pl.col("protocol") == facts.protocol,
        pl.col("seed").eq_missing(pl.lit(facts.seed, pl.Int32)),
        pl.col("run_id") != run_id(facts),
        pl.col("settings").str.contains(as_json({KIND: facts.settings[KIND]})[1:-1], literal=True),
    )
    return same["run_id"][0] if same.height else None
