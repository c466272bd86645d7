"""Each member held out in turn: the counts of the benchmark, labels that shift, roles."""

import csv

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, SourceError
from schemas.semantic import TrialSettings
from schemas.tables import SPLITS
from storage.raw import open_raw
from tasks.semantic.records import CIFAR_CLASSES, STL_CLASSES
from tasks.semantic.report import OFFICIAL, trial_counts
from tasks.semantic.sources import list_images
from tasks.semantic.trials import (
    Subset,
    declared_subsets,
    hold_out,
    protocol_of,
    read_subsets,
    resolve_subsets,
    with_splits,
)
from tests.shared import shared_path

PLAIN = TrialSettings()


def frame(rows) -> pl.DataFrame:
    """(dataset, class, class name, split, count, file) lines to images."""
    parts = [
        pl.DataFrame({"number": range(count)}).select(
            pl.format(f"{dataset}/{split}/{class_}/{{}}", "number").alias("sample_id"),
            pl.lit(dataset).alias("dataset"),
            pl.lit(class_).alias("class"),
            pl.lit(name, pl.String).alias("class_name"),
            pl.lit(split, pl.String).alias("split"),
            pl.lit(file).alias("file"),
        )
        for dataset, class_, name, split, count, file in rows
    ]
    return pl.concat(parts)


def all_trials(subset: Subset, images: pl.DataFrame, how: TrialSettings = PLAIN) -> pl.DataFrame:
    """Every trial of a subset, checked as in a build."""
    own = images.filter(pl.col("dataset") == subset.dataset)
    rows = [
        hold_out(own, subset.members, name, how).select(
            pl.lit(protocol_of(subset, name)).alias("protocol"),
            pl.all(),
            pl.lit(0, pl.Int32).alias("step"),
            pl.lit(None, pl.String).alias("subset"),
        )
        for name in subset.members.values()
    ]
    good, bad = SPLITS.check(pl.concat(rows))
    assert bad.is_empty()
    return good


def expected_counts() -> dict[str, dict[str, str]]:
    with shared_path("images/expected/holdout_counts.csv").open(newline="") as file:
        return {row["dataset"]: row for row in csv.DictReader(file)}


def agrees(counts: pl.DataFrame, expected: dict[str, str]) -> None:
    assert counts.height == int(expected["members"])
    for column in ("train_known", "test_known", "test_anomalous"):
        if expected[column].isdigit():
            ours = column.replace("anomalous", "novel")
            assert counts[ours].unique().to_list() == [int(expected[column])]
    assert counts["skew_percent"].round(2).unique().to_list() == [float(expected["skew_percent"])]


def test_cifar10_counts_from_the_real_labels():
    labels = pl.read_csv(shared_path("images/cifar10/cifar10_labels.csv"))
    images = labels.select(
        pl.format("cifar10/{}/{}", "batch", "row").alias("sample_id"),
        pl.lit("cifar10").alias("dataset"),
        pl.col("label").replace_strict(dict(enumerate(CIFAR_CLASSES))).alias("class"),
        pl.lit(None, pl.String).alias("class_name"),
        pl.when(pl.col("batch") == "test_batch").then(pl.lit("test")).otherwise(pl.lit("train"))
        .alias("split"),
        (pl.col("batch") + ".bin").alias("file"),
    )  # fmt: skip
    (subset,) = resolve_subsets(declared_subsets(None), images)
    assert tuple(subset.members) == CIFAR_CLASSES
    trials = all_trials(subset, images)
    agrees(trial_counts(trials), expected_counts()["cifar10"])
    valid = all_trials(subset, images, TrialSettings(validation="paper"))
    assert valid.filter(pl.col("split") == "valid", protocol="cifar10/cat").height == 10_000
    assert valid.filter(pl.col("split") == "valid")["sample_id"].str.contains("data_batch_5").all()
    cat = valid.filter(pl.col("protocol") == "cifar10/cat", pl.col("split") == "train")
    batch_5 = labels.filter(pl.col("batch") == "data_batch_5", pl.col("label") != 3).height
    assert cat.height == 45_000 - batch_5


