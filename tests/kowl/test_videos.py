"""Files find their clips, every clip gets the status that its file deserves, nothing hangs."""

import csv
import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import RecordError
from schemas.kowl import (
    STATUSES,
    UNLISTED_VIDEOS,
    USABLE,
    VIDEOS,
    SampleSettings,
    VideoSettings,
)
from storage.raw import RawFile, open_raw
from tasks.engine.stage import Build
from tasks.ingest.native.pool import Outcome
from tasks.kowl import kept, videos
from tasks.kowl.lists import Release, read_release
from tasks.kowl.unify import unify
from tasks.kowl.videos import (
    judge,
    link_rot,
    match_files,
    match_source,
    plan_unlisted_shards,
    plan_video_shards,
    sample_videos,
    validate,
    validate_unlisted,
    validate_videos,
)
from tasks.sample.kowl import RELEASES, bad_kowl_records, write_kowl
from tests.kowl.test_decode import counting_frames, numbers_of, write_video
from tests.shared import shared_path

SETTINGS = VideoSettings()


def clips_of(*rows: tuple[str, int, int, str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        [(f"{i}_{s:06d}_{e:06d}", i, s, e, label) for i, s, e, label in rows],
        schema=["sample_id", "youtube_id", "time_start", "time_end", "label"],
        orient="row",
    ).cast({"label": pl.String})


CLIPS = clips_of(
    ("aaaaaaaaaaa", 1, 11, "arm wrestling"),
    ("-bbbbb_bbbb", 20, 30, "passing American football (not in game)"),
    ("ccccccccccc", 0, 10, "luge"),
    ("ccccccccccc", 10, 20, "massaging person's head"),
    ("ddddddddddd", 0, 10, "yoga"),
    ("ddddddddddd", 30, 40, "yoga"),
    ("e_000001_00", 5, 15, None),
)


def matched(*names: str, sizes: dict[str, int] | None = None, listings=None):
    files = [RawFile(name, (sizes or {}).get(name, 9), "") for name in names]
    found = match_files(files, CLIPS, listings)
    taken = found.clips.drop_nulls()
    return (
        dict(zip(taken["file"], taken["sample_id"], strict=True)),
        dict(found.refused.select("record", "rule").iter_rows())
        | dict(found.unlisted.select("file", "reason").iter_rows()),
    )


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("arm wrestling/aaaaaaaaaaa_000001_000011.mp4", "aaaaaaaaaaa_000001_000011"),
        ("aaaaaaaaaaa_000001_000011.webm", "aaaaaaaaaaa_000001_000011"),
        ("aaaaaaaaaaa_1_11.MKV", "aaaaaaaaaaa_000001_000011"),
        ("k400/train/wrong label/aaaaaaaaaaa_000001_000011.mp4", "aaaaaaaaaaa_000001_000011"),
        ("x/-bbbbb_bbbb_000020_000030", "-bbbbb_bbbb_000020_000030"),
        ("-bbbbb_bbbb.mp4", "-bbbbb_bbbb_000020_000030"),
        ("LUGE/ccccccccccc.mp4", "ccccccccccc_000000_000010"),
        ("massaging_persons_head/ccccccccccc.avi", "ccccccccccc_000010_000020"),
        ("e_000001_00.mp4", "e_000001_00_000005_000015"),
    ],
)
def test_layouts(name: str, sample: str) -> None:
    assert matched(name) == ({name: sample}, {})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("README.md", "unrecognised_name"),
        ("aaaaaaaaaaa_000001_000011.mp4.part", "unrecognised_name"),
        ("aaaaaaaaaaa_000001.mp4", "unrecognised_name"),
        ("arm wrestling/.DS_Store", "unrecognised_name"),
        ("aaaaaaaaaaa_000002_000012.mp4", "unlisted_clip"),
        ("zzzzzzzzzzz.mp4", "unlisted_clip"),
        ("ccccccccccc.mp4", "ambiguous_file"),
        ("yoga/ddddddddddd.mp4", "ambiguous_file"),
        ("other/ccccccccccc.mp4", "ambiguous_file"),
    ],
)
def test_files_that_belong_nowhere(name: str, rule: str) -> None:
    assert matched(name) == ({}, {name: rule})


