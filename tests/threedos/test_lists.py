import csv
import gzip
import json
import zipfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import make_config
from schemas.errors import ConfigError, SourceError
from storage.raw import open_raw
from tasks.threedos.lists import (
    MEMBERS,
    SCAN_CLASSES,
    SPLITS,
    ListSettings,
    ListsRead,
    find_lists,
    keep_present,
    listed_datasets,
    read_lists,
    sample_id,
    shapenet_models,
)
from tests.shared import shared_path

ALL_CSV = "id,synsetId,subSynsetId,modelId,split\n"


def read(folder: Path, **settings) -> ListsRead:
    return read_lists(open_raw(folder), ListSettings(**settings))


def expected(name: str) -> list[dict[str, str]]:
    with shared_path(f"shapes/expected/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def put(folder: Path, **files: str | bytes) -> Path:
    for name, text in files.items():
        place = folder / name.replace("__", ".")
        place.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def counts(members: pl.DataFrame, *by: str) -> dict[tuple, int]:
    return {row[:-1]: row[-1] for row in members.group_by(*by).len().rows()}


def problems(rejects: pl.DataFrame) -> list[tuple[str, str]]:
    return rejects.select("record", "rule").rows()


@pytest.fixture(scope="module")
def official() -> ListsRead:
    return read(shared_path("shapes/lists"))


@pytest.fixture(scope="module")
def without_missing(tmp_path_factory) -> ListsRead:
    """The official lists, and beside them the list of the models that v2 lacks."""
    folder = tmp_path_factory.mktemp("lists")
    for path in (
        *shared_path("shapes/lists").iterdir(),
        shared_path("shapes/expected/shapenet_missing63.csv"),
    ):
        (folder / path.name).write_bytes(path.read_bytes())
    return read(folder, missing_models="shapenet_missing63.csv")


# ---------------------------------------------------------------- the official lists


def test_official_lists_are_read_whole(official):
    assert official.members.schema == MEMBERS
    assert counts(official.members, "source") == {
        ("shapenet",): 51_190,
        ("modelnet40",): 12_311,
        ("scanobjectnn",): 2_902,
    }
    assert official.rejects.is_empty() and official.absent.is_empty() and not official.missing
    assert official.members["sample_id"].is_unique().all()
    assert not official.members.null_count().sum_horizontal().item()


@pytest.mark.parametrize("prefix", ["all", "v2"])
def test_shapenet_per_synset(official, without_missing, prefix):
    read = official if prefix == "all" else without_missing
    found = counts(read.members.filter(source="shapenet"), "class", "split")
    totals = dict.fromkeys(("train", "val", "test"), 0)
    *rows, everything = expected("shapenet_per_synset")
    for row in rows:
        for split in totals:
            key = (row["synset_id"], "valid" if split == "val" else split)
            number = found.pop(key, 0)
            assert number == int(row[f"{prefix}_{split}"]), key
            totals[split] += number
    assert not found
    assert totals == {split: int(everything[f"{prefix}_{split}"]) for split in totals}


def test_missing63_are_left_out_and_kept_in_sight(official, without_missing):
    wanted = {
        (sample_id("shapenet", row["synsetId"], row["modelId"]), SPLITS[row["split"]])
        for row in expected("shapenet_missing63")
    }
    assert len(wanted) == 63
    absent = without_missing.absent
    assert set(absent.select("sample_id", "split").rows()) == wanted
    assert counts(absent, "class_name") == {("car",): 50, ("table",): 13}
    assert without_missing.rejects.is_empty()
    both = pl.concat([without_missing.members, absent]).sort("sample_id")
    assert both.equals(official.members)


@pytest.fixture(scope="module")
def directories() -> pl.Series:
    texts = [
        shared_path(f"shapes/lists/pointbert_shapenet55_{split}.txt").read_text()
        for split in ("train", "test")
    ]
    return pl.Series("\n".join(texts).split())


def test_missing_models_from_the_names_in_a_tree(official, directories):
    """67 listed models have no directory; four of them are not among the 63."""
    present = shapenet_models(directories)
    # Two of the 52,470 lines name a synset and no model.
    assert len(directories) == 52_470 and len(present) == 52_468
    kept, absent = keep_present(official.members, present, "shapenet")
    assert kept.height == official.members.height - 67 and absent.height == 67
    known = {
        sample_id("shapenet", row["synsetId"], row["modelId"])
        for row in expected("shapenet_missing63")
    }
    assert known < set(absent["sample_id"])


def test_models_under_several_synsets_are_listed_once(official, directories):
    """1,258 models: a count of 1,259 takes the two lines without a model as one more."""
    models = shapenet_models(directories).str.split("/").list.last()
    several = models.filter(models.is_duplicated()).unique()
    assert len(several) == 1_258
    listed = official.members.filter(source="shapenet")["sample_id"].str.split("/").list.last()
    assert listed.is_unique().all()
    assert listed.is_in(several.implode()).sum() == 1_220


def test_modelnet40_counts(official):
    found = counts(official.members.filter(source="modelnet40"), "class", "split")
    rows = expected("modelnet40_counts")
    assert len(found) == 80
    for row in rows[:40]:
        for split in ("train", "test"):
            assert found[row["class"], split] == int(row[split]), row["class"]
    assert sum(n for (_, split), n in found.items() if split == "train") == int(rows[40]["train"])
    assert sum(n for (_, split), n in found.items() if split == "test") == int(rows[40]["test"])


@pytest.mark.parametrize("split", ["main_split", "split1", "split2", "split3", "split4"])
def test_scanobjectnn_counts(split):
    read_split = read(shared_path("shapes/lists"), scan_split=split)
    assert read_split.rejects.is_empty()
    found = counts(read_split.members.filter(source="scanobjectnn"), "class", "split")
    column = "main_test" if split == "main_split" else f"{split}_test"
    for row in expected("scanobjectnn_counts")[:15]:
        test, train = found.pop((row["class"], "test")), found.pop((row["class"], "train"))
        assert (test, test + train) == (int(row[column]), int(row["total"])), row["class"]
    assert not found


def test_modelnet40_mini_keeps_the_official_split(official):
    """The 1,688 meshes lie in the folders of the split that the lists give them."""
    with zipfile.ZipFile(shared_path("shapes/ModelNet40_mini.zip")) as archive:
        paths = [Path(name) for name in archive.namelist() if name.endswith(".off")]
    folders = {sample_id("modelnet40", path.stem): path.parts[1:3] for path in paths}
    kept, _ = keep_present(official.members, pl.Series(list(folders)), "modelnet40")
    mini = kept.filter(source="modelnet40")
    assert {row[0]: row[1:] for row in mini.select("sample_id", "class", "split").rows()} == folders
    found = counts(mini, "class", "split")
    *rows, everything = expected("modelnet40_mini_counts")
    assert found == {(r["class"], s): int(r[s]) for r in rows for s in ("train", "test")}
    assert (everything["train"], everything["test"]) == ("1166", "522") and mini.height == 1_688


# ---------------------------------------------------------------- ids and files


@pytest.mark.parametrize(
    "parts, name",
    [
        (("shapenet", "03001627", "ab"), "shapenet/03001627/ab"),
        (("sncore", "03001627", "ab"), "shapenet/03001627/ab"),
        (("modelnet40_resampled", "chair_0001"), "modelnet40/chair_0001"),
        (("scanobjectnn", "scene0000_00_00003"), "scanobjectnn/scene0000_00_00003"),
        (("mine", "chair", "a"), "mine/chair/a"),
    ],
    ids=["shapenet", "sncore", "resampled", "scan", "own"],
)
def test_shape_id(parts, name):
    assert sample_id(*parts) == name


@given(
    st.from_regex(r"[0-9]{8}", fullmatch=True),
    st.from_regex(r"[0-9a-z_-]{1,40}", fullmatch=True),
    st.sampled_from(
        ["{0}/{1}/models/model_normalized.obj", "ShapeNet/v2/{0}/{1}/models/a.obj", "{0}-{1}.npy"]
    ),
)
def test_names_in_a_tree_give_the_same_id(synset, model, form):
    names = pl.Series([form.format(synset, model), "README.txt", f"{synset}.json", "all.csv"])
    assert shapenet_models(names).to_list() == [sample_id("shapenet", synset, model)]


def test_lists_are_found_by_name_wherever_they_lie():
    found = find_lists(
        ["x/all.csv", "y/z/modelnet40_train.txt", "a/scanobjectnn_main_split.txt", "a/notall.csv"]
    )
    assert found == {
        "shapenet_all": "x/all.csv",
        "modelnet40_train": "y/z/modelnet40_train.txt",
        "scan_main_split": "a/scanobjectnn_main_split.txt",
    }
    with pytest.raises(SourceError, match=r"both a/all\.csv and b/shapenet_all\.csv"):
        find_lists(["b/shapenet_all.csv", "a/all.csv"])


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(SourceError, match=r"no list in .*all.*modelnet40_train.*main_split"):
        read(tmp_path)
    put(tmp_path, modelnet40_train__txt="chair_0001\n")
    with pytest.raises(SourceError, match=r"found modelnet40_train\.txt but no modelnet40_test"):
        read(tmp_path)
    put(tmp_path, modelnet40_test__txt="chair_0002\n")
    found = read(tmp_path)
    assert found.members.rows() == [
        ("modelnet40", "modelnet40/chair_0001", "chair", "chair", "train"),
        ("modelnet40", "modelnet40/chair_0002", "chair", "chair", "test"),
    ]
    said = " ".join(found.missing)
    for role in ("shapenet_all", "modelnet40_names", "scan_main_split"):
        assert role in said
    assert "modelnet40_test" not in said


# ---------------------------------------------------------------- bad lines


def test_bad_lines_of_all_csv(tmp_path):
    put(
        tmp_path,
        all__csv=(
            f"\ufeff{ALL_CSV}"
            "1,03001627,03001627,aa,train\r\n"
            '2,"03001627","03001627","bb"," VAL "\n'
            "3,2691156,2690373,cc,test\n"
            "\n"
            "4,chair,chair,dd,train\n"
            "5,03001627,03001627,e/e,train\n"
            "6,03001627,03001627,ff,holdout\n"
            "7,03001627\n"
            "8,04256520,04256520,aa,test\n"
        ),
    )
    members, _, rejects, _ = read(tmp_path)
    assert members.select("sample_id", "class", "class_name", "split").rows() == [
        ("shapenet/02691156/cc", "02691156", None, "test"),
        ("shapenet/03001627/aa", "03001627", None, "train"),
        ("shapenet/03001627/bb", "03001627", None, "valid"),
    ]
    assert problems(rejects) == [
        ("all.csv:6", "synset_form"),
        ("all.csv:7", "model_form"),
        ("all.csv:8", "split_allowed"),
        ("all.csv:9", "model_form"),
        ("all.csv:10", "unique"),
    ]
    assert "another synset; found 8,04256520" in rejects["message"][-1]


GOOD = [b"1,03001627,x,aa,train", b"2,03001627,x,bb,test", b"3,04256520,x,aa,val"]


@given(
    lines=st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8"), max_size=30).map(str.encode),
            st.binary(max_size=20),
            st.sampled_from(GOOD),
        ).map(lambda line: line.translate(None, b"\r\n")),
        max_size=12,
    )
)
def test_every_line_is_a_member_or_a_reject(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("fuzz")
    put(folder, all__csv=ALL_CSV.encode() + b"\n".join(lines))
    members, _, rejects, _ = read(folder)
    texts = pl.Series([line.decode(errors="replace") for line in lines], dtype=pl.String)
    assert members.height + rejects.height == (texts.str.strip_chars() != "").sum()
    assert members["sample_id"].str.split("/").list.last().is_unique().all()


def test_bad_lines_of_modelnet40(tmp_path):
    put(
        tmp_path,
        modelnet40_train__txt="chair_0001\nnight_stand_0002 \nchair\nchairs_0001\n",
        modelnet40_test__txt="chair_0001\nchair_0003\nchair_3\n",
        modelnet40_shape_names__txt="chair\nnight_stand\n",
    )
    members, _, rejects, _ = read(tmp_path)
    assert members.select("sample_id", "class", "split").rows() == [
        ("modelnet40/chair_0001", "chair", "train"),
        ("modelnet40/chair_0003", "chair", "test"),
        ("modelnet40/night_stand_0002", "night_stand", "train"),
    ]
    assert problems(rejects) == [
        ("modelnet40_train.txt:3", "name_form"),
        ("modelnet40_train.txt:4", "class_listed"),
        ("modelnet40_test.txt:1", "unique"),
        ("modelnet40_test.txt:3", "name_form"),
    ]


SCANS = "005_00020.bin\t0\n014_00018.bin\t4\tt\n"


def test_bad_lines_of_scanobjectnn(tmp_path):
    put(
        tmp_path,
        main_split__txt=(
            f"{SCANS}025_00011.bin\t15\n038.bin\t0\n041_00028.bin\t0\tx\n"
            "005_00020.bin\t0\tt\n043_00001.bin\t1\n044_00001.bin\t2\n"
        ),
        object_labels__txt=(
            "005\t00020\tbag\t1\n014\t00018\tchair\t2\n043\t00001\tbox\t3\nscene only\n"
        ),
    )
    members, _, rejects, _ = read(tmp_path)
    assert members.select("sample_id", "class", "split").rows() == [
        ("scanobjectnn/005_00020", "bag", "train"),
        ("scanobjectnn/014_00018", "chair", "test"),
    ]
    assert problems(rejects) == [
        ("object_labels.txt:4", "line_form"),
        ("main_split.txt:3", "label_range"),
        ("main_split.txt:4", "line_form"),
        ("main_split.txt:5", "line_form"),
        ("main_split.txt:6", "unique"),
        ("main_split.txt:7", "class_agrees"),
        ("main_split.txt:8", "class_agrees"),
    ]


def test_scanobjectnn_without_its_other_lists(tmp_path):
    put(tmp_path, main_split__txt=SCANS)
    members, _, rejects, missing = read(tmp_path)
    assert members.height == 2 and rejects.is_empty()
    assert any("scan_labels" in line for line in missing)
    put(tmp_path, shape_names_ext__txt="\n".join(reversed(SCAN_CLASSES)))
    with pytest.raises(SourceError, match=r"toilet, sofa.*in order: bag, bin"):
        read(tmp_path)


def test_released_json_lists(tmp_path):
    splits = {"train": [("03001627", "aa"), ("02992529", "bb")], "val": [("03001627", "cc")]}
    splits["test"] = [("03001627", "aa"), ("04401088", "dd"), ("phone", "ee")]
    for split, rows in splits.items():
        for kind, column in (("sids", 0), ("mids", 1)):
            text = json.dumps([row[column] for row in rows])
            put(tmp_path, **{f"sncore_{split}_4096_{kind}__json": text})
    members, _, rejects, _ = read(tmp_path)
    assert members.select("source", "sample_id", "split").rows() == [
        ("shapenet", "shapenet/02992529/bb", "train"),
        ("shapenet", "shapenet/03001627/aa", "train"),
        ("shapenet", "shapenet/03001627/cc", "valid"),
        ("shapenet", "shapenet/04401088/dd", "test"),
    ]
    assert problems(rejects) == [
        ("sncore_test_4096_sids.json:0", "unique"),
        ("sncore_test_4096_sids.json:2", "synset_form"),
    ]
    put(tmp_path, all__csv=f"{ALL_CSV}1,03001627,03001627,zz,train\n")
    with pytest.raises(SourceError, match="choose with shapenet_list"):
        read(tmp_path)
    assert read(tmp_path, shapenet_list="sncore").members.height == 4
    assert read(tmp_path, shapenet_list="all.csv").members.height == 1
    put(tmp_path, sncore_val_4096_mids__json="[]")
    with pytest.raises(SourceError, match="as many synset ids"):
        read(tmp_path, shapenet_list="sncore")


def test_lines_of_the_missing_list_are_checked(tmp_path):
    put(
        tmp_path,
        all__csv=f"{ALL_CSV}1,03001627,x,aa,train\n2,03001627,x,bb,test\n",
        gone__csv="modelId,synsetId\nbb,03001627\ncc,03001627\naa,04256520\nbb,3001627\n",
    )
    members, absent, rejects, _ = read(tmp_path, missing_models="gone.csv")
    assert members["sample_id"].to_list() == ["shapenet/03001627/aa"]
    assert absent["sample_id"].to_list() == ["shapenet/03001627/bb"]
    assert problems(rejects) == [
        ("gone.csv:3", "model_listed"),
        ("gone.csv:4", "model_listed"),
        ("gone.csv:5", "unique"),
    ]
    with pytest.raises(SourceError, match=r"list nowhere\.csv cannot be read"):
        read(tmp_path, missing_models="nowhere.csv")
    lists = tmp_path / "lists"
    lists.mkdir()
    (tmp_path / "all.csv").rename(lists / "all.csv")
    elsewhere = read(lists, missing_models=str(tmp_path / "gone.csv"))
    assert elsewhere.members.equals(members), "the list may lie anywhere"


def test_packed_lists_are_the_same(tmp_path):
    text = f"{ALL_CSV}1,03001627,x,aa,train\n2,03001627,x,bb,test\n"
    plain = read(put(tmp_path, all__csv=text))
    packed = tmp_path / "packed"
    packed.mkdir()
    put(packed, all__csv__gz=gzip.compress(text.encode()))
    assert read(packed).members.equals(plain.members)
    put(packed, all__csv__gz=gzip.compress(text.encode())[:-12])
    with pytest.raises(SourceError, match=r"all\.csv\.gz is no whole gzip file"):
        read(packed)


def test_lists_of_some_data_sets_only(tmp_path):
    put(
        tmp_path,
        all__csv=f"{ALL_CSV}1,03001627,x,aa,train\n",
        modelnet40_train__txt="chair_0001\n",
        modelnet40_test__txt="chair_0002\n",
    )
    found = read_lists(open_raw(tmp_path), ListSettings(), ["modelnet40"])
    assert set(found.members["source"]) == {"modelnet40"}
    names = [file.name for file in open_raw(tmp_path).files()]
    assert listed_datasets(find_lists(names)) == {"shapenet", "modelnet40"}


@pytest.mark.parametrize(
    "files, message",
    [
        ({"all__csv": "a,b\n1,2\n"}, "expected a header with synsetId, modelId, split"),
        ({"all__csv": " \n"}, "is empty"),
        (
            {"all__csv": f"{ALL_CSV}1,03001627,x,aa,train\n", "taxonomy__json": "[1]"},
            "does not give each synset a name",
        ),
        (
            {"all__csv": f"{ALL_CSV}1,03001627,x,aa,train\n", "taxonomy__json": "["},
            "is not JSON",
        ),
    ],
    ids=["header", "empty", "taxonomy", "json"],
)
def test_a_file_that_is_no_list(tmp_path, files, message):
    with pytest.raises(SourceError, match=message):
        read(put(tmp_path, **files))


def test_names_from_the_taxonomy(tmp_path):
    rows = [{"synsetId": "02691156", "name": "airplane,aeroplane,plane"}]
    put(
        tmp_path,
        all__csv=f"{ALL_CSV}1,02691156,x,aa,train\n2,03001627,x,bb,test\n",
        taxonomy__json=json.dumps(rows),
    )
    assert read(tmp_path).members["class_name"].to_list() == ["airplane", None]


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="scan_split"):
        make_config(ListSettings, {"scan_split": "split5"})