def test_stl10_counts_by_definition():
    rows = [("stl10", c, None, s, n, "f") for c in STL_CLASSES for s, n in
            (("train", 500), ("test", 800))]  # fmt: skip
    images = frame(rows)
    (subset,) = resolve_subsets(declared_subsets(None), images)
    agrees(trial_counts(all_trials(subset, images)), expected_counts()["stl10"])
    valid = all_trials(subset, images, TrialSettings(validation="paper"))
    one = valid.filter(pl.col("protocol") == "stl10/bird", pl.col("split") == "valid")
    assert one.height == 1000 and one["class"].value_counts()["count"].unique().to_list() == [100]


def test_imagenet_subsets_are_those_of_the_paper():
    with shared_path("images/lists/semantic_anomaly_subsets.csv").open(newline="") as file:
        listed = [(r["subset"], r["wnid"], r["paper_name"]) for r in csv.DictReader(file)]
    built_in = declared_subsets(None)
    ours = [(s.name, wnid, name) for s in built_in for wnid, name in s.members.items()]
    assert ours == listed and len(ours) == 43
    # 1,300 train images a member, but 14,864 in all of the dogs.
    rows = []
    for subset in built_in:
        sizes = [1300] * len(subset.members)
        if subset.name == "dog":
            sizes = [1300] * 11 + [14_864 - 11 * 1300]
        for wnid, size in zip(subset.members, sizes, strict=True):
            rows += [("imagenet", wnid, None, "train", size, "f")]
            rows += [("imagenet", wnid, None, "test", 50, "f")]
    images = frame(rows)
    for subset in resolve_subsets(built_in, images):
        expected = expected_counts()[subset.name]
        trials = all_trials(subset, images)
        counts = trial_counts(trials)
        agrees(counts, expected)
        total = trials.filter(pl.col("split") == "train")["sample_id"].n_unique()
        assert total == int(expected["train_total"])
        assert (len(subset.members), total, 50 * len(subset.members)) == OFFICIAL[subset.name]


def test_the_real_tiny_imagenet(tmp_path, capsys):
    """The cars and spiders that it has of the paper's, and dogs of its own by a user's YAML."""
    listing = list_images("imagenet", open_raw(shared_path("images/tiny_imagenet_subset.zip")))
    images = pl.DataFrame(listing.entries, orient="row", schema=[
        "sample_id", "class", "class_name", "split", "file"]).with_columns(
        pl.lit("imagenet").alias("dataset"))  # fmt: skip
    paper = {wnid for subset in declared_subsets(None) for wnid in subset.members}
    names = images.filter(~pl.col("class").is_in(list(paper)))["class_name"].unique().sort()
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "subsets:\n  - name: tiny_dog\n    dataset: imagenet\n    members:\n"
        + "".join(f"      - {name!r}\n" for name in names)
    )
    found = {s.name: s for s in resolve_subsets(declared_subsets(mine), images)}
    assert set(found) == {"car", "spider", "tiny_dog"}
    assert "6 of 10 members have no images" in capsys.readouterr().err
    expected = expected_counts()
    for name, row in (
        ("car", "tiny car (this folder)"),
        ("spider", "tiny spider (this folder)"),
        ("tiny_dog", "tiny dog (this folder, not the paper members)"),
    ):
        agrees(trial_counts(all_trials(found[name], images)), expected[row])


# ---------------------------------------------------------------- labels, roles, draws


