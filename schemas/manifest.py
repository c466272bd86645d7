"""The records of a lake. Only a snapshot holds its time; all else is as old as its file."""

import hashlib
import json
from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from schemas.version import VERSION


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sealed(Record):
    """A record whose file carries its own digest, so that one flipped bit is noticed."""

    sha256: str | None = None
    """In the file only: of its bytes with nothing between these quotes. Old files have none."""
    software: str | None = None
    """Version of this project that wrote the file; part of no key. Old files have none."""

    def sealed(self) -> bytes:
        """The bytes of its file."""
        marks = {"sha256": "", "software": self.software or VERSION}
        blank = self.model_copy(update=marks).model_dump_json(indent=1).encode() + b"\n"
        digest = hashlib.sha256(blank).hexdigest().encode()
        return blank.replace(b'""', b'"' + digest + b'"', 1)  # it is the first field

    @classmethod
    def unsealed(cls, data: bytes) -> Self:
        """The record in these bytes; a ValueError if they are not what was written."""
        record = cls.model_validate_json(data)
        if record.sha256 is not None:
            blank = data.replace(b'"' + record.sha256.encode() + b'"', b'""', 1)
            if hashlib.sha256(blank).hexdigest() != record.sha256:
                raise ValueError("its content does not fit its own sha256")
        return record.model_copy(update={"sha256": None})


class Input(Record):
    """What a shard was made from: a raw file, or a part of an earlier piece (`piece` set)."""

    name: str
    digest: str
    size: int
    piece: str | None = None  # "<benchmark>/<stage>/<key>" of the piece that holds the part


class PartFile(Record):
    """One Parquet file, with its first and last key so that order across parts is known."""

    table: str
    file: str
    sha256: str
    bytes: int
    rows: int
    schema_version: int
    first: list[Any] | None
    last: list[Any] | None


class OtherFile(Record):
    """A file of a piece that is no table, such as the weights of a fitted detector."""

    file: str
    sha256: str
    bytes: int


class RunMark(Record):
    """Which run a piece belongs to, and the rows that it is true of."""

    run_id: str
    protocol: str | None
    data_key: str


class PieceManifest(Sealed):
    """What one stage made from one shard."""

    benchmark: str
    stage: str
    code: str  # "module:function", to compare the stage's version with today's
    stage_version: int
    key: str
    shard: str
    settings: dict[str, Any]
    source: str | None  # root of the raw files, where there are any
    inputs: list[Input]
    inputs_verified: bool = False
    """Every input was compared with its digest when it was read."""
    rows_in: int
    rows_out: int
    quarantined: int
    parts: list[PartFile]
    files: list[OtherFile] = []
    run: RunMark | None = None

    @property
    def address(self) -> str:
        return f"{self.benchmark}/{self.stage}/{self.key}"


class Tombstone(Record):
    """What was taken out of the lake together: paths in the lake, in the order of their going."""

    reason: str
    paths: list[str]


class VersionPart(Record):
    """A part as it stands in a table version, and the piece it came from."""

    file: str
    sha256: str
    bytes: int
    rows: int
    piece: str | None  # None only for the file that stands for "no rows at all"
    shard: str


class SourceListing(Record):
    """The raw files a build saw: `digest` covers all their names and contents."""

    root: str
    files: int
    digest: str


class TableManifest(Sealed):
    """One version of a table."""

    benchmark: str
    table: str
    key: str
    schema_version: int
    rows: int
    bytes: int
    rows_in: int
    quarantined: int
    parts: list[VersionPart]


class BuildRecord(Sealed):
    """The last finished build of a benchmark: which raw files it saw, and with what settings."""

    benchmark: str
    settings: dict[str, Any]
    sources: list[SourceListing]


class Snapshot(Sealed):
    """All tables of a benchmark as they were published together, and the runs in them."""

    benchmark: str
    number: int
    """Counts the publications of the benchmark; 0 is a lake of the time before snapshots."""
    previous: str | None = None
    """The snapshot that it replaced."""
    made: datetime
    partial: bool = False
    """A build was still going on: finished runs are in it, the others not yet."""
    finished: datetime | None = None
    """When the last build ended that did end; younger pieces are of one that did not."""
    restored: str | None = None
    """The older snapshot that was made current again by it."""
    settings: dict[str, Any] = {}
    """Of the build that published it."""
    tables: dict[str, str]
    """The key of each table's version."""
    runs: dict[str, list[str]] = {}
    """Addresses of the pieces of each run."""

    @property
    def name(self) -> str:
        content = [self.benchmark, self.previous, self.partial, self.tables, self.runs]
        data = json.dumps(content, sort_keys=True).encode()
        return f"s{self.number:06d}-{hashlib.sha256(data).hexdigest()[:10]}"
