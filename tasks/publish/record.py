"""What a publication says of itself: enters a lake, leaves the content of `manifest.json`.

Everything is taken from the manifests beside the tables. Nothing of the machine goes out: of a raw
source only its name stays, paths in settings lose their folders, secrets are dropped; `leaks` finds
what slipped through. There is no clock here: the day is given.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ConfigError, LakeError
from schemas.manifest import PieceManifest, Record
from schemas.table import Column, Table
from schemas.tables import find_table
from storage.tables import TableVersion, current_versions
from storage.upkeep import read_build_record
from tasks.publish.verify import data_key

FORMAT = 1
TERMS = "not known to this project; check the terms of the source before you pass the tables on"
_SECRET = re.compile(r"token|secret|password|credential", re.IGNORECASE)


class PublishedFile(Record):
    path: str  # inside the folder: data/<table>/<file>
    sha256: str
    bytes: int
    rows: int


class PublishedTable(Record):
    name: str
    description: str
    sort_key: list[str]
    schema_version: int
    lake_key: str  # key of the version in the lake it came from
    rows: int
    bytes: int
    rows_in: int
    quarantined: int
    stages: list[str]  # that made its rows
    files: list[PublishedFile]


class PublishedStage(Record):
    stage: str
    code: str
    version: int
    pieces: int
    settings: list[dict[str, Any]]  # each one that a piece was made with


class PublishedSource(Record):
    name: str
    files: int
    digest: str  # covers names and contents of all its files
    terms: str = TERMS


class Publication(Record):
    format: int = FORMAT
    benchmark: str
    key: str
    version: str | None
    date: str
    licence: str | None
    settings: dict[str, Any]
    sources: list[PublishedSource]
    stages: list[PublishedStage]
    tables: list[PublishedTable]

    @property
    def content(self) -> tuple[str, str]:
        """Two publications with the same content hold the same bytes of the same benchmark."""
        return self.benchmark, self.key


def chosen_versions(lake: Path, benchmark: str, names: list[str] | None) -> list[TableVersion]:
    """Current versions to publish, by name: all of the benchmark's, or those named."""
    # A name with other characters would be taken for a pattern, and mean several benchmarks.
    plain = re.fullmatch(r"\w+", benchmark)
    versions = current_versions(lake, benchmark) if plain else []
    by_table = {version.manifest.table: version for version in versions}
    if not by_table:
        raise LakeError(
            f"no tables of {benchmark!r} in {lake}; `novelty status` lists what there is"
        )
    if names is None:
        return list(by_table.values())
    if unknown := sorted(set(names) - by_table.keys()):
        raise ConfigError(
            f"no table {', '.join(unknown)} of {benchmark}; there are: {', '.join(by_table)}"
        )
    return [by_table[name] for name in sorted(set(names))]


def table_of(version: TableVersion) -> Table:
    """The table as its files declare it; rules come from the code where it declares the same."""
    schema = pq.read_schema(version.files[0])
    declared = find_table(version.manifest.benchmark, version.manifest.table)
    if declared is not None and _same_declaration(declared.arrow_schema, schema):
        return declared
    table_facts = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    columns = []
    for field in schema:
        column_facts = {
            key.decode(): value.decode() for key, value in (field.metadata or {}).items()
        }
        columns.append(
            Column(
                field.name,
                field.type,
                column_facts.get("description", ""),
                column_facts.get("unit", ""),
                field.nullable,
            )
        )
    return Table(
        name=version.manifest.table,
        description=table_facts.get("description", ""),
        columns=tuple(columns),
        key=tuple(name for name in table_facts.get("sort_key", "").split(",") if name),
        version=version.manifest.schema_version,
    )


def _same_declaration(one: pa.Schema, other: pa.Schema) -> bool:
    """Types, descriptions and units agree; Parquet gives the inside of a list another name."""
    return (
        one.equals(other)
        and one.metadata == other.metadata
        and [field.metadata for field in one] == [field.metadata for field in other]
    )


def gather(
    lake: Path,
    versions: list[TableVersion],
    pieces: Mapping[str, PieceManifest],
    date: str,
    version: str | None = None,
    licence: str | None = None,
) -> Publication:
    """All that `manifest.json` says of the versions and the pieces behind them."""
    benchmark = versions[0].manifest.benchmark
    _refuse_mixture(versions, pieces)
    tables = [_published(version, pieces) for version in versions]
    record = read_build_record(lake, benchmark)
    settings = dict(record.settings) if record else {}
    settings.pop("lake", None)
    return Publication(
        benchmark=benchmark,
        key=data_key({file.path: file.sha256 for table in tables for file in table.files}),
        version=version,
        date=date,
        licence=licence,
        settings=without_places(settings),
        sources=[
            PublishedSource(name=_last_part(s.root), files=s.files, digest=s.digest)
            for s in (record.sources if record else [])
        ],
        stages=_stages(pieces.values()),
        tables=tables,
    )


