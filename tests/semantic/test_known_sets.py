"""All classes of one set known, other sets novel: rows, sizes, refusals, and real classifiers."""

import csv
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import polars as pl
import pytest
from PIL import Image
from pydantic import ValidationError

from schemas.errors import ConfigError
from schemas.semantic import PICTURES, Config, TrialSettings
from storage.tables import current_version
from tasks import scores
from tasks.semantic.offers import check_choice
from tasks.semantic.pictures import encode
from tasks.semantic.samples import read_pictures
from tasks.semantic.trials import KnownSet, all_known, declared_subsets, resolve_subsets
from tests.semantic.test_trials import frame
from tests.shared import shared_path

DECLARED = declared_subsets(None)


# ---------------------------------------------------------------- rows


def images(novel_splits=((None, 4),)) -> pl.DataFrame:
    known = [("cifar10", c, None, s, n, "f") for c in ("cat", "airplane") for s, n in
             (("train", 3), ("test", 2))]  # fmt: skip
    return frame([*known, *(("stl10", "dog", None, s, n, "f") for s, n in novel_splits)])


def rows(novel_splits=((None, 4),)) -> pl.DataFrame:
    every = images(novel_splits)
    (subset,) = resolve_subsets(DECLARED, every, (), "cifar10", ("stl10",))
    assert isinstance(subset, KnownSet)
    assert (subset.name, subset.trials) == ("known-cifar10", ("stl10",))
    assert list(subset.members) == ["airplane", "cat"]  # CIFAR-10's order
    known, novel = (every.filter(dataset=name) for name in ("cifar10", "stl10"))
    return all_known(known, subset.members, novel, TrialSettings())


def test_all_classes_are_known_and_the_other_set_is_novel():
    trial = rows()
    counts = {
        key: n for *key, n in trial.group_by("split", "role").len().rows() for key in [tuple(key)]
    }
    assert counts == {("train", "known"): 6, ("test", "known"): 4, ("test", "novel"): 4}
    assert dict(trial.filter(role="known").select("class", "label").unique().rows()) == {
        "airplane": 0, "cat": 1,
    }  # fmt: skip
    assert trial.filter(role="novel")["label"].is_null().all()


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ((("train", 5), ("test", 3), ("valid", 2)), 3),
        ((("train", 5), ("valid", 2)), 2),
        ((("train", 5), (None, 1)), 1),
    ],
)
def test_of_the_novel_set_its_test_images_count(splits, expected):
    assert rows(splits).filter(role="novel").height == expected


def test_only_named_subsets_are_held_out_beside_it():
    every = images()
    both = resolve_subsets(DECLARED, every, ("cifar10",), "cifar10", ("stl10",))
    assert [subset.name for subset in both] == ["cifar10", "known-cifar10"]
    assert both[0].trials == ("airplane", "cat")
    with pytest.raises(ConfigError, match="dog is of imagenet, which cannot be novel too"):
        resolve_subsets(DECLARED, every, (), "dog", ("imagenet",))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"known": "cifar10"}, "known and novel go together"),
        ({"novel": ("stl10",)}, "known and novel go together"),
        ({"known": "cifar10", "novel": ("birds",)}, "'birds' is no source; there are cifar10, st"),
        ({"known": "cifar10", "novel": ("cifar10",)}, "cannot be both known and novel"),
        ({"known_side": 32}, "name these"),
        ({"known": "cfar10", "novel": ("stl10",)}, "known: 'cfar10' is unknown; there are"),
        (
            {"known": "cifar10", "novel": ("stl10",), "protocols": ("cifar10/cat",)},
            "'cifar10/cat' is of no subset that is built; there are known-cifar10",
        ),
    ],
)
def test_wrong_choices_are_said_before_anything_is_read(choice, said):
    with pytest.raises((ConfigError, ValidationError), match=said):
        check_choice(Config(source={"cifar10": "a", "stl10": "b"}, **choice), DECLARED)


# ---------------------------------------------------------------- sizes


