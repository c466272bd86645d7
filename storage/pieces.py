"""Pieces: what one stage made from one shard, named by the content key of everything that went in.

A piece is a folder of Parquet files (one per table, plus `quarantine`) with its manifest. It exists
whole or not at all, so its presence is the only "done" mark that there is.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from schemas.errors import LakeError
from schemas.manifest import Input, OtherFile, PartFile, PieceManifest
from schemas.table import Table
from storage.atomic import new_directory, step
from storage.filehash import sha256_file
from storage.layout import MANIFEST, piece_path
from storage.parquet import read_parquet, write_parquet


@dataclass(frozen=True)
class Part:
    """A reference to one file of a piece, cheap to pass between processes.

    `table` is the table that a Parquet file holds rows of, or the name of any other file.
    """

    path: Path
    sha256: str
    rows: int
    bytes: int
    table: str
    shard: str
    piece: str

    def read(self, columns: list[str] | None = None) -> pl.DataFrame:
        return read_parquet([self.path], columns)

    def as_input(self) -> Input:
        return Input(name=self.table, digest=self.sha256, size=self.bytes, piece=self.piece)


@dataclass(frozen=True)
class Piece:
    folder: Path
    manifest: PieceManifest
    made_now: bool = False

    @property
    def shard(self) -> str:
        return self.manifest.shard

    def has(self, table: str) -> bool:
        return any(part.table == table for part in self.manifest.parts)

    def part(self, table: str) -> Part:
        for part in self.manifest.parts:
            if part.table == table:
                return Part(
                    path=self.folder / part.file,
                    sha256=part.sha256,
                    rows=part.rows,
                    bytes=part.bytes,
                    table=table,
                    shard=self.shard,
                    piece=self.manifest.address,
                )
        raise LakeError(f"piece {self.manifest.address} has no table {table}")

    def file(self, name: str) -> Part:
        """A file that is no table."""
        for entry in self.manifest.files:
            if entry.file == name:
                path, address = self.folder / name, self.manifest.address
                return Part(path, entry.sha256, 0, entry.bytes, name, self.shard, address)
        raise LakeError(f"piece {self.manifest.address} has no file {name}")


def find_piece(lake: Path, benchmark: str, stage: str, key: str) -> Piece | None:
    folder = piece_path(lake, benchmark, stage, key)
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    return Piece(folder, PieceManifest.model_validate_json(data))


def write_piece(
    lake: Path,
    manifest: PieceManifest,
    frames: Mapping[str, tuple[Table, pl.DataFrame]],
    files: Mapping[str, Path] | None = None,
) -> Piece:
    """Commit checked frames and other files as one piece; fills in the manifest's lists."""
    folder = piece_path(lake, manifest.benchmark, manifest.stage, manifest.key)
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
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        step("piece_manifest_written")
    written = find_piece(lake, manifest.benchmark, manifest.stage, manifest.key)
    if written is None:
        raise LakeError(f"{folder} vanished while it was written; run the same command again")
    return Piece(written.folder, written.manifest, made_now=True)