def _published(version: TableVersion, pieces: Mapping[str, PieceManifest]) -> PublishedTable:
    manifest, table = version.manifest, table_of(version)
    makers = {pieces[p.piece].stage for p in manifest.parts if p.piece and p.piece in pieces}
    return PublishedTable(
        name=manifest.table,
        description=table.description,
        sort_key=list(table.key),
        schema_version=manifest.schema_version,
        lake_key=manifest.key,
        rows=manifest.rows,
        bytes=manifest.bytes,
        rows_in=manifest.rows_in,
        quarantined=manifest.quarantined,
        stages=sorted(makers),
        files=[
            PublishedFile(
                path=f"data/{manifest.table}/{part.file}",
                sha256=part.sha256,
                bytes=part.bytes,
                rows=part.rows,
            )
            for part in manifest.parts
        ],
    )


def _refuse_mixture(versions: list[TableVersion], pieces: Mapping[str, PieceManifest]) -> None:
    """Refuse a table made from parts that another table to be published no longer has."""
    addresses = {
        version.manifest.table: {part.piece for part in version.manifest.parts}
        for version in versions
    }
    for version in versions:
        benchmark = version.manifest.benchmark
        for part in version.manifest.parts:
            maker = pieces.get(part.piece or "")
            for source in maker.inputs if maker else []:
                origin = pieces.get(source.piece or "")
                if origin is None or origin.benchmark != benchmark or source.name not in addresses:
                    continue
                rows = sum(file.rows for file in origin.parts if file.table == source.name)
                if rows and origin.address not in addresses[source.name]:
                    raise LakeError(
                        f"table {version.name} was made from parts that {source.name} no longer "
                        f"has, so the two come from different builds; run `novelty build "
                        f"{benchmark}` to its end, or choose other tables with --tables"
                    )


def _stages(pieces: Iterable[PieceManifest]) -> list[PublishedStage]:
    by_stage: dict[tuple[str, str, int], list[PieceManifest]] = {}
    for piece in pieces:
        by_stage.setdefault((piece.stage, piece.code, piece.stage_version), []).append(piece)
    stages = []
    for (stage, code, number), stage_pieces in sorted(by_stage.items()):
        settings: list[dict[str, Any]] = []
        for piece in sorted(stage_pieces, key=lambda piece: piece.address):
            if (cleaned := without_places(piece.settings)) not in settings:
                settings.append(cleaned)
        stages.append(
            PublishedStage(
                stage=stage, code=code, version=number, pieces=len(stage_pieces), settings=settings
            )
        )
    return stages


def without_places(value: Any) -> Any:
    """Settings as they may be shown: paths and URLs cut to their last part, secrets left out."""
    if isinstance(value, Mapping):
        return {
            key: without_places(inside)
            for key, inside in value.items()
            if not (isinstance(inside, str) and _SECRET.search(key))
        }
    if isinstance(value, list | tuple):
        return [without_places(inside) for inside in value]
    if isinstance(value, str) and re.match(r"[/~]|\.\.?/|\w+://", value):
        return _last_part(value)
    return value


def _last_part(place: str) -> str:
    inside = re.sub(r"^\w+://[^/]*|[?#].*$", "", place) if "://" in place else place
    return PurePosixPath(inside).name or "left out"


def leak_pattern(lake: Path, benchmark: str, pieces: Mapping[str, PieceManifest]) -> str:
    """A regular expression that finds folders of this machine: lake, home and raw sources."""
    record = read_build_record(lake, benchmark)
    places = {source.root for source in record.sources} if record else set()
    places |= {piece.source for piece in pieces.values() if piece.source}
    places |= {str(lake), str(Path.home())}
    absolute = sorted(place for place in places if re.match(r"/.|\w+://", place))
    any_place = "|".join(re.escape(place) for place in absolute)
    return rf"(?:^|[^A-Za-z0-9_./-])(?:{any_place})(?:$|[^A-Za-z0-9_.-])"


def leaks(versions: list[TableVersion], pattern: str) -> list[str]:
    """Text columns that hold a folder of this machine: `table.column (first value)`."""
    columns = []
    for version in versions:
        frame = pl.scan_parquet(version.files, glob=False)
        texts = [name for name, kind in frame.collect_schema().items() if kind == pl.String]
        if not texts:
            continue
        hits = frame.select(
            pl.col(name).filter(pl.col(name).str.contains(pattern)).first() for name in texts
        ).collect(engine="streaming")
        columns += [
            f"{version.manifest.table}.{name} ({hits[name][0]!r})"
            for name in texts
            if hits[name][0] is not None
        ]
    return columns