def test_a_label_of_any_release_names_the_folder() -> None:
    listings = pl.DataFrame(
        {
            "release": ["kinetics400"],
            "youtube_id": ["ddddddddddd"],
            "time_start": [30],
            "time_end": [40],
            "label": ["stretching (old name)"],
        }
    )
    name = "stretching_old_name/ddddddddddd.mp4"
    assert matched(name, listings=listings) == ({name: "ddddddddddd_000030_000040"}, {})


@pytest.mark.parametrize(
    ("best", "others"),
    [
        ("z/aaaaaaaaaaa_000001_000011.mp4", ["aaaaaaaaaaa.mp4"]),
        ("aaaaaaaaaaa_000001_000011.mp4", ["aaaaaaaaaaa_000001_000011.jpg"]),
        ("arm_wrestling/aaaaaaaaaaa.mp4", ["a/aaaaaaaaaaa.mp4", "b/aaaaaaaaaaa.mp4"]),
        ("a/aaaaaaaaaaa.mp4", ["b/aaaaaaaaaaa.mp4"]),
        ("b/aaaaaaaaaaa.jpg", ["a/aaaaaaaaaaa.mp4"]),
    ],
)
def test_of_several_files_one_is_taken(best: str, others: list[str]) -> None:
    sizes = {"a/aaaaaaaaaaa.mp4": 0} if best.endswith("jpg") else {}
    for names in ([best, *others], [*reversed(others), best]):
        assert matched(*names, sizes=sizes) == (
            {best: "aaaaaaaaaaa_000001_000011"},
            dict.fromkeys(others, "duplicate_file"),
        )


PIECES = st.sampled_from(
    ["aaaaaaaaaaa", "ccccccccccc", "ddddddddddd_000000_000010", "ccccccccccc_0_10", "x", "q" * 11]
)
FOLDERS = st.sampled_from(["", "luge/", "yoga/", "a/b/", "arm_wrestling/"])
NAMES = st.builds(lambda f, p, s: f + p + s, FOLDERS, PIECES, st.sampled_from([".mp4", ".jpg", ""]))


@settings(deadline=None)
@given(st.lists(NAMES, unique=True, max_size=12), st.randoms(use_true_random=False))
def test_every_file_is_matched_once_or_refused_once(names: list[str], random) -> None:
    taken, refused = matched(*names)
    assert taken.keys() | refused.keys() == set(names) and not taken.keys() & refused.keys()
    assert len(set(taken.values())) == len(taken)
    shuffled = list(names)
    random.shuffle(shuffled)
    assert matched(*shuffled) == (taken, refused)


# ---------------------------------------------------------------- status


def outcome(value: dict[str, Any] | None = None, rule: str | None = None) -> Outcome:
    return Outcome(0, value, rule, None if rule is None else f"says {rule}")


def decord_saw(frames: int, repeated: bool = False) -> Outcome:
    return outcome({"frames": frames, "fps": 30.0, "repeated": repeated, "printed": []})


def opencv_saw(announced: int, counted: int | None = None, fps: float | None = 30.0) -> Outcome:
    size = {"width": 64, "height": 48, "codec": "h264", "rotation": 0}
    return outcome({"announced": announced, "counted": counted, "fps": fps, **size})


NONE = outcome(rule="open_error")
HUNG, DIED = outcome(rule="native_timeout"), outcome(rule="native_crash")


