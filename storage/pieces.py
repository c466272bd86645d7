"""Pieces: what one stage made from one shard, named by the content key of everything that went in.

A piece is a folder of Parquet files (one per table, plus `quarantine`) with its manifest. It exists
whole or not at all, so its presence is the only "done" mark that there is; a folder with a damaged
manifest or without a file of the right size is no piece, and makes way for a new one. In the cache
of a lake in a bucket it may have its manifest alone; a file is fetched when its path is asked for.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import Input, OtherFile, PartFile, PieceManifest
from schemas.table import Table
from storage.atomic import new_directory, step
from storage.filehash import sha256_file
from storage.layout import MANIFEST, lake_root, piece_path, pieces_path
from storage.objects import bucket_of
from storage.parquet import opened_parquet, read_parquet, write_parquet
from storage.remote import (
    at_once,
    commit_piece,
    fetch_piece_file,
    files_of,
    forget_piece,
    pull_piece,
)
from storage.tombstones import bury
from storage.verified import ABSENT, CURE, verified


@dataclass(frozen=True)
class Part:
    """A reference to one file of a piece, cheap to pass between processes.

    `table` is the table that a Parquet file holds rows of, or the name of any other file. `lake`
    is the address of a lake in a bucket: another machine has the file in its own cache.
    """

    place: Path
    sha256: str
    rows: int
    bytes: int
    table: str
    shard: str
    piece: str
    lake: str = ""

    @property
    def path(self) -> Path:
        """The file on this machine: fetched if need be, compared with its digest."""
        file = OtherFile(file=self.place.name, sha256=self.sha256, bytes=self.bytes)
        if not self.lake:
            return verified(self.place, file)
        return fetch_piece_file(lake_root(self.lake), self.piece, file)

    def read(self, columns: list[str] | None = None) -> pl.DataFrame:
        return read_parquet([self.path], columns)

    def row_groups(self, columns: list[str]) -> Iterator[pl.DataFrame]:
        """The rows of one row group after the other."""
        with opened_parquet(self.path) as file:
            for group in range(file.num_row_groups):
                yield cast(pl.DataFrame, pl.from_arrow(file.read_row_group(group, columns)))

    def as_input(self) -> Input:
        return Input(name=self.table, digest=self.sha256, size=self.bytes, piece=self.piece)


@dataclass(frozen=True)
class Piece:
    folder: Path
    manifest: PieceManifest
    made_now: bool = False
    lake: str = ""

    @property
    def shard(self) -> str:
        return self.manifest.shard

    def has(self, table: str) -> bool:
        return any(part.table == table for part in self.manifest.parts)

    def part(self, table: str) -> Part:
        for part in self.manifest.parts:
            if part.table == table:
                return Part(
                    place=self.folder / part.file,
                    sha256=part.sha256,
                    rows=part.rows,
                    bytes=part.bytes,
                    table=table,
                    shard=self.shard,
                    piece=self.manifest.address,
                    lake=self.lake,
                )
        raise LakeError(f"piece {self.manifest.address} has no table {table}")

    def file(self, name: str) -> Part:
        """A file that is no table."""
        for entry in self.manifest.files:
            if entry.file == name:
                place, address = self.folder / name, self.manifest.address
                return Part(
                    place, entry.sha256, 0, entry.bytes, name, self.shard, address, self.lake
                )
        raise LakeError(f"piece {self.manifest.address} has no file {name}")


def find_piece(lake: Path, benchmark: str, stage: str, key: str) -> Piece | None:
    """The piece, if it is committed; of a bucket its manifest is fetched, at most one request."""
    folder = piece_path(lake, benchmark, stage, key)
    bucket = bucket_of(lake)
    if bucket is None:
        manifest = piece_manifest(folder)
        is_whole = manifest is not None and all(
            _has_size(folder / file.file, file.bytes) for file in files_of(manifest)
        )
        return Piece(folder, manifest) if manifest is not None and is_whole else None
    manifest = piece_manifest(folder)
    if manifest is None:
        forget_piece(lake, f"{benchmark}/{stage}/{key}")
        if not pull_piece(bucket, lake, benchmark, stage, key):
            return None
        manifest = piece_manifest(folder)
    if manifest is None:
        raise LakeError(f"piece {benchmark}/{stage}/{key} in {bucket.address} is damaged; {CURE}")
    return Piece(folder, manifest, lake=bucket.address)


def piece_manifest(folder: Path) -> PieceManifest | None:
    """None if it is absent, or is not what was written."""
    try:
        return PieceManifest.unsealed((folder / MANIFEST).read_bytes())
    except (*ABSENT, ValueError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def pieces_of_stage(lake: Path, benchmark: str, stage: str) -> list[tuple[float, Piece]]:
    """Every piece that the stage made and this machine has: when, and the piece."""
    pieces = []
    for folder in sorted((pieces_path(lake) / benchmark / stage).glob("[!.]*")):
        if (manifest := piece_manifest(folder)) is not None:
            pieces.append(((folder / MANIFEST).stat().st_mtime, Piece(folder, manifest)))
    return pieces


def find_pieces(lake: Path, benchmark: str, stage: str, keys: Sequence[str]) -> list[Piece | None]:
    """The pieces of many keys, in their order; of a bucket many are asked for together."""
    if bucket_of(lake) is None:
        return [find_piece(lake, benchmark, stage, key) for key in keys]
    return at_once(lambda key: find_piece(lake, benchmark, stage, key), keys)


def write_piece(
    lake: Path,
    manifest: PieceManifest,
    frames: Mapping[str, tuple[Table, pl.DataFrame]],
    files: Mapping[str, Path] | None = None,
) -> Piece:
    """Commit checked frames and other files as one piece; fills in the manifest's lists."""
    folder = piece_path(lake, manifest.benchmark, manifest.stage, manifest.key)
    address = (lake, manifest.benchmark, manifest.stage, manifest.key)
    if folder.exists() and find_piece(*address) is None:
        bury(lake, [folder], "was no whole piece when it was to be made")
    with new_directory(folder) as temporary:
        parts: list[PartFile] = []
        for name, (table, frame) in sorted(frames.items()):
            parts.append(write_parquet(frame, table, temporary / f"{name}.parquet"))
            step("part_written")
        others = []
        for name, source in sorted((files or {}).items()):
            target = temporary / name
            shutil.copyfile(source, target)
            size = target.stat().st_size
            others.append(OtherFile(file=name, sha256=sha256_file(target), bytes=size))
        manifest = manifest.model_copy(update={"parts": parts, "files": others})
        (temporary / MANIFEST).write_bytes(manifest.sealed())
        step("piece_manifest_written")
        if (bucket := bucket_of(lake)) is not None:
            commit_piece(bucket, temporary, manifest)
    written = find_piece(*address)
    if written is None:
        raise LakeError(f"{folder} vanished while it was written; run the same command again")
    return replace(written, made_now=True)
