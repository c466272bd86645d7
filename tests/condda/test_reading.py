"""Test files: layout, odd spellings, caching, ids that would be paths."""

import json
import os
from pathlib import Path

import polars as pl
import pytest

from schemas.errors import SourceError
from tasks.condda.session import round_bytes, round_count
from tasks.condda.test_files import TestLibrary
from tests.condda.small import DOMAIN, IDS, LABELS, TEST, write_test
from tests.shared import shared_path


def test_reads_the_published_fixtures() -> None:
    library = TestLibrary(shared_path("sailon/sail-on-client/data"))
    assert library.protocols() == ["CONDDA", "OND"]
    assert library.domains("OND") == ["activity_recognition", "image_classification"]
    assert library.test_ids("OND", "image_classification") == ["OND.1.1.1234"]
    test = library.load("OND.10.90001.2100554", "OND", "activity_recognition")
    assert len(test.ids) == 332 and round_count(test, 32) == 11
    assert test.truth["detection"].arg_max() == 105  # red light
    assert test.truth["novel"].arg_max() == 116
    assert test.ids[105] == test.metadata["red_light"]
    long = library.load("OND.0.10100.6438158", "OND", "activity_recognition")
    assert long.truth.width == 19 and len(long.ids) == 640
    image = library.load("OND.54011215.0000.1236", "OND", "image_classification")
    assert image.truth["classification"].max() == 413 and len(image.ids) == 2560
    small = library.load("OND.1.1.1234", "OND", "image_classification")
    assert small.truth["classification"].to_list() == [1, 2, 0, 2]


def test_reads_the_sample_data(tmp_path: Path) -> None:
    from tasks.sample.condda import write_condda

    write_condda(tmp_path, rows=200, bad_records=False)
    library = TestLibrary(tmp_path)
    for protocol in ("OND", "CONDDA"):
        for domain in ("activity_recognition", "image_classification"):
            for name in library.test_ids(protocol, domain):
                test = library.load(name, protocol, domain)
                changed = test.truth[test.domain.changed]
                assert len(test.ids) == 200
                assert test.ids[changed.arg_max() or 0] == test.metadata["red_light"]


def test_truth_has_declared_names_and_whole_numbers(tmp_path: Path) -> None:
    write_test(tmp_path)
    test = TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)
    assert test.ids == IDS and test.truth.columns == ["instance_id", "detection", "classification"]
    assert test.truth["classification"].to_list() == list(LABELS)
    assert test.truth.schema["detection"] == pl.Int64
    assert test.rows([IDS[3], "foreign"]) == [3, -1]


def test_without_a_list_every_test_is_offered_and_nothing_else(tmp_path: Path) -> None:
    write_test(tmp_path, "b")
    write_test(tmp_path, "a")
    folder = tmp_path / "OND" / DOMAIN
    (folder / "a.csv").write_text("x\n")
    library = TestLibrary(tmp_path)
    assert library.test_ids("OND", DOMAIN) == ["a", "b"]
    assert sorted(file.name for file in folder.glob("*ids*")) == []
    assert library.test_list("OND", DOMAIN) == b"a\nb\n"
    (folder / "test_ids.csv").write_text('"b",\n\n a \n')
    os.utime(folder, ns=(1, 1))
    assert library.test_ids("OND", DOMAIN) == ["b", "a"]


@pytest.mark.parametrize("listed", [b"b\na\n", b"b\r\na", b'\xef\xbb\xbf"b",\n a \n\n', b""])
def test_the_list_of_tests_is_given_byte_for_byte(tmp_path: Path, listed: bytes) -> None:
    write_test(tmp_path, "a")
    (tmp_path / "OND" / DOMAIN / "test_ids.csv").write_bytes(listed)
    library = TestLibrary(tmp_path)
    assert library.test_list("OND", DOMAIN) == listed
    assert library.test_ids("OND", DOMAIN) == (["b", "a"] if listed else [])


@pytest.mark.parametrize(
    "name",
    ["../OND.1.1.1", "", ".", "/etc/passwd", f"../{DOMAIN}/{TEST}", TEST + "\0", "x_single_df"],
    ids=["up", "empty", "dot", "absolute", "round about", "null", "suffix"],
)
def test_an_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    write_test(tmp_path)
    write_test(tmp_path, "x")
    library = TestLibrary(tmp_path)
    assert not library.has_truth(name, "OND", DOMAIN)
    assert not library.has_metadata(name, "OND", DOMAIN)
    assert not library.has_truth(TEST, "OND/../OND", DOMAIN)
    assert not library.has_truth(TEST, "OND", f"../OND/{DOMAIN}")
    with pytest.raises(SourceError):
        library.load(name, "OND", DOMAIN)


