"""Kinetics videos: which file is which clip, and what of it really decodes (docs/kowl.md).

Enters: raw files (folder or archive) and the clips of `tasks.kowl.unify`. Leaves: the table VIDEOS,
one row per clip with a status, also for clips without a file, so that link rot can be counted; and
UNLISTED_VIDEOS, the same of video files that belong to no clip; any other file without a clip goes
to quarantine. Every file is decoded to its end, in child
processes that may hang: decord first; OpenCV reads the header of all and counts again where decord
failed, disagrees with the header or repeats its last frame. A header is never believed.
"""

import math
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from schemas.clips import FrameSampling
from schemas.errors import RecordError
from schemas.kowl import (
    UNLISTED_VIDEOS,
    USABLE,
    VIDEOS,
    DecodeSettings,
    SampleSettings,
    VideoSettings,
)
from schemas.table import REJECTED, Table
from storage.archives import ArchiveLimits
from storage.filehash import sha256_file
from storage.raw import RawFile, RawSource, open_raw
from tasks.engine.stage import Produced, Reject, Shard, stage
from tasks.ingest.native.pool import Limits, Outcome, run_batch
from tasks.kowl.buffer import FrameBuffer
from tasks.kowl.decode import HEAD_BYTES, container_of
from tasks.kowl.kept import KeptRows
from tasks.kowl.lists import SPLIT_SPELLINGS
from tasks.kowl.unify import sample_id

CLIPS_PER_SHARD = 2000
UNMATCHED = "unmatched"
UNLISTED = "unlisted_"
# Beside the videos: a CSV with the columns file and label, for files that no list has.
LABEL_FILES = ("labels.csv", "manifest.csv")
LABELS_BYTES = 64 << 20
DECORD = "tasks.kowl.decode:validate_with_decord"
OPENCV = "tasks.kowl.decode:validate_with_opencv"
SAMPLE = {
    "decord": "tasks.kowl.decode:sample_with_decord",
    "opencv": "tasks.kowl.decode:sample_with_opencv",
}
IMPORTS = {"decord": ("decord",), "opencv": ("cv2",)}
# The containers whose header has a number of frames; for others OpenCV reckons from the duration.
COUNTING = ("iso", "avi")
# Beside a video of the same name (a thumbnail, a description) other suffixes stand back.
VIDEO_SUFFIXES = (
    "mp4",
    "m4v",
    "mov",
    "mkv",
    "webm",
    "avi",
    "flv",
    "mpg",
    "mpeg",
    "ts",
    "wmv",
    "3gp",
)
# A bomb in an archive is one bad record: it is refused by the size that it declares.
ARCHIVE_LIMITS = ArchiveLimits(total_bytes=1 << 60, ratio=math.inf)
FILES_ON_DISK = 64
FILES_IN_TURN = 256
SAMPLES_PER_CHILD = 8
MESSAGE_CHARACTERS = 400
Keep = Callable[[str, FrameSampling, np.ndarray, np.ndarray], None]
"""Called with a file, a rule, and the indices and frames that the rule takes."""


# ---------------------------------------------------------------- which file is which clip


def _limits(settings: DecodeSettings) -> Limits:
    return Limits(seconds_per_item=settings.seconds_per_video, memory_bytes=settings.memory_bytes)


class Matched(NamedTuple):
    """`clips`: every sample_id with its `file`, null if none. `refused`: record, rule, message.

    `unlisted`: file, label, reason of videos that belong to no clip.
    """

    clips: pl.DataFrame
    refused: pl.DataFrame
    unlisted: pl.DataFrame


def match_source(
    source: RawSource, clips: pl.DataFrame, listings: pl.DataFrame | None = None
) -> Matched:
    """`match_files` of a folder or archive, with the labels that lie beside the videos."""
    files = source.files()
    label_of: dict[str, str | None] = {}
    for file in files:
        if file.name in LABEL_FILES and (beside := _labels_beside(source, file.name)) is not None:
            label_of |= beside
            files = [other for other in files if other is not file]
    matched = match_files(files, clips, listings)
    skipped = [(file.name, "unreadable", file.reason) for file in source.skipped]
    refused = pl.DataFrame(skipped, schema=REJECTED, orient="row")
    labels = [
        (name, label_of.get(name, folder))
        for name, folder in matched.unlisted.select("file", "label").iter_rows()
    ]
    schema = {"file": pl.String, "label": pl.String}
    return Matched(
        matched.clips,
        pl.concat([matched.refused, refused]),
        matched.unlisted.update(
            pl.DataFrame(labels, schema=schema, orient="row"), on="file", include_nulls=True
        ),
    )