@pytest.mark.parametrize(
    ("decord", "opencv", "container", "status", "decoder", "frames"),
    [
        (decord_saw(300), opencv_saw(300), "iso", "ok", "decord", 300),
        (decord_saw(300, True), opencv_saw(300, 300), "iso", "ok", "decord", 300),
        (decord_saw(49, True), opencv_saw(49, 48), "avi", "frame_count_lie", "opencv", 48),
        (decord_saw(300), opencv_saw(290, 300), "iso", "frame_count_lie", "decord", 300),
        (decord_saw(310), opencv_saw(311, 310), "matroska", "ok", "decord", 310),
        (decord_saw(150), opencv_saw(311, 150), "matroska", "truncated", "decord", 150),
        (outcome(rule="decode_error"), opencv_saw(50, 28), "iso", "truncated", "opencv", 28),
        (outcome(rule="decode_error"), opencv_saw(300, 300), "iso", "ok", "opencv", 300),
        (decord_saw(300), opencv_saw(300, 285), "iso", "frame_count_lie", "opencv", 285),
        (decord_saw(300), opencv_saw(300, 284), "iso", "truncated", "opencv", 284),
        (decord_saw(20), opencv_saw(20), "iso", "short", "decord", 20),
        (decord_saw(7), opencv_saw(7, None, 5.0), "iso", "short", "decord", 7),
        (decord_saw(300), NONE, "iso", "ok", "decord", 300),
        (HUNG, opencv_saw(300, 300), "iso", "ok", "opencv", 300),
        (decord_saw(300), HUNG, "iso", "ok", "decord", 300),
        (HUNG, HUNG, "iso", "timeout", None, 0),
        (HUNG, NONE, "iso", "timeout", None, 0),
        (DIED, HUNG, "iso", "timeout", None, 0),
        (DIED, NONE, "iso", "crash", None, 0),
        (outcome(rule="native_memory"), DIED, None, "crash", None, 0),
        (outcome(rule="no_video_stream"), NONE, "iso", "audio_only", None, 0),
        (NONE, NONE, "iso", "truncated", None, 0),
        (NONE, opencv_saw(50, 0), "avi", "truncated", None, 0),
        (NONE, NONE, None, "not_video", None, 0),
    ],
)
def test_judgement(decord, opencv, container, status, decoder, frames) -> None:
    facts = judge(decord, opencv, container, SETTINGS)
    assert (facts["status"], facts["decoder"], facts["frames"]) == (status, decoder, frames)
    for said in (decord, opencv):
        assert said.message is None or said.message in facts["message"]
    assert (facts["header_frames"] is None) == (opencv.value is None)


