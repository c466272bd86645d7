"""Raw image sets to the tables SAMPLES, IMAGES, PICTURES and THUMBNAILS (docs/semantic.md).

Enters: listings of sources (`tasks.semantic.sources`). Leaves: shards of image files, decoded in
child processes that may hang, crash or eat memory, and shards of files of many images. What cannot
be read goes to quarantine under its image id.

A bucket of image files is a prefix of the hash of the image id, one bit longer wherever more than
`PICTURES_PER_SHARD` share it: a new image changes one shard. Files of many are cut by row number.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from schemas.errors import RecordError
from schemas.semantic import IMAGES, PICTURES, THUMBNAILS, PictureSettings
from schemas.tables import SAMPLES
from storage.raw import open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.ingest.native.pool import Limits, Outcome, run_batch
from tasks.ingest.raw_files import ARCHIVE_LIMITS, hash_buckets, on_disk
from tasks.semantic.pictures import ENCODED, cut_square, encoded
from tasks.semantic.records import (
    CIFAR_RECORD,
    STL_PIXELS,
    Records,
    read_cifar_binary,
    read_stl,
)
from tasks.semantic.sources import Entry, Listing, RecordFile

PICTURES_PER_SHARD = 1024
RECORDS_PER_SHARD = 5000
CHUNK = 32
REFUSED = "refused"
KEPT = ("size", "data", "thumbnail_size", "thumbnail")
RECORD_BYTES = {"cifar_binary": CIFAR_RECORD, "stl": STL_PIXELS}
FORMAT_NAMES = {"cifar_binary": "cifar10", "cifar_python": "cifar10", "stl": "stl10"}


class RecordSlice(NamedTuple):
    """Rows from `start` up to `stop` of a file; None: to its end."""

    start: int
    stop: int | None


# ---------------------------------------------------------------- shards


def plan_image_shards(listings: Sequence[Listing], whole: Sequence[str] = ()) -> list[Shard]:
    """Shards of each source, and its refusals.

    An image that an earlier source of the same data set has already is refused. Pictures of the
    data sets in `whole` keep their size whatever the settings say.
    """
    owner: dict[str, str] = {}
    shards: list[Shard] = []
    for listing in listings:
        refused = [tuple(row) for row in listing.refused]
        entries = []
        for entry in listing.entries:
            if entry.sample_id in owner:
                message = f"{entry.file}: source {owner[entry.sample_id]} has this image already"
                refused.append((entry.sample_id, "duplicate_id", message))
            else:
                entries.append(entry)
        owner |= {entry.sample_id: listing.name for entry in entries}
        shards += _picture_shards(listing, entries)
        for record in listing.records:
            stem = f"{listing.dataset}/{record.stem}"
            if stem in owner:
                message = f"source {owner[stem]} has {stem} already"
                refused.append((record.file, "duplicate_id", message))
            else:
                owner[stem] = listing.name
                shards += _record_shards(listing, record)
        if refused:
            name = f"{listing.name}/{REFUSED}"
            shards.append(Shard(name, source=listing.root, about=sorted(map(list, refused))))
    for number, shard in enumerate(shards):
        if isinstance(shard.about, dict) and shard.about["dataset"] in whole:
            shards[number] = replace(shard, about={**shard.about, "whole": True})
    return sorted(shards, key=lambda shard: shard.name)


def _picture_shards(listing: Listing, entries: Iterable[Entry]) -> Iterator[Shard]:
    by_id = {entry.sample_id: entry for entry in entries}
    for name, ids in hash_buckets(by_id, PICTURES_PER_SHARD):
        some = [by_id[image] for image in ids]
        yield Shard(
            f"{listing.name}/{name}",
            files=tuple(listing.files[file] for file in sorted(entry.file for entry in some)),
            source=listing.root,
            about={
                "source": listing.name,
                "dataset": listing.dataset,
                "images": [list(entry) for entry in some],
            },
        )


def _record_shards(listing: Listing, record: RecordFile) -> Iterator[Shard]:
    """A pickle is read as a whole, so it is one shard; the last shard also accounts for the end."""
    count = RECORDS_PER_SHARD
    if record.reader in RECORD_BYTES:
        count = listing.files[record.file].size // RECORD_BYTES[record.reader]
    starts = range(0, max(count, 1), RECORDS_PER_SHARD)
    files = [name for name in (record.file, record.labels) if name]
    for number, start in enumerate(starts):
        stop = None if number == len(starts) - 1 else start + RECORDS_PER_SHARD
        yield Shard(
            f"{listing.name}/{record.stem}/{number:05d}",
            files=tuple(listing.files[name] for name in files),
            source=listing.root,
            about={
                "source": listing.name,
                "dataset": listing.dataset,
                "record": list(record),
                "slice": [start, stop],
            },
        )


# ---------------------------------------------------------------- the stage


@stage(writes=(IMAGES, SAMPLES, PICTURES, THUMBNAILS), version=3)
def read_images(shard: Shard, settings: PictureSettings) -> Produced:
    """Read some images and keep them as pictures of their final size."""
    if shard.name.endswith(f"/{REFUSED}"):
        rejects = [Reject(*refused) for refused in shard.about]
        return Produced({}, len(rejects), rejects)
    whole = shard.about.get("whole", False)
    rows = _Rows(shard.about["source"], shard.about["dataset"], settings, whole)
    if "record" in shard.about:
        _read_records(shard, rows)
    else:
        _read_files(shard, rows)
    return rows.produced()


class _Rows:
    """Rows of the tables and refusals, as they are gathered."""

    def __init__(self, source: str, dataset: str, settings: PictureSettings, whole: bool):
        self.source, self.dataset, self.settings = source, dataset, settings
        self.side = None if whole or dataset in settings.keep else settings.side
        self.encoding = settings.encoding
        if settings.encoding == "auto":
            self.encoding = "png" if self.side is None else "jpeg"
        self.images: list[dict[str, Any]] = []
        self.samples: list[tuple[Any, ...]] = []
        self.pictures: list[tuple[Any, ...]] = []
        self.thumbnails: list[tuple[Any, ...]] = []
        self.rejects: list[Reject] = []

    def add(self, image: dict[str, Any], encoded_images: Mapping[str, Any]) -> None:
        """`kept`: size and bytes of picture and thumbnail, as `encoded` gives them."""
        key = image["sample_id"]
        self.images.append({**image, "source": self.source, "dataset": self.dataset})
        # What models get to see: the stored bytes, which change with the side and the encoding.
        digest = hashlib.sha256(encoded_images["data"]).hexdigest()
        self.samples.append((key, image["class"], None, None, image["file"], digest, "image"))
        self.pictures.append((key, *encoded_images["size"], self.encoding, encoded_images["data"]))
        self.thumbnails.append(
            (key, *encoded_images["thumbnail_size"], encoded_images["thumbnail"])
        )

    def produced(self) -> Produced:
        images = pl.DataFrame(self.images, schema=IMAGES.polars_schema)
        pictures = pl.DataFrame(self.pictures, schema=PICTURES.polars_schema, orient="row")
        thumbnails = pl.DataFrame(self.thumbnails, schema=THUMBNAILS.polars_schema, orient="row")
        tables = {
            IMAGES.name: images,
            SAMPLES.name: pl.DataFrame(self.samples, schema=SAMPLES.polars_schema, orient="row"),
            PICTURES.name: pictures,
            THUMBNAILS.name: thumbnails,
        }
        return Produced(tables, images.height + len(self.rejects), self.rejects)


def _limits(settings: PictureSettings) -> Limits:
    return Limits(seconds_per_item=settings.seconds_per_image, memory_bytes=settings.memory_bytes)


def _read_files(shard: Shard, rows: _Rows) -> None:
    settings = rows.settings
    entries = {row[-1]: Entry(*row) for row in shard.about["images"]}
    for paths in on_disk(shard.source or "", shard.files, settings.max_file_bytes):
        readable = []
        for name, path in paths.items():
            if isinstance(path, RecordError):
                message = f"{name}: {path.message}"
                rows.rejects.append(Reject(entries[name].sample_id, path.rule, message))
            else:
                readable.append((entries[name], path))
        items = [
            {
                "path": str(path),
                "suffix": PurePosixPath(entry.file).suffix.lower(),
                "side": rows.side,
                "encoding": rows.encoding,
                "quality": settings.quality,
                "thumbnail": settings.thumbnail,
                "max_pixels": settings.max_pixels,
            }
            for entry, path in readable
        ]
        for (entry, _), value in zip(readable, _decoded(items, settings), strict=True):
            if "rule" in value:
                message = f"{entry.file}: {value['message']}"
                rows.rejects.append(Reject(entry.sample_id, value["rule"], message))
                continue
            about = {
                "sample_id": entry.sample_id,
                "class": entry.class_,
                "class_name": entry.class_name,
                "split": entry.split,
                "file": entry.file,
                "row": None,
            }
            encoded_images = {name: value.pop(name) for name in KEPT}
            rows.add(about | value, encoded_images)


def _decoded(items: list[dict[str, Any]], settings: PictureSettings) -> Iterator[dict[str, Any]]:
    """What `read_picture` gives of each item, or rule and message; by chunks, in a child process.

    Images of a chunk that took the child down are tried again one by one.
    """
    chunks = [items[i : i + CHUNK] for i in range(0, len(items), CHUNK)]
    for chunk, outcome in zip(chunks, _in_child(chunks, settings), strict=True):
        if outcome.value is not None:
            yield from _unpacked(outcome.value)
            continue
        for single in _in_child([[item] for item in chunk], settings):
            if single.value is None:
                yield {"rule": single.rule or "", "message": single.message or ""}
            else:
                yield from _unpacked(single.value)


def _in_child(chunks: list[list[dict[str, Any]]], settings: PictureSettings) -> Iterable[Outcome]:
    return run_batch(
        "tasks.semantic.pictures:read_pictures",
        [{"images": chunk} for chunk in chunks],
        limits=_limits(settings),
        imports=("numpy", "PIL.Image"),
        batch=PICTURES_PER_SHARD,
    )


def _unpacked(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0
    for result in value["results"]:
        if "rule" not in result:
            for name, length in zip(ENCODED, result.pop("bytes"), strict=True):
                result[name] = value["data"][start : start + length]
                start += length
        yield result


def _read_records(shard: Shard, rows: _Rows) -> None:
    from PIL import Image

    record = RecordFile(*shard.about["record"])
    start, stop = RecordSlice(*shard.about["slice"])
    try:
        records = _records_of(shard, record, rows.settings)
    except RecordError as error:
        if stop is None:  # one refusal, however many shards the file has
            rows.rejects.append(Reject.of(record.file, error))
        return
    labels = records.labels[start:stop]
    for number, pixels in enumerate(records.pixels[start:stop], start=start):
        sample_id = f"{rows.dataset}/{_folder(record)}/{number:05d}"
        label = int(labels[number - start])
        if not 0 <= label < len(record.classes):
            message = f"{record.file}#{number}: its label is none of the {len(record.classes)}"
            rows.rejects.append(Reject(sample_id, "unknown_label", message))
            continue
        pixels = np.ascontiguousarray(pixels)
        picture = Image.fromarray(pixels)
        if rows.side is not None:
            picture = cut_square(picture, rows.side)
        about = {
            "sample_id": sample_id,
            "class": record.classes[label],
            "class_name": None,
            "split": record.split,
            "file": record.file,
            "row": number,
            "width": pixels.shape[1],
            "height": pixels.shape[0],
            "format": FORMAT_NAMES[record.reader],
            "mode": "RGB",
            "converted": None,
            "digest": hashlib.sha256(pixels.tobytes()).hexdigest(),
        }
        how = rows.encoding, rows.settings.quality, rows.settings.thumbnail
        rows.add(about, encoded(picture, *how))
    if records.rest and stop is None:
        message = f"{records.rest} bytes follow the last whole record; fetch the file again"
        rows.rejects.append(Reject(record.file, "truncated", message))


def _folder(record: RecordFile) -> str:
    return record.stem if record.reader == "stl" else f"{record.split}/{record.stem}"


def _records_of(shard: Shard, record: RecordFile, settings: PictureSettings) -> Records:
    limit = settings.max_file_bytes
    if record.reader == "cifar_python":
        return _unpickled(shard, settings)
    source = open_raw(Path(shard.source or ""), limits=ARCHIVE_LIMITS)
    data = source.read(record.file, limit=limit)
    if record.reader == "stl":
        return read_stl(data, source.read(record.labels, limit=limit))
    return read_cifar_binary(data)


def _unpickled(shard: Shard, settings: PictureSettings) -> Records:
    """A python batch, read in a child process."""
    for paths in on_disk(shard.source or "", shard.files, settings.max_file_bytes):
        (path,) = paths.values()
        if isinstance(path, RecordError):
            raise path
        function = "tasks.semantic.records:read_python_batch"
        (outcome,) = run_batch(function, [{"path": str(path)}], limits=_limits(settings))
        if outcome.value is None:
            raise RecordError(outcome.rule or "", outcome.message or "")
        return Records(outcome.value["labels"], outcome.value["pixels"])
    raise AssertionError(f"shard {shard.name} names no file")