def _labels_beside(source: RawSource, name: str) -> dict[str, str | None] | None:
    """Label of each file by a CSV, None where it says none; None if that is no such CSV."""
    try:
        rows = pl.read_csv(source.read(name, limit=LABELS_BYTES), infer_schema=False)
    except (pl.exceptions.PolarsError, RecordError):
        return None
    if not {"file", "label"} <= set(rows.columns):
        return None
    label = pl.col("label").str.strip_chars().replace("", None)
    return dict(rows.drop_nulls("file").select("file", label).iter_rows())


def match_files(
    files: Sequence[RawFile], clips: pl.DataFrame, listings: pl.DataFrame | None = None
) -> Matched:
    """Join file names to clips; folders above are free.

    A name is `<youtube_id>_<start>_<end>` or the id alone, with any suffix. Of several clips of one
    id the folder's name decides, if it is the label of one of them in `clips` or in any release
    (`listings`); else the file is refused as ambiguous. Of several files of one clip one is taken:
    first by the full name, then by content, video suffix, label folder and name. A file of no clip
    is refused unless it is called like a video; then its folder's name is its label.
    """
    names = pl.DataFrame(
        {"file": [file.name for file in files], "bytes": [file.size for file in files]},
        schema={"file": pl.String, "bytes": pl.Int64},
    ).with_columns(
        pl.col("file").str.extract(r"([^/]+)$").str.replace(r"\.[^.]*$", "").alias("stem"),
        _plain(pl.col("file").str.extract(r"([^/]+)/[^/]+$")).alias("folder"),
        pl.col("file").str.extract(r"\.([^./]+)$").str.to_lowercase().alias("suffix"),
    )
    groups = pl.col("stem").str.extract_groups(
        r"^(?P<id>[-_A-Za-z0-9]{11})(?:_(?P<start>\d{1,6})_(?P<end>\d{1,6}))?$"
    )
    times = [groups.struct.field(name).str.zfill(6) for name in ("start", "end")]
    names = names.with_columns(
        groups.struct.field("id").alias("youtube_id"),
        pl.concat_str(groups.struct.field("id"), *times, separator="_").alias("sample_id"),
    )
    labels = [clips.select("sample_id", "label")]
    labels += [] if listings is None else [listings.select(sample_id(), "label")]
    spelled = (
        pl.concat(labels)
        .drop_nulls()
        .select("sample_id", folder=_plain(pl.col("label")), labelled=True)
        .unique()
    )
    known = clips.select("sample_id", "youtube_id")
    exact = names.join(known.drop("youtube_id"), on="sample_id", how="inner").with_columns(
        full_name=True
    )
    by_id = (
        names.filter(pl.col("sample_id").is_null())
        .drop("sample_id")
        .join(known, on="youtube_id", how="inner")
        .with_columns(full_name=False)
        .select(exact.columns)
    )
    candidates = pl.concat([exact, by_id]).join(
        spelled, on=["sample_id", "folder"], how="left", validate="m:1"
    )
    candidates = candidates.with_columns(pl.col("labelled").fill_null(False))
    # Among several clips of an id the labelled ones count; if none is labelled, all do.
    candidates = candidates.filter(
        pl.col("labelled") | pl.col("full_name") | ~pl.col("labelled").any().over("file")
    )
    alone = pl.len().over("file") == 1
    ambiguous = (
        candidates.filter(~alone)
        .group_by("file")
        .agg(pl.col("sample_id").sort())
        .select(
            "file",
            rule=pl.lit("ambiguous_file"),
            message=pl.format(
                "the name fits {} clips, such as {}; name the file youtube_id_start_end",
                pl.col("sample_id").list.len(),
                pl.col("sample_id").list.first(),
            ),
        )
    )
    single = candidates.filter(alone).sort(
        "sample_id",
        pl.col("full_name"),
        pl.col("bytes") > 0,
        pl.col("suffix").is_in(VIDEO_SUFFIXES).fill_null(False),
        "labelled",
        "file",
        descending=[False, True, True, True, True, False],
    )
    first = pl.col("sample_id").is_first_distinct()
    taken = single.filter(first).select("sample_id", "file")
    duplicates = (
        single.filter(~first)
        .join(taken.rename({"file": "chosen"}), on="sample_id", validate="m:1")
        .select(
            "file",
            rule=pl.lit("duplicate_file"),
            message=pl.format("clip {} is taken from {}", "sample_id", "chosen"),
        )
    )
    strangers = names.join(candidates, on="file", how="anti").select(
        "file",
        rule=pl.when(pl.col("youtube_id").is_null())
        .then(pl.lit("unrecognised_name"))
        .otherwise(pl.lit("unlisted_clip")),
        message=pl.when(pl.col("youtube_id").is_null())
        .then(pl.lit("expected youtube_id_start_end or youtube_id, and a suffix"))
        .when(pl.col("youtube_id").is_in(known["youtube_id"].implode()))
        .then(pl.lit("no list has this clip, but other times of the same video"))
        .otherwise(pl.lit("no list has this clip")),
    )
    video = names.filter(pl.col("suffix").is_in(VIDEO_SUFFIXES)).select("file", "folder")
    spelling = clips.select("label").drop_nulls().unique().sort("label")
    spelling = spelling.select(known="label", folder=_plain(pl.col("label"))).unique(
        "folder", keep="first", maintain_order=True
    )
    parent = pl.col("file").str.extract(r"([^/]+)/[^/]+$")
    unlisted = (
        strangers.join(video, on="file")
        .join(spelling, on="folder", how="left")
        .select(
            "file",
            pl.coalesce(
                "known",
                pl.when(~pl.col("folder").is_in(list(SPLIT_SPELLINGS))).then(parent),
            ).alias("label"),
            pl.col("rule").alias("reason"),
        )
    )
    strangers = strangers.join(video, on="file", how="anti")
    refused = pl.concat([ambiguous, duplicates, strangers]).rename({"file": "record"})
    return Matched(
        clips.select("sample_id")
        .join(taken, on="sample_id", how="left", validate="1:1")
        .sort("sample_id"),
        refused.cast(REJECTED).sort("record"),
        unlisted.sort("file"),
    )


