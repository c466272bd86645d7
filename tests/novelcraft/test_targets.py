"""The official label files, malformed ones, and the drift between two versions."""

from pathlib import Path

import polars as pl
import pytest

from schemas.errors import SourceError
from schemas.table import REJECTED
from tasks.novelcraft.targets import (
    PIXELS,
    TARGETS,
    drift_by_class,
    label_drift,
    read_targets,
)
from tests.shared import shared_path

OLD = "novelcraft/labels/history/targets_2022-04-13.csv"
NEW = "novelcraft/labels/targets.csv"


def write(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "targets.csv"
    path.write_text(end.join(("id,novel_percent", *lines, "")), newline="")
    return path


def test_official_file() -> None:
    targets, rejected = read_targets(shared_path(NEW))
    assert rejected.is_empty()
    assert dict(targets.schema) == TARGETS
    assert targets.height == 37241
    assert targets["frame_id"].is_sorted()
    fraction = targets["novel_fraction"]
    assert (fraction == 0).mean() == pytest.approx(0.630, abs=5e-4)
    assert (fraction >= 0.01).sum() == 8185
    assert fraction.is_between(0, 0.01, closed="none").sum() == 5598
    assert (targets["novel_pixels"] / PIXELS == fraction).all()
    pixels = dict(zip(targets["frame_id"], targets["novel_pixels"], strict=True))
    assert (pixels["fence/0/1"], pixels["fence/21/1"], pixels["item_tnt/2/1"]) == (0, 1573, 1126)


@pytest.mark.parametrize("name", [OLD, "novelcraft/labels/history/targets_2021-12-07.csv"])
def test_older_files_have_no_bad_row(name: str) -> None:
    path = shared_path(name)
    targets, rejected = read_targets(path)
    assert rejected.is_empty()
    assert targets.height == len(path.read_text().splitlines()) - 1


def test_bad_rows_are_rejected_one_by_one(tmp_path: Path) -> None:
    bad = {
        "fence/0/1,0.0,7": "two_fields",
        "fence/0/2": "two_fields",
        "": "two_fields",
        "fence/0,0.0": "frame_id_form",
        "fence/00/3,0.0": "frame_id_form",
        "../0/3,0.0": "frame_id_form",
        "fence/0/4,many": "fraction_number",
        "fence/0/5,": "fraction_number",
        "fence/0/6,NaN": "fraction_number",
        "fence/0/7,inf": "fraction_number",
        "fence/0/8,1.5": "fraction_range",
        "fence/0/9,-0.5": "fraction_range",
        "fence/0/10,0.01": "whole_pixels",
        "fence/9/0,0.25": "unique_frame_id",
    }
    good = ["fence/9/0,0.5", "fence/10/0,1.0"]
    targets, rejected = read_targets(write(tmp_path, *good, *bad))
    assert dict(rejected.schema) == REJECTED
    assert targets.rows() == [("fence/10/0", 1.0, 65536), ("fence/9/0", 0.5, 32768)]
    assert rejected["rule"].to_list() == list(bad.values())
    assert targets.height + rejected.height == len(good) + len(bad)
    assert rejected["record"].to_list()[:4] == ["fence/0/1", "fence/0/2", "line 6", "line 7"]
    assert rejected["message"][8] == (
        "line 12 of targets.csv reads 'fence/0/6,NaN', expected a finite number"
    )


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "fence/1/0,0.5", end="\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    targets, rejected = read_targets(path)
    assert rejected.is_empty()
    assert targets.rows() == [("fence/1/0", 0.5, 32768)]


def test_header_only_is_an_empty_table(tmp_path: Path) -> None:
    targets, rejected = read_targets(write(tmp_path))
    assert targets.is_empty()
    assert rejected.is_empty()
    assert dict(targets.schema) == TARGETS


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "nothing"), (b"id,percent\n", "'id,percent'"), (b"\xff\xfe\x00", "not UTF-8")],
)
def test_wrong_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "targets.csv"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_targets(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="missing"):
        read_targets(tmp_path / "targets.csv")


def test_published_drift() -> None:
    drift = label_drift(read_targets(shared_path(OLD))[0], read_targets(shared_path(NEW))[0])
    assert drift.height == 37241
    counts = dict(drift["change"].value_counts().iter_rows())
    assert counts == {"changed": 6784, "same": 37241 - 6784}
    assert drift["crossed"].sum() == 1334
    per_class = drift_by_class(drift)
    crossed = dict(zip(per_class["class"], per_class["crossed"], strict=True))
    assert per_class["frames"].sum() == 37241
    assert per_class["changed"].sum() == 6784
    assert [
        crossed[name] for name in ("fence", "tree_easy", "item_prismarine", "item_bedrock")
    ] == [
        528,
        155,
        74,
        41,
    ]


def test_every_kind_of_drift() -> None:
    def version(**fractions: float) -> pl.DataFrame:
        return pl.DataFrame(
            {
                "frame_id": [f"fence/0/{name[1:]}" for name in fractions],
                "novel_fraction": list(fractions.values()),
            }
        )

    old = version(f0=0.0, f1=0.005, f2=0.5, f3=0.5, f4=0.009)
    new = version(f5=0.5, f4=0.01, f3=0.25, f1=0.005, f2=0.001)
    drift = label_drift(old, new)
    assert drift.select("change", "crossed").rows() == [
        ("removed", False),
        ("same", False),
        ("changed", True),
        ("changed", False),
        ("changed", True),
        ("added", False),
    ]
    assert drift_by_class(drift).rows() == [("fence", 6, 3, 2, 1, 1)]
