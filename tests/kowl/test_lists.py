import csv
import gzip
import hashlib
from datetime import date

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.errors import SourceError
from tasks.kowl import lists
from tasks.kowl.lists import ROWS, SPLIT_SPELLINGS, Release, read_list, read_release
from tests.shared import shared_path

HEADER = "label,youtube_id,time_start,time_end,split"
GOOD = "javelin throw,--07WQ2iBlw,1,11,validate"


def read(text: str | bytes, **options) -> lists.ListRead:
    data = text.encode() if isinstance(text, str) else text
    return read_list(data, **{"name": "l.csv", "release": "r", **options})


def clips(rows: pl.DataFrame) -> list[tuple]:
    return rows.select("label", "youtube_id", "time_start", "time_end", "split").rows()


ONE = [("javelin throw", "--07WQ2iBlw", 1, 11, "validate")]


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}\n{GOOD}\n",
        f"{HEADER}\n{GOOD}",
        f"\ufeff{HEADER}\r\n{GOOD}\r\n\r\n",
        f'{HEADER},is_cc\n"javelin throw",--07WQ2iBlw,1,11,val,0\n',
        f"{HEADER},source\njavelin throw,--07WQ2iBlw,1,11,validate,a/b (c)\n",
        "split,time_end,time_start,youtube_id,label\nVAL, 11 ,1.0,--07WQ2iBlw, javelin throw\n",
        f"{HEADER},,\n{GOOD},,\n",
        f"line,number,count,{HEADER}\n1,2,3,{GOOD}\n",
    ],
    ids=["plain", "no_end", "windows", "quoted_is_cc", "source", "reordered", "unnamed", "ours"],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["csv", "gzip"])
def test_public_forms(text, pack):
    rows, rejects = read(pack(text.encode()))
    assert clips(rows) == ONE
    assert rows.schema == ROWS
    assert rejects.is_empty()


def test_quoted_fields_may_hold_commas_and_quotes():
    rows, rejects = read(f'{HEADER}\n"a, ""b""",--07WQ2iBlw,"2",12,test\n{GOOD}\n')
    assert rows["label"].to_list() == ['a, "b"', "javelin throw"]
    assert rejects.is_empty()


def test_list_without_labels_and_without_split():
    rows, rejects = read("youtube_id,time_start,time_end\n--07WQ2iBlw,1,11\n", split="test")
    assert clips(rows) == [(None, "--07WQ2iBlw", 1, 11, "test")]
    assert rejects.is_empty()
    with pytest.raises(SourceError, match="declare the split"):
        read("youtube_id,time_start,time_end\n--07WQ2iBlw,1,11\n")


def test_only_a_header():
    rows, rejects = read(HEADER)
    assert rows.is_empty()
    assert rows.schema == ROWS
    assert rejects.is_empty()


def test_snapshot_is_the_hash_of_the_given_bytes():
    data = gzip.compress(f"{HEADER}\n{GOOD}\n".encode(), mtime=0)
    rows, _ = read(data, snapshot_date=date(2021, 3, 1), release="kinetics900")
    assert rows.select("release", "snapshot", "snapshot_date").rows() == [
        ("kinetics900", hashlib.sha256(data).hexdigest(), date(2021, 3, 1))
    ]


MALFORMED = {
    "javelin throw,-07WQ2iBlwX,1,11": "field_count",
    "javelin throw,-07WQ2iBlwX,1,11,validate,7": "field_count",
    "data/kinetics400/rawframes_train/skateboarding/KZCcukx7y4I_000148_000158 306": "field_count",
    '"javelin throw,-07WQ2iBlwX,1,11,validate': "field_count",
    'jav"elin throw,-07WQ2iBlwX,1,11,validate': "field_count",
    HEADER: "repeated_header",
    "javelin throw,#NAME?,1,11,validate": "youtube_id_form",
    "javelin throw,,1,11,validate": "youtube_id_form",
    "javelin throw,-07WQ2iBlwX,one,11,validate": "time_form",
    "javelin throw,-07WQ2iBlwX,,11,validate": "time_form",
    "javelin throw,-07WQ2iBlwX,-1,9,validate": "time_form",
    "javelin throw,-07WQ2iBlwX,1.5,11,validate": "time_form",
    "javelin throw,-07WQ2iBlwX,1,99999999999999999999,validate": "time_form",
    "javelin throw,-07WQ2iBlwX,11,11,validate": "time_order",
    "javelin throw,-07WQ2iBlwX,1,11,hold-out": "split_allowed",
    "javelin throw,-07WQ2iBlwX,1,11,train": "split_declared",
    ",-07WQ2iBlwX,1,11,validate": "label_present",
    "jav\x00elin,-07WQ2iBlwX,1,11,validate": "label_form",
    f"{'a' * 201},-07WQ2iBlwX,1,11,validate": "label_form",
    f"{'a' * 2000},-07WQ2iBlwX,1,11,validate": "line_length",
    "other,--07WQ2iBlw,1,11,validate": "unique_key",
}


