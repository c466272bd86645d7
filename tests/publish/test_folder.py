"""A publication is whole, says where it came from, is never a mixture, and names no machine."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import polars as pl
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flows.cli import main
from schemas.errors import ConfigError, LakeError
from storage.tables import Contents, current_version, current_versions
from storage.tables import publish as publish_tables
from storage.upkeep import read_build_record
from tasks.publish.card import size_category
from tasks.publish.folder import publish
from tasks.publish.record import without_places
from tasks.publish.verify import data_key, differences, read_sums
from tests.publish.lakes import KINDS, kinds_rows, put_table
from tests.toy import build_toy, write_raw

DAY = "2026-11-16"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("secret_place")
    write_raw(root / "raw", files=3, lines=8)
    build_toy(root / "lake", root / "raw")
    return root


@pytest.fixture
def lake(made, tmp_path):
    shutil.copytree(made / "lake", tmp_path / "lake", symlinks=True)
    return tmp_path / "lake"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_folder_holds_the_lakes_bytes_and_verifies(lake, tmp_path):
    done = publish(lake, "toy", tmp_path / "out", date=DAY)
    out = tmp_path / "out"
    names = {"README.md", "croissant.json", "manifest.json", "verify.py", "SHA256SUMS", "data"}
    assert {path.name for path in out.iterdir()} == names
    for version in current_versions(lake, "toy"):
        for file in version.files:
            there = out / "data" / version.manifest.table / file.name
            assert there.read_bytes() == file.read_bytes()
    summed = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, text=True
    )
    assert summed.returncode == 0, summed.stdout
    assert summed.stdout.count(": OK") == len(contents(out)) - 1
    derived = "grep ' data/' SHA256SUMS | sha256sum | cut -c 1-32"
    key = subprocess.run(derived, shell=True, cwd=out, capture_output=True, text=True).stdout
    assert done.written and key.strip() == done.publication.key
    assert differences(str(out)) == []


def test_manifest_says_where_the_tables_came_from(lake, made, tmp_path):
    publish(lake, "toy", tmp_path / "out", date=DAY, version="1.2.0", licence="CC-BY-4.0")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    record = read_build_record(lake, "toy")
    assert manifest["sources"][0] | {"terms": ""} == {
        "name": "raw",
        "files": 3,
        "digest": record.sources[0].digest,
        "terms": "",
    }
    assert "check the terms" in manifest["sources"][0]["terms"]
    stages = {stage["stage"]: stage for stage in manifest["stages"]}
    assert stages["read_lines"]["pieces"] == 3 and stages["read_lines"]["version"] == 1
    assert stages["read_lines"]["settings"] == [{"scale": 1.0}]
    assert (manifest["version"], manifest["licence"], manifest["date"]) == (
        "1.2.0",
        "CC-BY-4.0",
        DAY,
    )
    tables = {table["name"]: table for table in manifest["tables"]}
    readings = current_version(lake, "toy", "readings").manifest
    assert tables["readings"]["rows"] == readings.rows == 21
    assert tables["readings"]["lake_key"] == readings.key
    assert tables["readings"]["sort_key"] == ["file", "line"]
    assert tables["totals"]["stages"] == ["add_up"]


def test_card_has_a_configuration_for_each_table_and_describes_columns(lake, tmp_path):
    publish(lake, "toy", tmp_path / "out", date=DAY, licence="cc-by-4.0")
    _, matter, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(matter)
    assert [one["config_name"] for one in head["configs"]] == [
        "files",
        "quarantine",
        "readings",
        "totals",
    ]
    assert head["configs"][2]["data_files"] == [
        {"split": "train", "path": "data/readings/*.parquet"}
    ]
    assert head["license"] == "cc-by-4.0" and head["size_categories"] == ["n<1K"]
    assert "| `value` | double | metre |  | Value read" in text
    assert "check them before you use or pass on the tables" in text


@pytest.mark.parametrize(
    ("given_text", "fields"),
    [
        (None, {"license": "unknown"}),
        ("CC0-1.0", {"license": "cc0-1.0"}),
        ("ask Ada", {"license": "other", "license_name": "ask Ada"}),
        (
            "https://example.org/terms",
            {
                "license": "other",
                "license_name": "other",
                "license_link": "https://example.org/terms",
            },
        ),
    ],
    ids=["none", "known", "text", "link"],
)
def test_licence_in_the_card_is_what_was_given(made, tmp_path, given_text, fields):
    publish(made / "lake", "toy", tmp_path / "out", date=DAY, licence=given_text)
    head = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert {key: value for key, value in head.items() if key.startswith("license")} == fields


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (9999, "1K<n<10K"),
        (10**6, "1M<n<10M"),
        (10**12, "n>1T"),
    ],
)
def test_size_category(rows, name):
    assert size_category(rows) == name


def test_publishing_again_changes_nothing(lake, tmp_path):
    publish(lake, "toy", tmp_path / "out", date=DAY, version="1", licence="MIT")
    before, inode = contents(tmp_path / "out"), (tmp_path / "out").stat().st_ino
    for named in ({}, {"version": "1"}, {"version": "1", "licence": "MIT", "date": "2030-01-01"}):
        assert not publish(lake, "toy", tmp_path / "out", **named).written
    assert contents(tmp_path / "out") == before
    assert (tmp_path / "out").stat().st_ino == inode


def test_same_tables_elsewhere_give_the_same_folder(made, tmp_path):
    write_raw(tmp_path / "another" / "raw", files=3, lines=8)
    build_toy(tmp_path / "lake2", tmp_path / "another" / "raw", reverse=True)
    publish(made / "lake", "toy", tmp_path / "one", date=DAY)
    publish(tmp_path / "lake2", "toy", tmp_path / "two", date=DAY)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_other_tables_need_another_version_and_replace_all(lake, tmp_path):
    publish(lake, "toy", tmp_path / "out", date=DAY, version="1")
    before = contents(tmp_path / "out")
    for version in (None, "1"):
        with pytest.raises(ConfigError, match=r"holds another publication .* other tables; name"):
            publish(lake, "toy", tmp_path / "out", tables=["totals"], version=version)
    with pytest.raises(ConfigError, match="other licence"):
        publish(lake, "toy", tmp_path / "out", licence="MIT")
    assert contents(tmp_path / "out") == before
    assert publish(lake, "toy", tmp_path / "out", tables=["totals"], version="2").written
    assert [path.name for path in (tmp_path / "out" / "data").iterdir()] == ["totals"]
    assert differences(str(tmp_path / "out")) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_replacing_is_one_step(lake, tmp_path, monkeypatch):
    from tasks.publish.folder import exchange

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("the file system of the tests cannot exchange two folders")
    publish(lake, "toy", tmp_path / "out", date=DAY)

    def refused(*_):
        raise AssertionError("the folder was away for a moment")

    monkeypatch.setattr(Path, "rename", refused)
    publish(lake, "toy", tmp_path / "out", tables=["totals"], version="2")
    assert [path.name for path in (tmp_path / "out" / "data").iterdir()] == ["totals"]


def test_replacing_works_where_folders_cannot_be_exchanged(lake, tmp_path, monkeypatch):
    import ctypes

    from tasks.publish import folder

    class NoExchange:
        @staticmethod
        def renameat2(*arguments):
            ctypes.set_errno(22)
            return -1

    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *_, **__: NoExchange)
    publish(lake, "toy", tmp_path / "out", date=DAY)
    publish(lake, "toy", tmp_path / "out", tables=["totals"], version="2")
    assert [path.name for path in (tmp_path / "out" / "data").iterdir()] == ["totals"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake", "out"]


def test_what_others_put_into_the_folder_is_never_removed(lake, tmp_path):
    out = tmp_path / "out"
    publish(lake, "toy", out, date=DAY)
    (out / ".git").mkdir()
    with pytest.raises(ConfigError, match=r"\.git, which replacing would remove"):
        publish(lake, "toy", out, tables=["totals"], version="2")
    (out / ".git").rmdir()
    (out / "notes.txt").write_text("mine")
    for named in ({}, {"tables": ["totals"], "version": "2"}):
        with pytest.raises(LakeError, match=r"no longer what was published: notes\.txt"):
            publish(lake, "toy", out, **named)
    assert (out / "notes.txt").read_text() == "mine"


def test_refuses_places_that_are_no_publication(lake, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="other things than a publication"):
        publish(lake, "toy", tmp_path / "full")
    with pytest.raises(ConfigError, match="is a file"):
        publish(lake, "toy", tmp_path / "file")
    with pytest.raises(ConfigError, match="inside the lake"):
        publish(lake, "toy", lake / "out")
    (tmp_path / "empty").mkdir()
    assert publish(lake, "toy", tmp_path / "empty").written


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"version": "1 0"}, "is not a version"),
        ({"version": "../x"}, "is not a version"),
        ({"licence": " "}, "one line of text"),
        ({"licence": "a\nb"}, "one line of text"),
        ({"date": "16.11.2026"}, "is not a day"),
        ({"tables": ["readings", "nope"]}, "no table nope of toy; there are: files, quarantine"),
    ],
)
def test_wrong_options_are_one_sentence(made, tmp_path, named, sentence):
    with pytest.raises(ConfigError, match=sentence):
        publish(made / "lake", "toy", tmp_path / "out", **named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("benchmark", ["nope", "*", "t?y"])
def test_unknown_benchmark_is_one_sentence(made, tmp_path, benchmark):
    with pytest.raises(LakeError, match="no tables of"):
        publish(made / "lake", benchmark, tmp_path / "out")


def test_damaged_table_is_not_published(lake, tmp_path):
    file = current_version(lake, "toy", "readings").files[1]
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(LakeError, match=f"{file.name} has sha256"):
        publish(lake, "toy", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake"]


def test_tables_of_two_builds_are_not_published_together(made, lake, tmp_path):
    old = current_version(lake, "toy", "totals").manifest.key
    write_raw(tmp_path / "raw", files=3, lines=9)
    build_toy(lake, tmp_path / "raw")
    now = {version.manifest.table: version.manifest.key for version in current_versions(lake)}
    publish_tables(lake, "toy", lambda _: Contents(kept=now | {"totals": old}))
    with pytest.raises(LakeError, match="toy/totals was made from parts that readings no longer"):
        publish(lake, "toy", tmp_path / "out")
    assert publish(lake, "toy", tmp_path / "out", tables=["readings", "files"]).written


def test_nothing_of_the_machine_is_published(made, tmp_path):
    publish(made / "lake", "toy", tmp_path / "out", date=DAY)
    for name, data in contents(tmp_path / "out").items():
        for place in (str(made), made.name, str(Path.home()), os.uname().nodename):
            assert place.encode() not in data, name


def test_table_with_a_folder_of_this_machine_is_refused(tmp_path):
    rows = kinds_rows().with_columns(
        pl.lit(f"cannot read {tmp_path}/lake/x: no such file").alias("nothing")
    )
    put_table(tmp_path / "lake", "odd", KINDS, rows)
    with pytest.raises(ConfigError, match=r"folders of this machine stand in kinds\.nothing"):
        publish(tmp_path / "lake", "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_lose_their_places_and_secrets():
    settings = {
        "source": "/home/ada/NovelCraft.zip",
        "near": "../data/lists/",
        "stores": {"cifar10": "s3://ada:key@bucket/cifar.tar?token=1"},
        "url": "http://127.0.0.1:3307",
        "token": "abc",
        "class_tokens": 4,
        "names": ["normal/normal_3", "~/x.yaml"],
        "none": None,
    }
    assert without_places(settings) == {
        "source": "NovelCraft.zip",
        "near": "lists",
        "stores": {"cifar10": "cifar.tar"},
        "url": "left out",
        "class_tokens": 4,
        "names": ["normal/normal_3", "x.yaml"],
        "none": None,
    }


@given(st.dictionaries(st.from_regex(r"data/[a-z]{1,3}/[a-z]{1,3}", fullmatch=True), st.text()))
def test_key_depends_on_data_files_alone_and_not_on_their_order(sums):
    shuffled = dict(reversed(list(sums.items())))
    assert data_key(shuffled | {"README.md": "x"}) == data_key(sums)
    assert data_key(sums | {"data/new/file": "0"}) != data_key(sums)


def test_command_line(lake, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["publish", "toy", out, "--lake", str(lake), "--tables", "totals, files"]) == 0
    assert "published: 2 tables, key" in capsys.readouterr().out
    assert main(["publish", "toy", out, "--lake", str(lake), "--tables", "files,totals"]) == 0
    assert "already published: 2 tables" in capsys.readouterr().out
    assert main(["publish", "toy", out, "--lake", str(lake)]) == 2
    assert "name a new folder, or another --version" in capsys.readouterr().err
    assert set(read_sums(out)) >= {"README.md", "croissant.json"}


def test_editing_a_publication_leaves_the_lake_alone(lake, tmp_path):
    publish(lake, "toy", tmp_path / "out", date=DAY)
    before = contents(lake)
    for path in (tmp_path / "out" / "data").rglob("*.parquet"):
        assert path.stat().st_nlink == 1
        path.write_bytes(b"edited")
    assert contents(lake) == before
