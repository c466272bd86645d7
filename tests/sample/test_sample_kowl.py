"""The sample Kinetics lists drift like the real ones, and the videos decode with class signal."""

import gzip
import os
import re
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from tasks.sample.kowl import (
    BAD_VIDEOS,
    CLASSES,
    FRAMES,
    HEADER,
    RELABELLED,
    RELEASES,
    SHORT_FRAMES,
    TEST_ONLY,
    bad_kowl_records,
    write_kowl,
)
from tests.sample.test_sample_condda import tree_digest, tree_digest_of_child
from tests.shared import shared_path

SMALL = {"clips_per_class": 10, "videos_per_class": 0}
RENAMED = {
    "balloon blowing": "inflating balloons",
    "dying hair": "dyeing hair",
    "garbage collecting": "person collecting garbage",
    "making bed": "making the bed",
    "strumming guitar": "playing guitar",
    "tying tie": "tying necktie",
}
Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kowl")
    write_kowl(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_kowl(folder, **SMALL)
    return folder


def lines_of(root: Path, name: str) -> list[str]:
    return gzip.decompress((root / "lists" / f"{name}.csv.gz").read_bytes()).decode().splitlines()


def bad_lines() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record, _ in bad_kowl_records():
        if match := re.fullmatch(r"lists/(\w+)\.csv\.gz:(\d+)", record):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


@pytest.fixture(scope="module")
def releases(root: Path) -> list[dict[Key, tuple[str, str]]]:
    """Good rows of each release: key -> (label, split)."""
    tables = []
    for release in RELEASES:
        table: dict[Key, tuple[str, str]] = {}
        for split in ("train", "validate", "test"):
            name = f"{release}_{split}"
            for number, line in enumerate(lines_of(root, name)[1:], start=2):
                if number in bad_lines().get(name, ()):
                    continue
                fields = line.split(",")
                label = "" if name == "kinetics700_2020_test" else fields.pop(0)
                youtube_id, start, end, written = fields
                assert len(youtube_id) == 11 and written == split
                assert int(end) == int(start) + 10
                assert (youtube_id, start, end) not in table
                table[youtube_id, start, end] = (label, split)
        tables.append(table)
    return tables


def frames_of(path: Path) -> list[np.ndarray]:
    video = cv2.VideoCapture(str(path))
    frames = []
    while True:
        ok, frame = video.read()
        if not ok:
            return frames
        frames.append(frame)


def test_headers_and_sizes(root: Path, releases: list) -> None:
    for release in RELEASES:
        for split in ("train", "validate", "test"):
            header = lines_of(root, f"{release}_{split}")[0]
            unlabelled = (release, split) == ("kinetics700_2020", "test")
            assert header == ("youtube_id,time_start,time_end,split" if unlabelled else HEADER)
            data = (root / "lists" / f"{release}_{split}.csv.gz").read_bytes()
            assert data[4:8] == bytes(4), "gzip must not carry a time"
    assert 2000 < sum(map(len, releases)) < 3500


def test_headers_are_those_of_the_published_lists(root: Path) -> None:
    for path in sorted((root / "lists").iterdir()):
        published = path.name
        if published.startswith("kinetics400_train"):
            continue  # the list at hand is a derived one with a column more
        with gzip.open(shared_path(f"kinetics/{published}"), "rt") as file:
            assert file.readline().strip() == lines_of(root, path.name.split(".")[0])[0]


def test_class_names_are_kinetics_names() -> None:
    for release, number in enumerate((400, 600, 700)):
        names = shared_path(f"kinetics/label_map_k{number}.txt").read_text().splitlines()
        assert {row[release] for row in CLASSES} - {""} <= set(names)


def test_classes_come_go_and_change_their_name(releases: list) -> None:
    labels = [{label for label, _ in table.values()} - {""} for table in releases]
    assert len(labels[0]) == 24 and len(labels[1] - labels[0]) >= 10
    for old, new in RENAMED.items():
        assert old in labels[0] and old not in labels[1] | labels[2]
        assert new in labels[1] & labels[2] and new not in labels[0]
        both = [
            key for key in releases[0].keys() & releases[1].keys() if releases[0][key][0] == old
        ]
        assert {releases[1][key][0] for key in both} == {new}
    assert "passing american football (not in game)" in labels[1] - labels[2]
    assert "drinking beer" not in labels[1] | labels[2]
    assert "bull fighting" in labels[1] - labels[2]
    assert len(labels[2] - labels[1] - labels[0]) >= 6
    known = {label for label, split in releases[0].values() if split == "train"}
    assert known == labels[0]
    assert [split for label, split in releases[1].values() if label == TEST_ONLY] == ["test"]


def test_clips_move_vanish_appear_and_are_relabelled(releases: list) -> None:
    old, new = releases[1], releases[2]
    shared = old.keys() & new.keys()
    assert old.keys() - new.keys() and new.keys() - old.keys()
    assert releases[0].keys() - releases[1].keys()
    assert (releases[0].keys() & new.keys()) - old.keys(), "a clip may skip a release"
    moves = Counter((old[key][1], new[key][1]) for key in shared)
    assert moves["test", "train"] and moves["validate", "train"] and moves["test", "validate"]
    assert any(releases[0][k][1] != old[k][1] for k in releases[0].keys() & old.keys())
    changed = {(old[k][0], new[k][0]) for k in shared if new[k][0]}
    assert changed & set(RELABELLED.items())
    ids = Counter(key[0] for key in new)
    assert max(ids.values()) > 1, "one video gives several clips"
    assert max(Counter(key[0] for key in releases[0]).values()) == 1


def test_bad_lines_are_bad(root: Path) -> None:
    assert sum(map(len, bad_lines().values())) == 7
    for name, numbers in bad_lines().items():
        lines = lines_of(root, name)
        for number in numbers:
            fields = lines[number - 1].split(",")
            good = (
                len(fields) == 5
                and len(fields[1]) == 11
                and fields[2].isdigit()
                and int(fields[2]) < int(fields[3])
                and lines.index(lines[number - 1]) == number - 1
            )
            assert not good, lines[number - 1]


def test_videos_decode(root: Path) -> None:
    bad = {record for record, _ in bad_kowl_records()}
    files = sorted((root / "videos").glob("*/*.mp4"))
    assert 250 <= len(files) <= 400
    for path in files[::5]:
        if path.relative_to(root).as_posix() not in bad:
            frames = frames_of(path)
            assert len(frames) == FRAMES and frames[0].shape == (64, 64, 3)


def test_videos_are_of_listed_clips_and_cover_the_splits(root: Path, releases: list) -> None:
    covered = Counter()
    for path in sorted((root / "videos").glob("*/*.mp4")):
        match = re.fullmatch(r"(.{11})_(\d{6})_(\d{6})", path.stem)
        assert match
        key = (match[1], str(int(match[2])), str(int(match[3])))
        release = next(k for k, table in enumerate(releases) if key in table)
        label, split = releases[release][key]
        assert label in (path.parent.name, "")
        covered[release, split] += 1
    assert all(covered[release, split] >= 10 for release in (0, 1) for split in ("train", "test"))
    assert covered[0, "validate"] >= 20 and covered[2, "train"] >= 10


def test_bad_videos(root: Path, releases: list) -> None:
    records = {
        wrong: root / path for path, wrong in bad_kowl_records() if path.startswith("videos")
    }
    assert set(records) == set(BAD_VIDEOS.values()) and len(records) == 6
    for wrong, path in records.items():
        match = re.fullmatch(r"(.{11})_(\d{6})_(\d{6})", path.stem)
        assert match and (match[1], str(int(match[2])), str(int(match[3]))) in releases[0]
        if wrong == "listed, no file":
            assert not path.exists()
            continue
        data = path.read_bytes()
        announced = int(cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FRAME_COUNT))
        decoded = len(frames_of(path))
        if wrong == "zero bytes":
            assert data == b""
        elif wrong.startswith("a web page"):
            assert data.startswith(b"<!DOCTYPE html>") and decoded == 0
        elif wrong.startswith("cut off"):
            assert b"ftyp" in data[:12] and b"moov" not in data and decoded == 0
        elif wrong.endswith("too short"):
            assert announced == decoded == SHORT_FRAMES
        else:
            assert announced == FRAMES and 0 < decoded < FRAMES