@pytest.mark.parametrize(("line", "rule"), MALFORMED.items())
def test_a_malformed_line_is_one_reject_and_the_rest_stays(line, rule):
    last = "archery,-0Oiyc0OmBQ,3,13,validate"
    rows, rejects = read(f"{HEADER}\n{GOOD}\n\n{line}\n{last}\n", split="validate")
    assert rows["youtube_id"].to_list() == ["--07WQ2iBlw", "-0Oiyc0OmBQ"]
    assert rejects.select("record", "rule").rows() == [("l.csv:4", rule)]
    assert len(rejects["message"][0]) < 300


def test_a_line_that_is_not_utf8():
    rows, rejects = read(f"{HEADER}\n{GOOD}\n".encode() + b"caf\xe9,-07WQ2iBlwX,1,11,validate\n")
    assert rows.height == 1
    assert rejects["rule"].to_list() == ["utf8"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<!DOCTYPE html>\n<html>404</html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        GOOD.encode(),
        gzip.compress(f"{HEADER}\n{GOOD}\n".encode(), mtime=0)[:-12],
        b"\x1f\x8bnot gzip",
        f"{HEADER}\n{GOOD}\n".encode("utf-16"),
        b"youtube_id,youtube_id,time_start,time_end,split\n",
        HEADER.encode() + b"," * 100,
    ],
)
def test_what_is_no_list_at_all(data):
    with pytest.raises(SourceError, match=r"list l\.csv"):
        read(data)


def test_a_gzip_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(lists, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(SourceError, match="over 1000 bytes"):
        read(gzip.compress(HEADER.encode() + b"\n" * 100_000))


FIELD = st.text(st.sampled_from('ab ,"-\t0é\x00'), max_size=12)
LINE = st.one_of(
    FIELD,
    st.builds(
        "{},{},{},{},{}".format,
        st.one_of(FIELD, st.just("archery")),
        st.text(st.sampled_from("aB_-9"), min_size=10, max_size=11),
        st.integers(-2, 30),
        st.integers(0, 40),
        st.sampled_from([*SPLIT_SPELLINGS, "holdout"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINE, max_size=12))
def test_no_line_vanishes_and_good_ones_agree_with_the_csv_module(lines):
    rows, rejects = read("\n".join([HEADER, *lines]))
    assert rows.height + rejects.height == sum(bool(line.strip()) for line in lines)
    rejected = {int(record.removeprefix("l.csv:")) for record in rejects["record"]}
    assert len(rejected) == rejects.height
    kept = [
        next(csv.reader([line]))
        for number, line in enumerate(lines, 2)
        if line.strip() and number not in rejected
    ]
    assert clips(rows) == [
        (label.strip() or None, youtube_id, int(start), int(end), SPLIT_SPELLINGS[split])
        for label, youtube_id, start, end, split in kept
    ]


def test_a_release_is_its_lists_and_a_clip_counts_once():
    files = {
        "a.csv": f"{HEADER}\narchery,-0Oiyc0OmBQ,3,13,train\n",
        "b.csv": f"{HEADER}\narchery,-0Oiyc0OmBQ,3,13,train\narchery,-0Oiyc0OmBQ,4,14,train\n",
        "v.csv": f"{HEADER}\n{GOOD}\nbad\narchery,-0Oiyc0OmBQ,4,14,val\n",
    }
    release = Release(
        name="new",
        order=3,
        files={"validate": ("v.csv",), "train": ("a.csv", "b.csv")},
        snapshot_date=date(2024, 1, 2),
    )
    rows, rejects = read_release(release, lambda name: files[name].encode())
    assert rows.select("split", "youtube_id", "time_start").rows() == [
        ("train", "-0Oiyc0OmBQ", 3),
        ("train", "-0Oiyc0OmBQ", 4),
        ("validate", "--07WQ2iBlw", 1),
    ]
    assert rejects.select("record", "rule").rows() == [
        ("v.csv:3", "field_count"),
        ("new/-0Oiyc0OmBQ/3/13", "unique_key_in_release"),
        ("new/-0Oiyc0OmBQ/4/14", "unique_key_in_release"),
    ]


def test_a_declaration_refuses_unknown_splits_and_keys():
    with pytest.raises(ValidationError):
        Release(name="new", order=1, files={"hold": ("a",)})
    with pytest.raises(ValidationError):
        Release(name="new", order=1, files={}, colour="red")


@pytest.mark.parametrize(
    ("file", "split", "count"),
    [
        ("kinetics700_2020_test", "test", 67_767),
        ("snapshots/kinetics400_val_2017", "validate", 19_906),
        ("snapshots/kinetics400_validate_b", "validate", 18_009),
        ("snapshots/kinetics600_val_2018", "validate", 30_000),
        ("snapshots/kinetics600_test_2018", "test", 58_818),
        ("snapshots/kinetics700_2019_val", "validate", 35_000),
        ("snapshots/kinetics700_2020_validate_2021-03", "validate", 34_038),
        ("snapshots/kinetics400_train_missing_downloads", "train", 11_915),
    ],
)
def test_real_forms(file, split, count):
    rows, rejects = read(shared_path(f"kinetics/{file}.csv.gz").read_bytes(), split=split)
    assert rows.height + rejects.height == count
    assert rejects.is_empty(), rejects.head(3).rows()
