"""What a manifest records beside its Parquet files. No clock: age is a file's mtime."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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


class PieceManifest(Record):
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
    rows_in: int
    rows_out: int
    quarantined: int
    parts: list[PartFile]
    files: list[OtherFile] = []
    run: RunMark | None = None

    @property
    def address(self) -> str:
        return f"{self.benchmark}/{self.stage}/{self.key}"


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


class TableManifest(Record):
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


class BuildRecord(Record):
    """The last finished build of a benchmark: which raw files it saw, and with what settings."""

    benchmark: str
    settings: dict[str, Any]
    sources: list[SourceListing]