def moving_part(frames: list[np.ndarray]) -> np.ndarray:
    """Where and of which colour the moving thing is: a few numbers a video."""
    stack = np.stack(frames).astype(float)
    differs = np.abs(stack - np.median(stack, axis=0)).sum(axis=3)
    weight = np.maximum(differs - 60, 0) + 1e-6
    row, column = np.mgrid[:64, :64] / 64
    total = weight.sum(axis=(1, 2))
    x, y = (weight * column).sum(axis=(1, 2)) / total, (weight * row).sum(axis=(1, 2)) / total
    colour = (weight[..., None] * stack).sum(axis=(0, 1, 2)) / weight.sum()
    hue = cv2.cvtColor(np.uint8([[colour]]), cv2.COLOR_BGR2HSV)[0, 0, 0] * np.pi / 90
    area = np.log(total.mean())
    spread = [x.std(), y.std(), np.abs(np.diff(x)).mean(), np.abs(np.diff(y)).mean()]
    return np.array([np.cos(hue), np.sin(hue), 0.3 * area, *(6 * np.array(spread))])


def test_videos_of_a_class_vary_and_are_near_each_other(root: Path) -> None:
    bad = {record for record, _ in bad_kowl_records()}
    files = sorted((root / "videos").glob("*/*.mp4"))
    files = [p for p in files if p.relative_to(root).as_posix() not in bad]
    concept = {name: number for number, row in enumerate(CLASSES) for name in row if name}
    truth = np.array([concept[path.parent.name] for path in files])
    features = np.array([moving_part(frames_of(path)) for path in files])
    distance = np.linalg.norm(features[:, None] - features, axis=2)
    np.fill_diagonal(distance, np.inf)
    assert distance.min() > 1e-4
    share = (truth[distance.argmin(axis=1)] == truth).mean()
    assert share > 0.4, f"chance is {1 / len(CLASSES):.3f}"


