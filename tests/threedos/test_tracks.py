import csv
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from schemas.errors import ConfigError, SourceError
from schemas.tables import SPLITS
from storage.raw import open_raw
from tasks.threedos.lists import SCAN_CLASSES, ListSettings, read_lists, sample_id
from tasks.threedos.tracks import (
    Track,
    TrackSettings,
    build_possible,
    build_splits,
    built_in_tracks,
    choose_tracks,
    count_splits,
    empty_labels,
    read_tracks,
)
from tests.shared import shared_path

MERGED, DROPPED = TrackSettings(cellphones="merged"), TrackSettings(cellphones="dropped")
CELLPHONE, TELEPHONE = "02992529", "04401088"


def expected(name: str) -> list[dict[str, str]]:
    with shared_path(f"shapes/expected/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def tracks(*names: str) -> tuple[Track, ...]:
    return choose_tracks(names, built_in_tracks())


def shapes(counted: pl.DataFrame, **where: str) -> int:
    return counted.filter(**where)["shapes"].sum()


@pytest.fixture(scope="module")
def everything() -> pl.DataFrame:
    return read_lists(open_raw(shared_path("shapes/lists")), ListSettings()).members


@pytest.fixture(scope="module")
def available(everything) -> pl.DataFrame:
    """Without the 63 models that v2 lacks."""
    gone = [
        sample_id("shapenet", row["synsetId"], row["modelId"])
        for row in expected("shapenet_missing63")
    ]
    return everything.filter(~pl.col("sample_id").is_in(gone))


@pytest.fixture(scope="module")
def splits(available) -> pl.DataFrame:
    return build_splits(available, built_in_tracks(), MERGED)


# ---------------------------------------------------------------- counts of the built-in tracks


@pytest.mark.parametrize("files", ["all.csv", "v2 available"])
@pytest.mark.parametrize("cellphones", ["merged", "dropped"])
def test_synthetic_counts(everything, available, files, cellphones):
    members = everything if files == "all.csv" else available
    made = build_splits(members, tracks("SN1", "SN2", "SN3"), TrackSettings(cellphones=cellphones))
    counted = count_splits(made)
    checked = 0
    for row in expected("sn_track_counts"):
        if row["files"] != files or row["cellphones"] not in (cellphones, "n/a"):
            continue
        name = row["category_set"].split()[0]
        if "unknown" in row["category_set"]:
            found = shapes(counted, protocol=name, role="novel", split="test")
            assert found == int(row["test"]), row
        else:
            for split in ("train", "val", "test"):
                of = {"split": "valid" if split == "val" else split, "role": "known"}
                assert shapes(counted, protocol=name, **of) == int(row[split]), (row, split)
        checked += 1
    assert checked == (6 if (files, cellphones) == ("v2 available", "dropped") else 3)


def test_each_unknown_set_can_be_reported_apart(available):
    """The denominators of the released example: 2240, 4696, 3324."""
    counted = count_splits(build_splits(available, tracks("SN1"), DROPPED)).filter(split="test")
    assert counted.select("role", "subset", "shapes").rows() == [
        ("known", "SN1", 2240),
        ("novel", "SN2", 4696),
        ("novel", "SN3", 3324),
    ]


@pytest.mark.parametrize("row", range(5), ids=["SR1", "SR2", "SR12", "SR13", "SR23"])
def test_counts_with_real_scans(splits, row):
    wanted = expected("sr_track_counts")[row]
    name = wanted["known"] if row < 2 else f"SR{wanted['known'].replace('SR', '').replace('+', '')}"
    rows = splits.filter(protocol=name)
    counted = count_splits(rows)
    assert shapes(counted, split="train", role="known") == int(wanted["train"])
    assert shapes(counted, split="valid", role="known") == int(wanted["val"].split()[0])
    assert shapes(counted, split="test", role="known") == int(wanted["known_test"])
    assert shapes(counted, split="test", role="novel") == int(wanted["unknown_test"])
    assert rows["label"].n_unique() - 1 == int(wanted["known_labels"])
    assert set(rows.filter(role="novel")["subset"]) == set(wanted["unknown"].split("+"))
    assert set(rows.filter(role="known")["subset"]) == set(wanted["known"].split("+"))
    assert rows.filter(role="novel")["split"].unique().to_list() == ["test"]


def test_modelnet_and_scan_classes_of_the_sets(everything):
    """Set and label of each class, and counts per set, from both count files."""
    made = build_splits(everything, tracks("SR1", "SR2"), MERGED)
    found = {
        (row[0], row[1]): row[2]
        for row in made.filter(role="known").select("class", "protocol", "label").unique().rows()
    }
    wanted = {}
    for row in expected("modelnet40_counts")[:40]:
        if row["sr_set"]:
            wanted[row["class"], row["sr_set"]] = int(row["sr_label"])
    for row in expected("scanobjectnn_counts")[:15]:
        if row["sr_set"] in ("SR1", "SR2"):
            wanted[row["class"], row["sr_set"]] = int(row["sr_label"])
    assert found == wanted
    totals = {row["class"]: row for row in expected("modelnet40_counts")[40:]}
    counted = count_splits(made)
    for name in ("SR1", "SR2"):
        assert shapes(counted, protocol=name, split="train") == int(totals[name]["train"])
        assert shapes(counted, protocol=name, split="valid") == int(totals[name]["test"])
    scans = {row["label"]: int(row["total"]) for row in expected("scanobjectnn_counts")[15:]}
    assert shapes(counted, protocol="SR1", subset="SR3") == scans["SR3"] == 858
    assert shapes(counted, protocol="SR2", role="known", split="test") == scans["SR2"]


# ---------------------------------------------------------------- labels


def test_labels_are_ranks_of_the_sorted_synsets(splits):
    wanted = {(r["category_set"], r["synset_id"]): int(r["label"]) for r in expected("sn_sets")}
    known = splits.filter(pl.col("protocol").str.starts_with("SN"), role="known")
    found = {r[:2]: r[2] for r in known.select("protocol", "class", "label").unique().rows()}
    assert found.pop(("SN1", CELLPHONE)) == wanted["SN1", TELEPHONE] == 16
    assert found == wanted
    for track in tracks("SN1", "SN2", "SN3"):
        ids = [group.classes[0] for group in track.known]
        assert ids == sorted(ids) and len(ids) == 18


SR1_LABELS = {"chair": 0, "shelf": 1, "door": 2, "sink": 3, "sofa": 4}


@pytest.mark.parametrize(
    "name, labels",
    [
        (
            "SR12",
            {**SR1_LABELS, "bed": 5, "toilet": 6, "desk": 7, "table": 7, "display": 8},
        ),
        ("SR13", {**SR1_LABELS, "bag": 5, "bin": 6, "box": 7, "cabinet": 8, "pillow": 9}),
        (
            "SR23",
            {"bed": 0, "toilet": 1, "desk": 2, "table": 2, "display": 3}
            | {"bag": 4, "bin": 5, "box": 6, "cabinet": 7, "pillow": 8},
        ),
    ],
    ids=["SR12", "SR13", "SR23"],
)
def test_real_to_real_label_maps(splits, name, labels):
    known = splits.filter(protocol=name, role="known")
    assert dict(known.select("class", "label").unique().rows()) == labels


def test_unknown_has_no_label(splits):
    assert splits.schema == SPLITS.polars_schema
    assert splits.filter(role="novel")["label"].null_count() == splits.filter(role="novel").height
    assert not splits.filter(role="known")["label"].null_count()


def test_rows_fit_the_table(splits):
    assert splits.schema == SPLITS.polars_schema
    good, bad = SPLITS.check(splits)
    assert bad.is_empty() and good.equals(splits)


# ---------------------------------------------------------------- nothing leaks


def test_a_shape_has_one_place_in_a_track(splits):
    assert not splits.select("protocol", "sample_id").is_duplicated().any()
    synthetic = splits.filter(pl.col("protocol").str.starts_with("SN"))
    models = synthetic.select("protocol", pl.col("sample_id").str.split("/").list.last())
    assert not models.is_duplicated().any()


def test_a_model_under_two_synsets_is_refused(everything):
    chair = everything.filter(source="shapenet", split="train")[:1]
    moved = chair.with_columns(
        pl.lit(f"shapenet/{CELLPHONE}/").add(pl.col("sample_id").str.split("/").list.last())
        .alias("sample_id"),
        pl.lit(CELLPHONE).alias("class"),
        pl.lit("test").alias("split"),
    )  # fmt: skip
    with pytest.raises(SourceError, match=r"2 rows name a shape more than once.*all\.csv"):
        build_splits(pl.concat([everything, moved]), tracks("SN1"), MERGED)


def test_merge_and_drop_differ_by_the_cellphones_alone(available):
    merged, dropped = (
        build_splits(available, tracks("SN1", "SN2", "SN3"), option) for option in (MERGED, DROPPED)
    )
    more = merged.join(dropped, on=["protocol", "sample_id"], how="anti")
    assert more["class"].unique().to_list() == [CELLPHONE]
    assert more["subset"].unique().to_list() == ["SN1"]
    counted = {row[:-1]: row[-1] for row in more.group_by("protocol", "split", "role").len().rows()}
    assert counted == {
        ("SN1", "train", "known"): 404,
        ("SN1", "valid", "known"): 83,
        ("SN1", "test", "known"): 1,
        ("SN2", "test", "novel"): 1,
        ("SN3", "test", "novel"): 1,
    }
    kept = merged.join(more, on=["protocol", "sample_id"], how="anti")
    assert kept.equals(dropped)


# ---------------------------------------------------------------- validation as a share


def scans(count: int = 2309) -> pl.DataFrame:
    """Rows as the h5 files give them: no names, classes mixed, ids in the order of the file."""
    rng = np.random.default_rng(3)
    parts = []
    for folder, split, rows in (("training", "train", count), ("test", "test", count // 4)):
        labels = rng.integers(0, len(SCAN_CLASSES), rows)
        parts.append(
            pl.DataFrame(
                {
                    "source": "scanobjectnn",
                    "sample_id": [
                        sample_id("scanobjectnn", folder, f"{row:05d}") for row in range(rows)
                    ],
                    "class": [SCAN_CLASSES[label] for label in labels],
                    "split": split,
                }
            )
        )
    return pl.concat(parts)


def test_validation_is_the_released_one_for_rows_of_the_h5():
    """int(10 %) of the chosen rows in file order, random_state 42."""
    members = scans()
    made = build_splits(members, tracks("SR12"), MERGED)
    chosen = {
        "chair", "shelf", "door", "sink", "sofa", "bed", "toilet", "desk", "table", "display",
    }  # fmt: skip
    rows = [
        row for row, kind, split in zip(
            members["sample_id"], members["class"], members["split"], strict=True
        ) if split == "train" and kind in chosen
    ]  # fmt: skip
    train, valid = train_test_split(
        list(range(len(rows))), test_size=len(rows) * 10 // 100, shuffle=True, random_state=42
    )
    assert set(made.filter(split="valid")["sample_id"]) == {rows[i] for i in valid}
    assert set(made.filter(split="train")["sample_id"]) == {rows[i] for i in train}


@pytest.mark.parametrize("count, share, held", [(30, 0.1, 3), (100, 0.29, 29), (57, 0.1, 5)])
def test_share_is_rounded_down_exactly(tmp_path, count, share, held):
    members = pl.DataFrame(
        {
            "source": "own",
            "sample_id": [f"own/{n:04d}" for n in range(count + 2)],
            "class": ["a"] * (count + 1) + ["b"],
            "split": ["train"] * count + ["test"] * 2,
        }
    )
    track = declare(tmp_path, OWN.replace("share: 0.5", f"share: {share}"))
    made = build_splits(members, track, MERGED)
    assert made.filter(split="valid").height == held
    assert made.filter(split="train").height == count - held


def test_share_of_too_few_shapes(tmp_path):
    members = own_members().filter(pl.col("sample_id") != "own/2")
    with pytest.raises(SourceError, match=r"0\.5 of 1 training shapes is 0"):
        build_splits(members, declare(tmp_path, OWN), MERGED)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_order_of_rows_does_not_matter(seed):
    members = scans(300)
    chosen = tracks("SR12", "SR23")
    shuffled = members.sample(fraction=1, shuffle=True, seed=seed)
    assert build_splits(shuffled, chosen, MERGED).equals(build_splits(members, chosen, MERGED))
    assert build_splits(members, chosen[::-1], MERGED).equals(build_splits(members, chosen, MERGED))


def test_order_of_the_official_lists_does_not_matter(available, splits):
    shuffled = available.sample(fraction=1, shuffle=True, seed=5)
    assert build_splits(shuffled, built_in_tracks(), MERGED).equals(splits)


# ---------------------------------------------------------------- what is there


def test_tracks_that_cannot_be_built_are_named(everything):
    modelnet = everything.filter(source="modelnet40")
    made, reasons = build_possible(modelnet, built_in_tracks(), MERGED)
    assert made["protocol"].unique().sort().to_list() == ["MN1", "MN2"]
    assert set(reasons) == {"SN1", "SN2", "SN3", "SR1", "SR2", "SR12", "SR13", "SR23"}
    assert "scanobjectnn" in reasons["SR1"] and "shapenet" in reasons["SN1"]
    with pytest.raises(SourceError, match="SR1 needs scanobjectnn"):
        build_splits(modelnet, tracks("MN1", "SR1"), MERGED)
    assert made.equals(build_splits(modelnet, tracks("MN1", "MN2"), MERGED))


def test_a_role_without_shapes_is_an_error(everything):
    no_test = everything.filter(pl.col("source") == "modelnet40", pl.col("split") == "train")
    with pytest.raises(SourceError, match="MN1 has no known test shape"):
        build_splits(no_test, tracks("MN1"), MERGED)


def test_labels_without_shapes_are_reported(everything):
    """A class of a set that is not at hand keeps its number free."""
    modelnet = everything.filter(source="modelnet40").filter(pl.col("class") != "door")
    made = build_splits(modelnet, tracks("MN1"), MERGED)
    assert empty_labels(made, tracks("MN1")).rows() == [
        ("MN1", "train", 2, "door"),
        ("MN1", "test", 2, "door"),
    ]
    assert dict(made.filter(role="known").select("class", "label").unique().rows()) == {
        "chair": 0, "bookshelf": 1, "sink": 3, "sofa": 4,
    }  # fmt: skip


def test_ingested_shapes_serve_as_members(everything):
    """Sources by the form they were read from, more columns, no names; same rows."""
    listed = everything.filter(pl.col("source") != "scanobjectnn")
    forms = {"shapenet": "sncore", "modelnet40": "modelnet40_resampled"}
    ingested = listed.drop("class_name").with_columns(
        pl.col("source").replace(forms), pl.lit(7).alias("faces")
    )
    chosen = tracks("SN1", "MN2")
    assert build_splits(ingested, chosen, MERGED).equals(build_splits(listed, chosen, MERGED))


# ---------------------------------------------------------------- a user's tracks

OWN = """
name: mine
known: [a]
unknown: [b]
train: {own: [train]}
validation: {share: 0.5, seed: 1}
test: {own: test}
"""


def own_members() -> pl.DataFrame:
    rows = [
        ("own", "own/1", "a", "train"),
        ("own", "own/2", "a", "train"),
        ("own", "own/3", "a", "test"),
        ("own", "own/4", "b", "test"),
        ("own", "own/5", "b", "train"),
        ("wild", "wild/1", "b", None),
        ("wild", "wild/2", "armchair", None),
    ]
    return pl.DataFrame(rows, ["source", "sample_id", "class", "split"], orient="row")


def declare(folder: Path, text: str) -> tuple[Track, ...]:
    path = folder / "tracks.yaml"
    path.write_text(text)
    return read_tracks(path)


def test_one_track_in_a_file(tmp_path):
    made = build_splits(own_members(), declare(tmp_path, OWN), MERGED)
    assert made.drop("sample_id", "step").filter(split="test").rows() == [
        ("mine", "a", 0, "test", "known", "known"),
        ("mine", "b", None, "test", "novel", "unknown"),
    ]
    assert made.height == 4


def test_sources_without_splits_are_taken_whole(tmp_path):
    text = OWN + "unknown_test: {own: [train, test], wild: all}\n"
    made = build_splits(own_members(), declare(tmp_path, text), MERGED)
    unknown = made.filter(role="novel")["sample_id"]
    assert unknown.to_list() == ["own/4", "own/5", "wild/1"]


def test_own_sets_groups_and_names(tmp_path, everything):
    """Known classes by name over two data sets, a label of two classes, a built-in set."""
    text = """
sets:
  tables: [[desk, table]]
tracks:
  - name: furniture
    known: [chair, tables, bookshelf]
    unknown: [SR3, bed]
    train: {shapenet: [train]}
    valid: {shapenet: [valid]}
    test: {scanobjectnn: [test], modelnet40: [test]}
  - name: phones
    known: ["04401088", "02992529"]
    unknown: [chair]
    train: {shapenet: [train]}
    test: {shapenet: [test]}
"""
    made = build_splits(everything, declare(tmp_path, text), MERGED)
    furniture = made.filter(protocol="furniture")
    known = furniture.filter(role="known").select("class", "label", "subset").unique()
    assert sorted(known.rows()) == [
        ("02871439", 2, "known"),
        ("03001627", 0, "known"),
        ("04379243", 1, "tables"),
        ("bookshelf", 2, "known"),
        ("chair", 0, "known"),
        ("desk", 1, "tables"),
        ("table", 1, "tables"),
    ]
    groups = dict(furniture.filter(role="novel").select("class", "subset").unique().rows())
    assert groups == {
        "bag": "SR3", "bin": "SR3", "box": "SR3", "cabinet": "SR3", "pillow": "SR3",
        "bed": "unknown",
    }  # fmt: skip
    # A track that names the cellphone by itself keeps it apart.
    phones = made.filter(protocol="phones", role="known").select("class", "label").unique()
    assert dict(phones.rows()) == {TELEPHONE: 0, CELLPHONE: 1}


BAD = {
    "unquoted_octal": (OWN.replace("[a]", "[02747177]"), r"class 773759 is no text.*quotes"),
    "both": (OWN.replace("unknown: [b]", "unknown: [b, a]"), "class a is known and unknown"),
    "twice": (OWN.replace("known: [a]", "known: [a, [c, a]]", 1), "class a is twice among known"),
    "set_and_class": (
        OWN.replace("known: [a]", "known: [SR1]", 1).replace("[b]", "[sofa]"),
        "class sofa is known and unknown",
    ),
    "same_split": (OWN.replace("own: test", "own: [test, train]"), "train of own serves both"),
    "same_source": (OWN.replace("own: test", "own: all"), "train of own serves both"),
    "both_validations": (OWN + "valid: {own: valid}\n", "valid or validation, not both"),
    "split": (OWN.replace("own: test", "own: tset"), "'train', 'valid', 'test' or 'all'"),
    "share": (OWN.replace("0.5", "1.5"), r"share.*less than 1"),
    "no_unknown": (OWN.replace("[b]", "[]"), "unknown: .*expected a list of classes"),
    "no_train": (OWN.replace("train: {own: [train]}", ""), r"train: field required"),
    "extra": (OWN + "tests: 1\n", r"tests is not a setting \(there are: description, known"),
    "name": (OWN.replace("mine", "'my track'"), "name: .*pattern"),
    "built_in_set": (OWN + "sets: {SR1: [a]}\n", "set SR1 is built in"),
    "merged": (OWN + "merged: {a: b}\n", "merged is not for users"),
    "empty": ("", "expected key: value lines"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_declaration_is_one_sentence(tmp_path, case):
    text, message = BAD[case]
    with pytest.raises(ConfigError, match=message) as caught:
        declare(tmp_path, text)
    assert "tracks.yaml" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_tracks(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "name, near",
    [("armchar", "nearest: armchair"), ("SR4", "nearest: .*SR3"), ("qqq", "there are")],
)
def test_an_unheard_class_names_the_nearest(tmp_path, name, near):
    text = OWN.replace("[b]", f"[b, {name}]") + "unknown_test: {own: test, wild: all}\n"
    with pytest.raises(ConfigError, match=f"no class is called {name} in own, wild; {near}"):
        build_splits(own_members(), declare(tmp_path, text), MERGED)


def test_a_class_by_id_and_by_name_is_refused(tmp_path, everything):
    text = OWN.replace("[a]", "['03001627', chair]").replace("{own", "{shapenet")
    track = declare(tmp_path, text.replace("[b]", "[bed]"))
    with pytest.raises(
        ConfigError, match="03001627 of shapenet is named by its id and by its name"
    ):
        build_splits(everything, track, MERGED)


def test_names_of_tracks():
    assert [track.name for track in tracks("SR2", "SN1")] == ["SR2", "SN1"]
    assert tracks() == built_in_tracks()
    with pytest.raises(ConfigError, match="no track is called SN4; nearest: SN3, SN2, SN1"):
        tracks("SN4")
    with pytest.raises(ConfigError, match="two tracks are called MN1"):
        build_splits(scans(50), tracks("MN1", "MN1"), MERGED)


def test_a_track_is_data():
    """It can be part of a stage's settings: dumped, read again, equal."""
    for track in built_in_tracks():
        assert Track.model_validate(track.model_dump(mode="json")) == track