def test_thresholds_are_settings() -> None:
    lie = decord_saw(100), opencv_saw(100, 90)
    assert judge(*lie, "iso", SETTINGS)["status"] == "truncated"
    assert judge(*lie, "iso", VideoSettings(lie_share=0.1))["status"] == "frame_count_lie"
    assert judge(*lie, "iso", VideoSettings(lie_frames=10))["status"] == "frame_count_lie"
    assert judge(*lie, "iso", VideoSettings(lie_frames=10, min_seconds=3.1))["status"] == "short"
    assert judge(*lie, "iso", VideoSettings(lie_frames=10, min_frames=91))["status"] == "short"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with one video of each kind that can be made without real data."""
    root = tmp_path_factory.mktemp("made")
    write_video(root / "good.mp4", counting_frames(45))
    write_video(root / "good.avi", counting_frames(45), codec="MJPG")
    write_video(root / "short.mp4", counting_frames(3))
    whole = (root / "good.avi").read_bytes()
    (root / "half.avi").write_bytes(whole[: len(whole) // 2])
    (root / "cut.mp4").write_bytes((root / "good.mp4").read_bytes()[:600])
    (root / "zero.mp4").touch()
    (root / "page.mp4").write_bytes(b"<!DOCTYPE html>\n" * 40)
    (root / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:3,\n{root}/good.mp4\n#EXT-X-ENDLIST\n")
    (root / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(9000))
    with wave.open(str(root / "sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    return root


def found_in(root: Path, settings: VideoSettings = SETTINGS) -> dict[str, dict[str, Any]]:
    found = validate({path.name: path for path in sorted(root.iterdir())}, settings)
    assert not any(isinstance(facts, RecordError) for facts in found.values())
    return found


def test_made_files_get_their_status(made: Path) -> None:
    found = found_in(made, VideoSettings(workers=2))
    assert {name: facts["status"] for name, facts in found.items()} == {
        "good.mp4": "ok",
        "good.avi": "ok",
        "short.mp4": "short",
        "half.avi": "truncated",
        "cut.mp4": "truncated",
        "zero.mp4": "zero_byte",
        "page.mp4": "not_video",
        "list.mp4": "not_video",
        "noise.mp4": "not_video",
        "sound.mp4": "audio_only",
    }
    assert found["half.avi"]["header_frames"] == 45 and 5 < found["half.avi"]["frames"] < 30
    assert "decord" not in sys.modules
    assert found == found_in(made), "messages and facts do not depend on the run"


def test_a_vanished_file_is_a_bad_record(tmp_path: Path) -> None:
    found = validate({"gone": tmp_path / "gone.mp4"}, SETTINGS)
    assert isinstance(found["gone"], RecordError) and found["gone"].rule == "unreadable"


def test_a_hang_and_a_crash_end(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"good": made / "good.mp4"}
    monkeypatch.setattr(videos, "DECORD", "tests.kowl.broken_decoders:hang")
    facts = validate(paths, VideoSettings(seconds_per_video=1.5))["good"]
    assert facts["status"] == "ok" and facts["decoder"] == "opencv" and facts["frames"] == 45
    assert "gave no result within 1.5 s" in facts["message"]
    monkeypatch.setattr(videos, "DECORD", "tests.kowl.broken_decoders:die")
    monkeypatch.setattr(videos, "OPENCV", "tests.kowl.broken_decoders:hang")
    facts = validate(paths, VideoSettings(seconds_per_video=0.3))["good"]
    assert facts["status"] == "timeout" and "died of signal 6" in facts["message"]


def real_cases() -> dict[str, dict[str, str]]:
    with (shared_path("videos") / "manifest.csv").open() as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def check_real(cases: dict[str, dict[str, str]]) -> None:
    root = shared_path("videos")
    found = validate({name: root / name for name in cases}, VideoSettings(workers=2))
    for name, case in cases.items():
        facts = found[name]
        assert facts["frames"] == int(case["frames_decoded_opencv"]), name
        if case["error"] != "open: UnicodeDecodeError":
            assert facts["header_frames"] == int(case["frames_in_header"]), name
            assert facts["fps"] == pytest.approx(float(case["avg_fps"]), abs=0.001), name
            assert (facts["width"], facts["height"]) == (int(case["width"]), int(case["height"]))
            assert facts["codec"] == {"h264": "h264", "mpeg4": "FMP4"}[case["codec"]]
        turned = name.removesuffix(".mov").rpartition("video_")[2]
        assert facts["rotation"] == (int(turned) if turned.isdigit() else 0), name
        expected = "ok"
        if name.endswith("corrupted.mp4"):
            expected = "truncated"
        elif name.startswith("hmdb51"):
            expected = "frame_count_lie"
        elif facts["frames"] < 5:
            expected = "short"
        assert facts["status"] == expected, name
        assert facts["decoder"] == ("decord" if expected in ("ok", "short") else "opencv"), name


def test_real_videos() -> None:
    """All but the large ones."""
    cases = {n: c for n, c in real_cases().items() if int(c["bytes"]) < 700_000}
    assert len(cases) > 30
    check_real(cases)


@pytest.mark.slow
def test_all_46_real_videos() -> None:
    assert len(real_cases()) == 46
    check_real(real_cases())


def test_sound_of_a_real_clip(tmp_path: Path) -> None:
    """The picture track is hidden by renaming its box."""
    data = bytearray(
        (shared_path("videos") / "kinetics400/using segway/SOX5yA1l24A.mp4").read_bytes()
    )
    track = data.index(b"trak", data.index(b"moov"))
    assert data.index(b"vide", track) < data.index(b"soun", track)
    data[track : track + 4] = b"free"
    path = tmp_path / "sound.mp4"
    path.write_bytes(data)
    assert validate({"sound": path}, SETTINGS)["sound"]["status"] == "audio_only"


# ---------------------------------------------------------------- stage


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> tuple[Path, pl.DataFrame, pl.DataFrame]:
    """Sample Kinetics with its bad videos and two good ones; clips and list rows."""
    root = tmp_path_factory.mktemp("sample")
    write_kowl(root, clips_per_class=5, videos_per_class=0)
    releases = [
        Release(
            name=name,
            order=order,
            files={s: (f"{name}_{s}.csv.gz",) for s in ("train", "validate", "test")},
        )
        for order, name in enumerate(RELEASES)
    ]
    rows = pl.concat(
        read_release(release, lambda file: (root / "lists" / file).read_bytes()).rows
        for release in releases
    )
    return root, unify(rows, RELEASES).clips, rows


def build(lake: Path, root: Path, clips: pl.DataFrame, listings: pl.DataFrame, **options) -> Build:
    with Build("kowl", lake) as run:
        source = run.source(root)
        found = match_source(source, clips, listings)
        run.run(validate_videos, plan_video_shards(source, found), VideoSettings(**options))
        others = plan_unlisted_shards(source, found)
        run.run(validate_unlisted, others, VideoSettings(**options))
    return run


def video_shards(source, clips: pl.DataFrame) -> list:
    return plan_video_shards(source, match_source(source, clips))


def rows_of(run: Build) -> pl.DataFrame:
    return pl.concat(part.read() for part in run.table("videos")).sort("sample_id")


def test_sample_clips_all_get_a_row(sample, tmp_path: Path, monkeypatch) -> None:
    root, clips, listings = sample
    monkeypatch.setattr(videos, "CLIPS_PER_SHARD", 130)
    (root / "videos" / "README.txt").write_text("not a clip")
    run = build(tmp_path / "lake", root / "videos", clips, listings)
    rows = rows_of(run)
    assert rows["sample_id"].to_list() == clips["sample_id"].sort().to_list()
    assert len(run.table("videos")) - 1 == 4, "a power of two, and the shard of files left over"
    status = dict(rows.select("sample_id", "status").iter_rows())
    bad = {Path(path).stem: wrong for path, wrong in bad_kowl_records() if "videos/" in path}
    expected = {
        "zero bytes": "zero_byte",
        "cut off: no moov box": "truncated",
        "a web page saved as mp4": "not_video",
        "listed, no file": "missing",
        "2 frames: too short": "short",
        "header says 22 frames, fewer decode": "truncated",
    }
    assert {expected[bad[uid]] for uid in bad} < set(STATUSES)
    assert {uid: status[uid] for uid in bad} == {uid: expected[bad[uid]] for uid in bad}
    present = rows.filter(pl.col("file").is_not_null())
    assert present.filter(pl.col("sha256").is_null() | pl.col("bytes").is_null()).is_empty()
    assert set(rows.filter(pl.col("file").is_null())["status"]) == {"missing"}
    quarantine = pl.concat(part.read() for part in run.table("quarantine"))
    assert quarantine.select("record", "rule").rows() == [("README.txt", "unrecognised_name")]

    other = build(tmp_path / "lake", root / "videos", clips, listings, workers=2)
    assert not any(piece.made_now for piece in other.pieces), "workers change no key"
    (root / "videos" / "README.txt").unlink()


def test_videos_of_no_clip_are_decoded_too(sample, tmp_path: Path) -> None:
    _, clips, listings = sample
    root = tmp_path / "videos"
    for name in ("Diving/v_Diving_g01.avi", "arm_wrestling/zzzzzzzzzzz_000001_000011.mp4"):
        (root / name).parent.mkdir(parents=True)
        write_video(root / name, counting_frames(40), codec="MJPG" if "avi" in name else "mp4v")
    (root / "odd").mkdir()
    write_video(root / "odd" / "labelled.mp4", counting_frames(40))
    (root / "train").mkdir()
    (root / "train" / "empty clip.mp4").write_bytes(b"")
    (root / "notes.txt").write_text("not a video")
    (root / "labels.csv").write_text("file,label\nodd/labelled.mp4,Diving\n")
    run = build(tmp_path / "lake", root, clips, listings)
    rows = pl.concat(part.read() for part in run.table("unlisted_videos"))
    assert rows.select("file", "label", "reason", "status").rows() == [
        ("Diving/v_Diving_g01.avi", "Diving", "unrecognised_name", "ok"),
        ("arm_wrestling/zzzzzzzzzzz_000001_000011.mp4", "arm wrestling", "unlisted_clip", "ok"),
        ("odd/labelled.mp4", "Diving", "unrecognised_name", "ok"),
        ("train/empty clip.mp4", None, "unrecognised_name", "zero_byte"),
    ]
    quarantine = pl.concat(part.read() for part in run.table("quarantine"))
    assert quarantine["record"].to_list() == ["notes.txt"]
    write_video(root / "odd" / "another.mp4", counting_frames(40))
    again = build(tmp_path / "lake", root, clips, listings)
    found = pl.concat(part.read() for part in again.table("unlisted_videos"))
    assert found.filter(pl.col("file") != "odd/another.mp4").equals(rows)
    for path in sorted(root.rglob("*.[am][vp][i4]")):
        path.unlink()
    gone = build(tmp_path / "lake", root, clips, listings)
    assert not sum(part.rows for part in gone.table("unlisted_videos"))


def test_a_table_beside_the_videos_without_labels_is_a_stray_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text("name,size\nx,1\n")
    found = match_source(open_raw(tmp_path), CLIPS)
    assert found.refused["record"].to_list() == ["manifest.csv"] and found.unlisted.is_empty()


def test_all_real_videos_get_a_status() -> None:
    source = open_raw(shared_path("videos"))
    found = match_source(source, CLIPS)
    (shard,) = plan_unlisted_shards(source, found)
    produced = validate_unlisted(shard, SETTINGS)
    assert not produced.rejects
    rows = UNLISTED_VIDEOS.check(produced.tables["unlisted_videos"])[0]
    assert rows.height == 46 and found.refused["record"].to_list() == ["SOURCES.md"]
    status = {Path(name).name: said for name, said in rows.select("file", "status").iter_rows()}
    assert status["corrupted.mp4"] == "truncated"
    assert {status[f"video_{turn}.mov"] for turn in (0, 90, 180, 270)} == {"short"}
    assert status["unordered.mov"] == "short"
    lies = {name for name, said in status.items() if said == "frame_count_lie"}
    assert len(lies) == 4 and all(name.endswith(".avi") for name in lies)
    assert sum(said == "ok" for said in status.values()) == 46 - 1 - 5 - 4
    labels = dict(rows.select("file", "label").iter_rows())
    assert labels["other/arm_wrestling_demo.mp4"] == "arm wrestling"
    assert labels["other/mmaction2_test.mp4"] is None


def test_a_new_file_remakes_its_shard_only(sample, tmp_path: Path, monkeypatch) -> None:
    _, clips, listings = sample
    monkeypatch.setattr(videos, "CLIPS_PER_SHARD", 100)
    root = tmp_path / "videos"
    root.mkdir()
    first, second = clips["sample_id"].head(2)
    write_video(root / f"{first}.mp4", counting_frames(20))
    build(tmp_path / "lake", root, clips, listings)
    write_video(root / f"{second}.avi", counting_frames(20), codec="MJPG")
    run = build(tmp_path / "lake", root, clips, listings)
    assert sum(piece.made_now for piece in run.pieces) == 1
    good = rows_of(run).filter(pl.col("status") == "ok")
    assert good["sample_id"].to_list() == sorted([first, second])


def test_in_a_remade_shard_only_new_and_bad_files_are_decoded(
    sample, tmp_path: Path, monkeypatch
) -> None:
    _, clips, listings = sample
    root = tmp_path / "videos"
    root.mkdir()
    good, changed, bad, new = (f"{name}.mp4" for name in clips["sample_id"].head(4))
    for name in (good, changed):
        write_video(root / name, counting_frames(20))
    (root / bad).write_bytes(b"")
    build(tmp_path / "lake", root, clips, listings)
    write_video(root / changed, counting_frames(25))
    write_video(root / new, counting_frames(20))
    decoded: list[str] = []

    def watched(found, settings, keep):
        decoded.extend(found)
        return validate(found, settings, keep)

    monkeypatch.setattr(videos, "validate", watched)
    run = build(tmp_path / "lake", root, clips, listings)
    assert sorted(decoded) == sorted([changed, bad, new])
    decoded.clear()
    fresh = build(tmp_path / "fresh", root, clips, listings)
    assert len(decoded) == 4
    assert run.versions["videos"].manifest.parts == fresh.versions["videos"].manifest.parts
    decoded.clear()
    build(tmp_path / "lake", root, clips, listings, min_frames=9)
    assert len(decoded) == 4, "with other settings nothing is known"


def test_a_killed_shard_decodes_only_what_is_left(sample, tmp_path: Path, monkeypatch) -> None:
    _, clips, listings = sample
    root = tmp_path / "videos"
    root.mkdir()
    for name in clips["sample_id"].head(3):
        write_video(root / f"{name}.mp4", counting_frames(20))
    (root / f"{clips['sample_id'][3]}.mp4").write_bytes(b"")
    whole = build(tmp_path / "whole", root, clips, listings)
    monkeypatch.setattr(videos, "FILES_IN_TURN", 1)
    monkeypatch.setattr(kept, "ROWS_KEPT", 1)
    decoded: list[str] = []

    def killed(found, settings, keep):
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.extend(found)
        return validate(found, settings, keep)

    with monkeypatch.context() as patch:
        patch.setattr(videos, "validate", killed)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "lake", root, clips, listings)
    first = decoded.copy()

    def watched(found, settings, keep):
        decoded.extend(found)
        return validate(found, settings, keep)

    monkeypatch.setattr(videos, "validate", watched)
    again = build(tmp_path / "lake", root, clips, listings)
    assert len(first) == 2 and len(decoded) == len(set(decoded)) == 4
    assert again.versions["videos"].manifest.parts == whole.versions["videos"].manifest.parts


def test_an_archive_gives_the_same_rows(made: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in made.iterdir())
    ids = {name: f"video{number:06d}" for number, name in enumerate(names)}
    clips = clips_of(*((clip, 0, 10, None) for clip in ids.values()))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, clip in ids.items():
        (folder / f"{clip}{Path(name).suffix}").write_bytes((made / name).read_bytes())
    with zipfile.ZipFile(tmp_path / "videos.zip", "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    sides = []
    for root in (folder, tmp_path / "videos.zip"):
        (shard,) = video_shards(open_raw(root), clips)
        produced = validate_videos(shard, SETTINGS)
        assert produced.records == len(names) and not produced.rejects
        sides.append(VIDEOS.check(produced.tables["videos"])[0])
    assert sides[0].height == len(names) and sides[0].equals(sides[1])
    (shard,) = video_shards(open_raw(tmp_path / "videos.zip"), clips)
    produced = validate_videos(shard, VideoSettings(max_archived_bytes=8999))
    assert ids["noise.mp4"] in {reject.record[:11] for reject in produced.rejects}
    assert produced.tables["videos"].height + len(produced.rejects) == produced.records


def test_links_and_strange_files_are_accounted_for(tmp_path: Path) -> None:
    clips = clips_of(("aaaaaaaaaaa", 1, 11, "luge"))
    (tmp_path / "aaaaaaaaaaa.mp4").symlink_to(tmp_path / "elsewhere.mp4")
    shards = video_shards(open_raw(tmp_path), clips)
    missing, rejected = (validate_videos(shard, SETTINGS) for shard in shards)
    assert missing.tables["videos"]["status"].to_list() == ["missing"]
    assert [reject.rule for reject in rejected.rejects] == ["unreadable"]


@pytest.mark.slow
def test_shards_of_a_full_kinetics_are_some_hundreds() -> None:
    numbers = np.arange(869_006)
    clips = pl.DataFrame({"youtube_id": numbers}).select(
        pl.col("youtube_id").cast(pl.String).str.zfill(11),
        pl.lit(0).alias("time_start"),
        pl.lit(10).alias("time_end"),
        pl.lit(None, pl.String).alias("label"),
    )
    clips = clips.with_columns((pl.col("youtube_id") + "_000000_000010").alias("sample_id"))

    class Source:
        root, skipped = "somewhere", ()

        def files(self) -> list[RawFile]:
            taken = numbers[: 3 * 200_000 : 3]
            return [RawFile(f"luge/{n:011d}_000000_000010.mp4", 9, "d") for n in taken]

    shards = video_shards(Source(), clips)
    sizes = [len(shard.about) for shard in shards]
    assert len(shards) == 512 and sum(sizes) == 869_006
    assert min(sizes) > 1400 and max(sizes) < 2000
    assert sum(len(shard.files) for shard in shards) == 200_000


def test_link_rot() -> None:
    listings = pl.DataFrame(
        [
            ("k400", "train", "luge", "aaaaaaaaaaa"),
            ("k400", "train", "luge", "bbbbbbbbbbb"),
            ("k400", "test", "yoga", "ccccccccccc"),
            ("k600", "train", "luge", "aaaaaaaaaaa"),
            ("k600", "train", "luge", "ddddddddddd"),
            ("k600", "train", "luge", "eeeeeeeeeee"),
            ("k600", "test", None, "fffffffffff"),
        ],
        schema=["release", "split", "label", "youtube_id"],
        orient="row",
    ).with_columns(time_start=pl.lit(0), time_end=pl.lit(10))
    status = {"a": "ok", "b": "missing", "c": "frame_count_lie", "d": "short", "e": "timeout"}
    found = pl.DataFrame(
        {
            "sample_id": [f"{letter * 11}_000000_000010" for letter in status],
            "status": list(status.values()),
        }
    )
    rows = link_rot(listings, found)
    assert rows.rows() == [
        ("k400", "test", "yoga", 1, 1, 0, 0, 0.0),
        ("k400", "train", "luge", 2, 1, 1, 0, 0.5),
        ("k600", "test", None, 1, 0, 1, 0, 1.0),
        ("k600", "train", "luge", 3, 1, 0, 2, pytest.approx(2 / 3)),
    ]
    by_release = link_rot(listings, found, by=["release"])
    assert by_release.select("release", "clips", "ok").rows() == [("k400", 3, 2), ("k600", 4, 1)]


# ---------------------------------------------------------------- frames


def test_frames_come_in_order_whatever_the_decoder(made: Path, tmp_path: Path) -> None:
    for source, name in (("good.avi", "good.avi"), ("good.avi", "copy.avi"), ("zero.mp4",) * 2):
        (tmp_path / name).write_bytes((made / source).read_bytes())
    rows = pl.DataFrame(
        {
            "sample_id": ["c", "a", "b"],
            "file": ["good.avi", "zero.mp4", "copy.avi"],
            "frames": [45, 9, 9],
            "fps": None,
            "decoder": ["opencv", "decord", "decord"],
        }
    )
    settings = SampleSettings(step=2, count=3, crops=2, short_side=48, crop=32)
    found = list(sample_videos(str(tmp_path), rows, settings))
    assert [sample for sample, _ in found] == ["c", "a", "b"]
    assert numbers_of(found[0][1]).tolist() == [[0, 2, 4], [40, 42, 44]]
    assert isinstance(found[1][1], RecordError) and found[1][1].rule == "decode_error"
    assert numbers_of(found[2][1]).tolist() == [[0, 2, 4], [4, 6, 8]]
    with pytest.raises(ValueError, match="nothing decodes of"):
        next(sample_videos(str(tmp_path), rows.with_columns(decoder=pl.lit(None)), settings))


def test_settings_refuse_a_crop_larger_than_the_picture() -> None:
    with pytest.raises(ValueError, match="larger than short_side"):
        SampleSettings(short_side=100, crop=101)
    assert set(USABLE) < set(STATUSES)