@settings(max_examples=40, deadline=None)
@given(
    members=st.integers(2, 8),
    held=st.integers(0, 7),
    how=st.sampled_from(["none", "paper"]),
    shuffle=st.integers(0, 1000),
)
def test_labels_shift_and_the_held_out_are_never_trained_on(members, held, how, shuffle):
    held %= members
    names = [f"c{number}" for number in range(members)]
    images = frame([("mine", n, None, s, 10, "f") for n in names for s in ("train", "test")])
    shape = TrialSettings(validation=how)
    known = {name: name for name in names}
    rows = hold_out(images, known, f"c{held}", shape).sort("sample_id")
    again = hold_out(
        images.sample(fraction=1, shuffle=True, seed=shuffle), known, f"c{held}", shape
    )
    assert rows.equals(again.sort("sample_id"))
    labels = dict(rows.select("class", "label").unique().iter_rows())
    assert labels == {f"c{n}": None if n == held else n - (n > held) for n in range(members)}
    assert rows.filter(pl.col("role") == "novel")["class"].unique().to_list() == [f"c{held}"]
    assert f"c{held}" not in set(rows.filter(pl.col("split") == "train")["class"])
    assert rows.filter(pl.col("split") == "test").height == 10 * members
    assert rows["sample_id"].is_unique().all()


def test_test_is_drawn_where_there_is_no_split():
    images = frame([("mine", "a", None, None, 10, "f"), ("mine", "b", None, None, 25, "f")])
    rows = with_splits(images, TrialSettings(test_share=0.2))
    counts = rows.group_by("class", "split").len().sort("class", "split").rows()
    assert counts == [("a", "test", 2), ("a", "train", 8), ("b", "test", 5), ("b", "train", 20)]
    other = with_splits(images, TrialSettings(test_share=0.2, seed=1))
    assert not rows.sort("sample_id").equals(other.sort("sample_id"))


# ---------------------------------------------------------------- a user's YAML

IMAGES = frame(
    [("imagenet", w, n, s, 2, "f") for w, n in (("n1", "beagle"), ("n2", "basset"), ("n3", "cab"))
     for s in ("train", "test")]
)  # fmt: skip


def subsets(tmp_path, text: str) -> tuple[Subset, ...]:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return read_subsets(path)


def test_members_by_class_name_or_wnid(tmp_path):
    mine = subsets(
        tmp_path,
        "subsets:\n- {name: x, dataset: imagenet, members: [cab, n1]}\n"
        "- {name: y, dataset: imagenet, members: {n2: my basset, beagle: my beagle}}\n",
    )
    x, y = resolve_subsets(mine, IMAGES)
    assert x.members == {"n3": "cab", "n1": "n1"}
    assert y.members == {"n2": "my basset", "n1": "my beagle"}
    assert [s.name for s in resolve_subsets(mine, IMAGES, ["y"])] == ["y"]


def test_a_whole_data_set_is_a_subset_too(tmp_path):
    mine = subsets(tmp_path, "subsets:\n- {name: x, dataset: imagenet, members: [cab, n1]}\n")
    assert [s.name for s in resolve_subsets(mine, IMAGES)] == ["x"]
    (whole,) = resolve_subsets(mine, IMAGES, ["imagenet"])
    assert list(whole.members) == ["n1", "n2", "n3"]


MISTAKES = {
    "typo": ("- {name: x, dataset: imagenet, members: [beagel, cab]}", "did you mean beagle"),
    "one": ("- {name: x, dataset: imagenet, members: [cab]}", "at least 2"),
    "twice": ("- {name: x, dataset: imagenet, members: [cab, cab]}", "different classes"),
    "no text": ("- {name: x, dataset: imagenet, members: [cab, no]}", "put it in quotes"),
    "same name": ("- {name: x, dataset: imagenet, members: {n1: a, n2: a}}", "same name"),
    "slash": ("- {name: a/b, dataset: imagenet, members: [cab, n1]}", "pattern"),
    "key": ("- {name: x, dataset: imagenet, member: [cab, n1]}", "member"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_sentences(name, tmp_path):
    text, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=said):
        resolve_subsets(subsets(tmp_path, f"subsets:\n{text}\n"), IMAGES)


def test_an_unknown_choice_and_nothing_to_hold_out():
    with pytest.raises(ConfigError, match="subset 'dgo' is unknown; there are imagenet, dog"):
        resolve_subsets(declared_subsets(None), IMAGES, ["dgo"])
    with pytest.raises(SourceError, match="no subset has images of two members"):
        resolve_subsets(declared_subsets(None), IMAGES)