def _plain(label: pl.Expr) -> pl.Expr:
    """A label as folders may spell it: case, brackets, apostrophes and separators do not count."""
    spaced = label.str.to_lowercase().str.replace_all(r"['’`()\[\]{}]", "")
    return spaced.str.replace_all(r"[^\p{L}\p{N}]+", " ").str.strip_chars()


def plan_video_shards(source: RawSource, matched: Matched) -> list[Shard]:
    """Shards of about `CLIPS_PER_SHARD` clips by a hash of the sample id, and the files left over.

    Their number is a power of two that depends on the number of clips alone, so that a file more or
    less changes one shard.
    """
    shards = _shards(source, matched.clips, "")
    if matched.refused.height:
        shards.append(Shard(UNMATCHED, source=source.root, about=matched.refused.rows()))
    return sorted(shards, key=lambda shard: shard.name)


def plan_unlisted_shards(source: RawSource, matched: Matched) -> list[Shard]:
    """The same for videos that belong to no clip, by a hash of the file's name.

    Without any there is one shard of none, so that the table never tells of files that are gone.
    """
    none = Shard(f"{UNLISTED}0000_of_0001", source=source.root, about=[])
    return _shards(source, matched.unlisted, UNLISTED) or [none]


def _shards(source: RawSource, rows: pl.DataFrame, prefix: str) -> list[Shard]:
    """`rows` by a hash of their first column; each shard with the rows and files that it has."""
    files = {found.name: found for found in source.files()}
    count = 1 << max(0, math.ceil(math.log2(max(1, rows.height) / CLIPS_PER_SHARD)))
    hashes = [zlib.crc32(name.encode()) % count for name in rows[rows.columns[0]]]
    buckets = rows.with_columns(pl.Series("bucket", hashes, pl.Int64))
    shards = [
        Shard(
            f"{prefix}{bucket:04d}_of_{count:04d}",
            files=tuple(files[name] for name in sorted(part["file"].drop_nulls())),
            source=source.root,
            about=part.drop("bucket").rows(),
        )
        for (bucket,), part in buckets.partition_by("bucket", as_dict=True).items()
    ]
    return sorted(shards, key=lambda shard: shard.name)


# ---------------------------------------------------------------- what decodes