def test_without_bad_records_lists_and_videos_are_whole(tmp_path: Path) -> None:
    write_kowl(tmp_path, bad_records=False, **SMALL)
    for path in sorted((tmp_path / "lists").iterdir()):
        lines = lines_of(tmp_path, path.name.split(".")[0])
        assert len({line.count(",") for line in lines}) == 1 and len(set(lines)) == len(lines)
    for record, _ in bad_kowl_records():
        if record.startswith("videos"):
            assert len(frames_of(tmp_path / record)) == FRAMES


def test_same_bytes_in_another_process(root: Path, tmp_path: Path) -> None:
    call = "write_kowl(ROOT, videos_per_class=1)"
    child = tree_digest_of_child(call, "tasks.sample.kowl", tmp_path)
    mine = tree_digest(root)
    assert len(child) > 50
    assert child.items() <= mine.items()


def test_a_clip_does_not_depend_on_how_many_there_are(root: Path, small: Path) -> None:
    few = set(lines_of(small, "kinetics400_train"))
    assert len(few) > 100 and few <= set(lines_of(root, "kinetics400_train"))
    mine, all_of_them = tree_digest(small), tree_digest(root)
    videos = [path for path in mine if path.startswith("videos")]
    assert videos and all(mine[path] == all_of_them[path] for path in videos)


def test_second_run_touches_nothing(small: Path) -> None:
    files = [path for path in small.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, ns=(7, 7))
    write_kowl(small, **SMALL)
    assert {path.stat().st_mtime_ns for path in files} == {7}


def test_another_seed_gives_other_clips() -> None:
    videos = [{r for r, _ in bad_kowl_records(seed) if r.startswith("videos")} for seed in (0, 1)]
    assert not videos[0] & videos[1]