def test_pictures_of_other_sizes_are_cut_to_the_side_by_pillows_bicubic(tmp_path):
    draws = np.random.default_rng(0)
    sizes = {"a": (32, 32), "b": (96, 96), "c": (50, 40)}
    raw = {n: draws.integers(0, 256, (h, w, 3), dtype=np.uint8) for n, (w, h) in sizes.items()}
    stored = [(n, *sizes[n], "png", encode(Image.fromarray(raw[n]), "png", 95)) for n in sizes]
    pl.DataFrame(stored, schema=PICTURES.polars_schema, orient="row").write_parquet(tmp_path / "p")
    cache = read_pictures([tmp_path / "p"], ["b", "a", "c"], 32)
    assert cache.shape == (3, 32, 32, 3)
    np.testing.assert_array_equal(cache[1], raw["a"])
    bicubic = Image.Resampling.BICUBIC
    np.testing.assert_array_equal(cache[0], Image.fromarray(raw["b"]).resize((32, 32), bicubic))
    middle = Image.fromarray(raw["c"]).resize((32, 32), bicubic, box=(5, 0, 45, 40))
    np.testing.assert_array_equal(cache[2], middle)
    with pytest.raises(ConfigError, match=r"several sizes \(32 x 32, 96 x 96"):
        read_pictures([tmp_path / "p"], ["b", "a", "c"])[:]


# ---------------------------------------------------------------- real classifiers

WEIGHTS = {"resnet20": "resnet20-12fca82f.th", "resnet56": "resnet56-4bfd9763.th"}
NOVEL = {"tiny_imagenet_val_subset": "imagenet", "stl10_examples": "stl10"}
SCORES = {name: {} for name in ("msp", "mls", "energy", "mahalanobis")}
# The score of that name may be newer than this test.
KNN = {"knn": {"k": 50, "normalise": True}} if "knn" in scores.names() else {}


def built(lake: Path, network: str, source: dict[str, Path], novel: tuple[str, ...]) -> None:
    from flows.semantic import build

    build.fn(
        Config(
            source=source,
            lake=lake,
            known="cifar10",
            novel=novel,
            models={"pretrained": {"weights": shared_path(f"weights/{WEIGHTS[network]}")}},
            scores=SCORES | KNN,
            trivial_baseline=False,
        )
    )


def table(lake: Path, name: str) -> pl.DataFrame:
    return current_version(lake, "semantic", name).read()


def run_of(lake: Path, network: str, protocol: str) -> str:
    """By the start of the file's SHA-256, which stands in its name."""
    said = f'{{"weights": "{WEIGHTS[network][-11:-3]}"}}'
    return table(lake, "runs").filter(protocol=protocol, changed=said)["run_id"].item()


def measured(lake: Path, run_id: str, score: str, metric: str) -> float:
    one = {"run_id": run_id, "score": score, "metric": metric}
    rows = table(lake, "metrics").filter(**one, split="test", convention="openood")
    return rows["value"].item()