@stage(writes=(VIDEOS,), version=1, reuses=True)
def validate_videos(shard: Shard, settings: VideoSettings) -> Produced:
    """Decode the videos of some clips to their end and record what was found.

    A good file that the last build decoded is not decoded again; a bad one gets another chance.
    """
    if shard.name == UNMATCHED:
        rejects = [Reject(*refused) for refused in shard.about]
        return Produced({}, len(rejects), rejects)
    rows = [
        {"sample_id": sample, "status": "missing", "frames": 0}
        for sample, name in shard.about
        if name is None
    ]
    columns = {name: {"sample_id": sample} for sample, name in shard.about if name is not None}
    decoded, rejects = _decoded(shard, settings, VIDEOS, columns)
    frame = pl.DataFrame(rows + decoded, schema=VIDEOS.polars_schema)
    return Produced({VIDEOS.name: frame}, len(shard.about), rejects)


@stage(writes=(UNLISTED_VIDEOS,), version=1, reuses=True)
def validate_unlisted(shard: Shard, settings: VideoSettings) -> Produced:
    """Decode videos that belong to no clip in the same way."""
    columns = {name: {"label": label, "reason": reason} for name, label, reason in shard.about}
    decoded, rejects = _decoded(shard, settings, UNLISTED_VIDEOS, columns)
    frame = pl.DataFrame(decoded, schema=UNLISTED_VIDEOS.polars_schema)
    return Produced({UNLISTED_VIDEOS.name: frame}, len(shard.about), rejects)


def _decoded(
    shard: Shard,
    settings: VideoSettings,
    table: Table,
    named: Mapping[str, Mapping[str, str | None]],
) -> tuple[list[dict[str, Any]], list[Reject]]:
    """Rows of the files of a shard; `named` has the columns that do not come from the content."""
    files = {file.name: file for file in shard.files}
    kept = KeptRows(shard.work, table)
    room = getattr(settings, "kept_bytes", 0) * len(files)
    buffer = FrameBuffer(shard.work, shard.name, room)
    known = _decoded_before(shard, table)
    known |= {row["file"]: row for row in kept.before().iter_rows(named=True)}
    rows = [{**row, **named[name]} for name, row in known.items()]
    rejects = []
    new = [name for name in files if name not in known]
    for found in _in_turn(shard.source or "", new, settings.max_archived_bytes):
        made = []
        digests = {name: _sha256(files[name], path) for name, path in found.items()}

        def keep(name: str, *frames: Any, digests: Mapping[str, str] = digests) -> None:
            buffer.add(digests[name], *frames)

        for name, facts in validate(found, settings, keep).items():
            if isinstance(facts, RecordError):
                rejects.append(Reject.of(named[name].get("sample_id") or name, facts))
                continue
            about = {"file": name, "bytes": files[name].size, "sha256": digests[name]}
            made.append({**named[name], **about, **facts})
        kept.add(pl.DataFrame(made, schema=table.polars_schema))
        rows += made
    return rows, rejects


def _sha256(file: RawFile, path: Path | RecordError) -> str:
    """Of a raw file that lies there; an archive tells another checksum of its members."""
    is_told = not file.digest.startswith("crc32:")
    return file.digest if is_told or isinstance(path, RecordError) else sha256_file(path)


def _in_turn(
    root: str, names: Sequence[str], limit: int
) -> Iterator[dict[str, Path | RecordError]]:
    """`on_disk` of some files after the other: a killed shard loses those of one turn."""
    for start in range(0, len(names), FILES_IN_TURN):
        yield from on_disk(root, names[start : start + FILES_IN_TURN], limit)


def _decoded_before(shard: Shard, table: Table) -> dict[str, dict[str, Any]]:
    """Rows of the last build by file: usable then, and the same bytes under the same name now."""
    if shard.earlier is None:
        return {}
    digests = {given.name: given.digest for given in shard.earlier.manifest.inputs}
    same = [file.name for file in shard.files if digests.get(file.name) == file.digest]
    rows = shard.earlier.part(table.name).read()
    good = rows.filter(pl.col("file").is_in(same), pl.col("status").is_in(USABLE))
    return {row["file"]: row for row in good.iter_rows(named=True)}


def on_disk(root: str, names: Sequence[str], limit: int) -> Iterator[dict[str, Path | RecordError]]:
    """Where each raw file lies, in order, or why it cannot be read.

    Files of a folder come at once, those of an archive a few at a time, unpacked for as long as the
    caller works on them.
    """
    if Path(root).is_dir():
        yield {name: Path(root, name) for name in names}
        return
    source = open_raw(Path(root), limits=ARCHIVE_LIMITS)
    for start in range(0, len(names), FILES_ON_DISK):
        unpacked: dict[str, Path | RecordError] = {}
        with TemporaryDirectory(prefix="videos-") as folder:
            for number, name in enumerate(names[start : start + FILES_ON_DISK]):
                suffix = re.sub(r"[^.A-Za-z0-9]", "", PurePosixPath(name).suffix)
                path = Path(folder, f"{number}{suffix}")
                try:
                    path.write_bytes(source.read(name, limit=limit))
                    unpacked[name] = path
                except RecordError as error:
                    unpacked[name] = error
            yield unpacked