def test_read_once_and_again_when_changed(tmp_path: Path) -> None:
    write_test(tmp_path)
    library = TestLibrary(tmp_path)
    first = library.load(TEST, "OND", DOMAIN)
    assert library.load(TEST, "OND", DOMAIN) is first
    write_test(tmp_path, round_size=5)
    os.utime(tmp_path / "OND" / DOMAIN / f"{TEST}_metadata.json", ns=(1, 1))
    assert library.load(TEST, "OND", DOMAIN).metadata["round_size"] == 5
    write_test(tmp_path, "new")
    os.utime(tmp_path / "OND" / DOMAIN, ns=(2, 2))
    assert library.has_truth("new", "OND", DOMAIN)


def test_blank_ids_are_dropped(tmp_path: Path) -> None:
    truth = "id,detection,classification\na,0,1\n\n.,0,1\n\"',0,1\nb,1,-2\n"
    write_test(tmp_path, truth=truth)
    test = TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)
    assert test.ids == ("a", "b") and test.truth["classification"].to_list() == [1, -2]
    assert round_bytes(test, 0, 5) == b"a\nb\n"


def test_ids_are_served_as_written_and_compared_without_their_edges(tmp_path: Path) -> None:
    write_test(tmp_path, truth='id,detection,classification\n "a",0,1\nb,1,2\n')
    test = TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)
    assert round_bytes(test, 0, 5) == b' "a"\nb\n'
    assert test.names == ("a", "b") and test.rows(["a", ' "a"', "b ", "c"]) == [0, 0, 1, -1]


def test_quoted_text_keeps_commas_and_line_breaks(tmp_path: Path) -> None:
    truth = "file,text,novel,representation,detection,writer_id\n"
    truth += "a,|one, two\u2028\nthree|,0,x,0,1\nb,||,0,x,0,2\n"
    write_test(tmp_path, domain="transcripts", truth=truth)
    test = TestLibrary(tmp_path).load(TEST, "OND", "transcripts")
    assert test.truth["text"].to_list() == ["one, two\u2028\nthree", ""]
    assert test.truth["writer_id"].to_list() == [1, 2]


def test_nlt_is_utf_16_and_doubles_quotes(tmp_path: Path) -> None:
    head = "id,text,reported,real,sentiment,product,n,m,t\r\n"
    truth = head + "i0,|é || x, y|,1,2,pos,cup,0,1,t\r\n"
    write_test(tmp_path, domain="nlt", truth=truth, encoding="utf-16")
    test = TestLibrary(tmp_path).load(TEST, "OND", "nlt")
    assert test.truth["text"].to_list() == ["é | x, y"]
    assert round_bytes(test, 0, 9).decode("utf-16") == "i0,1,|é || x, y|,pos,cup\n"


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("id,detection,classification\na,0\n", "'a' has 2 columns"),
        ("id,detection,classification\na,0,cat\n", "classification of row 0 is 'cat'"),
        ("id,detection,classification\na,0,1\nb,0.5,1\n", "detection of row 1 is '0.5'"),
        ("id,detection,classification\na,,1\n", "detection of row 0 is ''"),
        ("id,detection,classification\na,inf,1\n", "detection of row 0 is 'inf'"),
    ],
    ids=["short", "text", "fraction", "empty", "infinite"],
)
def test_bad_truth_is_named(tmp_path: Path, truth: str, message: str) -> None:
    write_test(tmp_path, truth=truth)
    with pytest.raises(SourceError, match=message):
        TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"], ids=["broken", "list", "latin"])
def test_bad_metadata_is_named(tmp_path: Path, text: str) -> None:
    write_test(tmp_path)
    path = tmp_path / "OND" / DOMAIN / f"{TEST}_metadata.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match="_metadata"):
        TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)


def test_a_folder_without_tests_is_known(tmp_path: Path) -> None:
    write_test(tmp_path, protocol="ond")
    write_test(tmp_path, domain="pictures")
    assert not TestLibrary(tmp_path).has_tests()
    write_test(tmp_path, protocol="CONDDA")
    assert TestLibrary(tmp_path).has_tests()


def test_missing_folders_are_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        TestLibrary(tmp_path / "nothing")
    write_test(tmp_path)
    with pytest.raises(SourceError, match="domain x for OND not configured"):
        TestLibrary(tmp_path).test_ids("OND", "x")
    (tmp_path / "OND" / DOMAIN / f"{TEST}_metadata.json").unlink()
    library = TestLibrary(tmp_path)
    assert library.has_truth(TEST, "OND", DOMAIN)
    assert not library.has_metadata(TEST, "OND", DOMAIN)


def test_metadata_cannot_be_changed(tmp_path: Path) -> None:
    write_test(tmp_path)
    test = TestLibrary(tmp_path).load(TEST, "OND", DOMAIN)
    with pytest.raises(TypeError):
        test.metadata["round_size"] = 1  # type: ignore[index]
    path = tmp_path / "OND" / DOMAIN / f"{TEST}_metadata.json"
    assert json.loads(path.read_text())["round_size"] == 3