def expected(name: str) -> list[dict[str, str]]:
    with shared_path(f"weights/expected/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def right(lake: Path, network: str) -> float:
    run_id = run_of(lake, network, "known-cifar10/stl10")
    test = table(lake, "splits").filter(protocol="known-cifar10/stl10", split="test")
    known = test.filter(role="known").height
    return measured(lake, run_id, "msp", "acc") * known


def images_of(**names: str) -> dict[str, Path]:
    return {source: shared_path(f"images/{name}") for source, name in names.items()}


RIGHT = "cifar10_binary_prefix test_batch"


def few_images(folder: Path) -> dict[str, Path]:
    """All lossless test records, 200 to train on and 24 novel pictures."""
    kept = {"data_batch_1.bin": 200 * 3073, "test_batch.bin": None}
    (folder / "cifar10").mkdir(parents=True)
    with ZipFile(shared_path("images/cifar10/cifar10_binary_prefix.zip")) as archive:
        for name, size in kept.items():
            data = archive.read(f"cifar-10-batches-bin/{name}")
            (folder / "cifar10" / name).write_bytes(data[:size])
    with ZipFile(shared_path("images/stl10_examples.zip")) as archive:
        (folder / "stl10").mkdir()
        for name in [n for n in sorted(archive.namelist())[:24] if not n.endswith("/")]:
            target = folder / "stl10" / Path(name).parent.name / Path(name).name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(archive.read(name))
    return {"cifar10": folder / "cifar10", "stl10": folder / "stl10"}


def test_a_real_classifier_by_file_has_its_published_accuracy(tmp_path):
    built(tmp_path, "resnet20", few_images(tmp_path / "raw"), ("stl10",))
    want = {row["network"]: row["correct"] for row in expected("cifar10_resnet_accuracy")
            if row["test_set"] == RIGHT}  # fmt: skip
    assert right(tmp_path, "resnet20") == pytest.approx(int(want["resnet20"]))
    runs = table(tmp_path, "runs")
    assert runs["origin"].to_list() == ["frozen"] and runs["seed"].to_list() == [None]
    assert table(tmp_path, "training").is_empty()
    sizes = table(tmp_path, "pictures").select("width", "height").unique()
    assert set(sizes.rows()) == {(32, 32), (96, 96)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_classifiers_equal_the_independent_numbers(tmp_path):
    known = {
        "cifar10.train": "cifar10/cifar10_jpeg_train_first1000.zip",
        "cifar10.test": "cifar10/cifar10_jpeg_test.zip",
    }
    jpeg = images_of(**known, stl10="stl10_examples.zip", imagenet="tiny_imagenet_subset.zip")
    lossless = few_images(tmp_path / "raw")
    for network in WEIGHTS:
        built(tmp_path / "lossless", network, lossless, ("stl10",))
        built(tmp_path / "jpeg", network, jpeg, ("imagenet", "stl10"))
    for row in expected("cifar10_resnet_accuracy"):
        lake = tmp_path / ("lossless" if row["test_set"] == RIGHT else "jpeg")
        assert right(lake, row["network"]) == pytest.approx(int(row["correct"]))
    lake = tmp_path / "jpeg"
    for row in expected("cifar10_resnet_scores"):
        if row["score"] == "accuracy":
            continue
        run_id = run_of(lake, row["network"], f"known-cifar10/{NOVEL[row['novel_set']]}")
        score = "knn" if row["score"] == "knn50" else row["score"]
        if score == "knn" and not KNN:
            found = neighbours(lake, run_id)
        else:
            found = [measured(lake, run_id, score, metric) for metric in ("auroc", "fpr95")]
        assert found == pytest.approx([float(row["auroc_or_accuracy"]), float(row["fpr95"])],
                                      abs=1e-4), row  # fmt: skip


def neighbours(lake: Path, run_id: str) -> list[float]:
    """AUROC and FPR95 of the distance to the 50th neighbour of normalised features."""
    from sklearn.metrics import roc_auc_score, roc_curve

    protocol = table(lake, "runs").filter(run_id=run_id)["protocol"].item()
    outputs = table(lake, "outputs").filter(run_id=run_id)
    both = outputs.join(table(lake, "splits").filter(protocol=protocol), on="sample_id")

    def features(split: str) -> np.ndarray:
        wide = np.stack(both.filter(split=split)["features"].to_numpy()).astype(np.float64)
        return wide / np.linalg.norm(wide, axis=1, keepdims=True)

    train, test = features("train"), features("test")
    squares = [
        np.partition(2 - 2 * part @ train.T, 49, axis=1)[:, 49] for part in np.split(test, [5000])
    ]
    novel = (both.filter(split="test")["role"] == "novel").to_numpy()
    rates = roc_curve(novel, np.concatenate(squares), drop_intermediate=False)
    return [roc_auc_score(novel, np.concatenate(squares)), rates[0][np.argmax(rates[1] >= 0.95)]]