def validate(
    files: Mapping[str, Path | RecordError], settings: VideoSettings, keep: Keep | None = None
) -> dict[str, dict[str, Any] | RecordError]:
    """For each file the columns of VIDEOS that its content decides, or why it cannot be read.

    `keep` gets the frames that the rules of `settings` take, of what decord decodes whole.
    """
    facts: dict[str, dict[str, Any] | RecordError] = {}
    kinds: dict[str, str | None] = {}
    for name, path in files.items():
        head = path if isinstance(path, RecordError) else _head(path)
        if isinstance(head, RecordError):
            facts[name] = head
        elif not head:
            facts[name] = {"status": "zero_byte", "frames": 0}
        elif (kind := container_of(head)) == "text":
            message = "the file is text, such as a web page"
            facts[name] = {"status": "not_video", "frames": 0, "message": message}
        else:
            kinds[name] = kind
    items: list[dict[str, Any]] = [{"path": str(files[name])} for name in kinds]
    options: Any = {"limits": _limits(settings), "workers": settings.workers}
    by_decord = _by_decord(list(kinds), items, options, getattr(settings, "rules", ()), keep)
    for item, outcome in zip(items, by_decord, strict=True):
        value = outcome.value
        item["frames"] = value["frames"] if value and not value["repeated"] else None
    by_opencv = run_batch(OPENCV, items, imports=IMPORTS["opencv"], **options)
    for name, decord, opencv in zip(kinds, by_decord, by_opencv, strict=True):
        if "unreadable" in (decord.rule, opencv.rule):
            facts[name] = RecordError("unreadable", "the video went away while it was decoded")
        else:
            facts[name] = judge(decord, opencv, kinds[name], settings)
    return {name: facts[name] for name in files}


def _by_decord(
    names: Sequence[str],
    items: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
    rules: Sequence[FrameSampling],
    keep: Keep | None,
) -> list[Outcome]:
    """What decord finds in each video; on the way `keep` gets its frames by each rule.

    What is found in doubt, or not at all, on the way is found again without rules: rows do not
    depend on the models that were asked for.
    """

    def decoded(items: Sequence[dict[str, Any]], **more: Any) -> Generator[Outcome, None, None]:
        return run_batch(DECORD, items, imports=IMPORTS["decord"], **options, **more)

    if keep is None or not rules:
        return list(decoded(items))
    rule_fields = [rule.model_dump(include=set(FrameSampling.model_fields)) for rule in rules]
    outcomes = []
    doubtful = []
    on_the_way = decoded(
        [{**item, "rules": rule_fields} for item in items], batch=SAMPLES_PER_CHILD
    )
    for number, outcome in enumerate(on_the_way):
        value = outcome.value or {"doubtful": True}
        for place, rule in enumerate(rules):
            if (frames := value.pop(f"frames_{place}", None)) is not None:
                keep(names[number], rule, value.pop(f"indices_{place}"), frames)
        outcomes.append(outcome)
        if value.pop("doubtful"):
            doubtful.append(number)
    for number, outcome in zip(doubtful, decoded([items[n] for n in doubtful]), strict=True):
        outcomes[number] = outcome
    return outcomes


def _head(path: Path) -> bytes | RecordError:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        return RecordError("unreadable", f"the video cannot be read: {error.strerror}")


def judge(
    decord: Outcome, opencv: Outcome, container: str | None, settings: VideoSettings
) -> dict[str, Any]:
    """Status and facts of one file out of what the two decoders said.

    OpenCV's count is the truth where it counted. A decoder that hung or died decides the status
    only if the other one got no frame either.
    """
    seen, header = decord.value or {}, opencv.value or {}
    counted = header.get("counted")
    frames = seen.get("frames", 0) if counted is None else counted
    fps = header.get("fps") or seen.get("fps")
    announced = header.get("announced", 0)
    counts = container in COUNTING
    missing = announced - frames
    rules = {decord.rule, opencv.rule}
    complaints = [outcome.message for outcome in (decord, opencv) if outcome.message]
    complaints += seen.get("printed", [])
    if not frames:
        if "native_timeout" in rules:
            status = "timeout"
        elif rules & {"native_crash", "native_memory", "native_no_result", "native_error"}:
            status = "crash"
        elif "no_video_stream" in rules:
            status = "audio_only"
        else:
            status = "truncated" if container else "not_video"
    elif missing > max(settings.lie_frames, settings.lie_share * announced):
        status = "truncated"
        source = "the header announces" if counts else "the header's duration makes"
        complaints.insert(0, f"{source} {announced} frames, {frames} decode")
    elif frames < settings.min_frames or (fps and frames / fps < settings.min_seconds):
        status = "short"
    else:
        status = "frame_count_lie" if counts and announced and missing else "ok"
    whole = frames > 0 and seen.get("frames") == frames
    return {
        "status": status,
        "decoder": "decord" if whole else "opencv" if counted else None,
        "frames": frames,
        "header_frames": None if not header else announced if counts else 0,
        "seconds": frames / fps if fps else None,
        "fps": fps,
        **{name: header.get(name) for name in ("width", "height", "codec", "rotation")},
        "message": "; ".join(complaints)[:MESSAGE_CHARACTERS] or None,
    }


def link_rot(
    listings: pl.DataFrame, videos: pl.DataFrame, by: Sequence[str] = ("release", "split", "label")
) -> pl.DataFrame:
    """How many listed clips have a usable video, none, or a bad one, and the share that is lost.

    `listings` are rows of the lists (`tasks.kowl.lists.ROWS`), here and in `match_files`.
    """
    status = pl.col("status")
    ok = status.is_in(USABLE).fill_null(False)
    missing = status.is_null() | (status == "missing")
    return (
        listings.with_columns(sample_id())
        .join(videos.select("sample_id", "status"), on="sample_id", how="left", validate="m:1")
        .group_by(by)
        .agg(
            pl.len().alias("clips"),
            ok.sum().alias("ok"),
            missing.sum().alias("missing"),
            (~ok & ~missing).sum().alias("bad"),
            (1 - ok.mean()).alias("lost_share"),
        )
        .sort(by, nulls_last=True)
    )


# ---------------------------------------------------------------- frames for features


def sample_videos(
    root: str, videos: pl.DataFrame, settings: SampleSettings | None = None
) -> Iterator[tuple[str, np.ndarray | RecordError]]:
    """(sample_id, frames) of rows of VIDEOS that have a decoder, in the order of the rows.

    Frames are (views, count, crop, crop, 3) uint8 RGB. Each row is read with the decoder that was
    found to give its frames, so a failure means that the file has changed or the machine is ill.
    """
    settings = settings or SampleSettings()
    row_of = {
        row["file"]: row
        for row in videos.select("sample_id", "file", "frames", "fps", "decoder").rows(named=True)
    }
    without = [row["sample_id"] for row in row_of.values() if row["decoder"] is None]
    if without:
        raise ValueError(f"nothing decodes of {without[:3]}; take rows with status in {USABLE}")
    for found in on_disk(root, list(row_of), settings.max_archived_bytes):
        streams = {decoder: _sample(decoder, found, row_of, settings) for decoder in SAMPLE}
        with closing(streams["decord"]), closing(streams["opencv"]):
            for name, path in found.items():
                row = row_of[name]
                if isinstance(path, RecordError):
                    yield row["sample_id"], path
                    continue
                outcome = next(streams[row["decoder"]])
                if outcome.value is None:
                    error = RecordError(outcome.rule or "native_error", outcome.message or "")
                    yield row["sample_id"], error
                else:
                    yield row["sample_id"], outcome.value["frames"]


def _sample(
    decoder: str,
    found: Mapping[str, Path | RecordError],
    row_of: Mapping[str, dict[str, Any]],
    settings: SampleSettings,
) -> Generator[Outcome, None, None]:
    options = settings.model_dump(include=set(FrameSampling.model_fields))
    items = [
        {"path": str(path), "frames": row_of[name]["frames"], "fps": row_of[name]["fps"], **options}
        for name, path in found.items()
        if isinstance(path, Path) and row_of[name]["decoder"] == decoder
    ]
    return run_batch(
        SAMPLE[decoder],
        items,
        limits=_limits(settings),
        imports=IMPORTS[decoder],
        workers=settings.workers,
        batch=SAMPLES_PER_CHILD,
    )
