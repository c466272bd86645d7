"""Training of picture classifiers: presets, resuming bit for bit, what is kept, a real run."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from schemas.config import make_config
from schemas.errors import ConfigError, SourceError, TrainingError
from storage.tensors import read_header, read_tensors
from tasks.scores.base import Outputs, Reference
from tasks.semantic import models, training
from tasks.semantic.models.base import NetworkModel
from tasks.semantic.models.updates import rate_at, rows_of
from tasks.semantic.presets import AuxiliarySetup, CpcSetup, MaskSetup, Setup, setup_of
from tasks.semantic.training import Evaluation, load, outputs, train
from tests.semantic.test_semantic_models import Held
from tests.shared import shared_path

torch.set_num_threads(1)
NETWORKS = [n for n in models.names() if issubclass(models.find(n), NetworkModel)]


def tiny(kind: type[Setup] = Setup, **changes: object) -> Setup:
    values = setup_of("cifar", "small", kind).model_dump() | {
        "network": {**setup_of("cifar", "small").network.model_dump(), "width": 4, "dropout": 0.1},
        "epochs": 3,
        "batch_size": 16,
        "evaluations": 2,
    }
    return kind(**values | changes)


def pictures(count: int = 48, seed: int = 0, side: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Three classes: bright above, bright on the left, bright in the middle; noise on top."""
    rng = np.random.default_rng(seed)
    base = np.full((3, side, side), 60)
    half, quarter = side // 2, side // 4
    base[0, :half], base[1, :, :half], base[2, quarter:-quarter, quarter:-quarter] = 190, 190, 190
    labels = np.arange(count) % 3
    pixels = base[labels][..., None] + rng.normal(0, 25, (count, side, side, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels.astype(np.int64)


def evaluation(seed: int = 1) -> Evaluation:
    pixels, labels = pictures(30, seed)
    anomalies = np.random.default_rng(seed).integers(0, 256, (10, 16, 16, 3)).astype(np.uint8)
    return Evaluation(Held(np.concatenate([pixels, anomalies])), np.append(labels, [-1] * 10))


def fit(work: Path, name: str = "classifier", setup: Setup | None = None, **more):
    pixels, labels = pictures()
    setup = setup or tiny(models.find(name).configuration)
    return train(setup, name, Held(pixels), labels, seed=5, work=work, device="cpu", **more)


def weights(work: Path) -> dict[str, torch.Tensor]:
    return read_tensors(work / training.MODEL)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


class Killed(Exception):
    pass


def killer(at: int):
    def progress(epoch: int, epochs: int, row) -> None:
        if epoch == at:
            raise Killed

    return progress


# ---------------------------------------------------------------- presets


def test_paper_presets_have_the_constants_of_the_paper():
    cifar, stl, imagenet = (setup_of(name, "paper") for name in ("cifar", "stl", "imagenet"))
    assert [s.batch_size for s in (cifar, stl, imagenet)] == [4 * 128, 4 * 64, 64]
    assert [s.epoch_pictures for s in (cifar, stl, imagenet)] == [50_000, 10_000, None]
    for setup in (cifar, stl, imagenet):
        assert (setup.epochs, setup.milestones, setup.decay) == (200, (60, 120, 160), 0.2)
        assert (setup.learning_rate, setup.momentum, setup.weight_decay) == (0.1, 0.9, 5e-4)
        assert setup.evaluations == 10
    assert (imagenet.crop, imagenet.padding, cifar.crop, cifar.padding) == (224, 0, None, 1 / 8)


def test_settings_that_do_not_fit_are_refused():
    for kind, setting, value in (
        (CpcSetup, "cpc", {"patch": 12, "margin": 4}),
        (MaskSetup, "mask", {"side": 0.9}),
    ):
        with pytest.raises(ConfigError, match=f"wrong settings: {setting}: "):
            make_config(kind, {setting: value})
    with pytest.raises(ConfigError, match="stem"):
        make_config(Setup, {"network": {"stem": 4}})


def test_wrong_names_are_one_sentence():
    with pytest.raises(ConfigError, match="no network 'resnet', only cifar, stl, imagenet"):
        setup_of("resnet", "paper")
    with pytest.raises(ConfigError, match="no preset 'big', only paper, small"):
        setup_of("cifar", "big")


def test_the_rate_drops_to_a_fifth_after_60_120_and_160_epochs():
    setup = setup_of("cifar", "paper")
    rates = [rate_at(setup, (epoch - 1) * 97, 97) for epoch in (1, 60, 61, 120, 121, 160, 161, 200)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008])


def test_one_cycle_rises_and_falls():
    setup = tiny(epochs=10, rise=0.2, learning_rate=0.5)
    rates = [rate_at(setup, step, 10) for step in range(100)]
    assert max(rates) == pytest.approx(0.5) and np.argmax(rates) == 19
    assert (np.diff(rates[:20]) > 0).all() and (np.diff(rates[19:]) < 0).all()


def test_the_last_epochs_are_evaluated():
    setup = setup_of("cifar", "paper")
    assert [e for e in range(1, 201) if setup.evaluated(e)] == list(range(191, 201))
    every = setup.model_copy(update={"evaluate_every": 5, "evaluations": 3})
    assert [e for e in range(1, 201) if every.evaluated(e)] == [190, 195, 200]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 60))
def test_rows_are_shuffled_passes_wherever_one_begins(count, first, length):
    whole = rows_of(3, 0, count, 0, first + length)
    assert (rows_of(3, 0, count, first, length) == whole[first:]).all()
    full = whole[: len(whole) // count * count].reshape(-1, count)
    assert (np.sort(full, 1) == np.arange(count)).all()


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", NETWORKS)
def test_a_killed_training_ends_with_the_same_bits(name, tmp_path):
    setup = tiny(models.find(name).configuration)
    if name == "cpc":
        patches = {"patch": 8, "context": 8}
        setup = tiny(CpcSetup, cpc=setup.model_dump()["cpc"] | patches)
    whole = fit(tmp_path / "whole", name, setup, test=evaluation())
    with pytest.raises(Killed):
        fit(tmp_path / "killed", name, setup, test=evaluation(), progress=killer(1))
    assert not (tmp_path / "killed" / training.MODEL).exists()
    torch.manual_seed(99)
    again = fit(tmp_path / "killed", name, setup, test=evaluation())
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert whole.history.equals(again.history)
    assert not list((tmp_path / "killed").glob("check*"))
    assert whole.history["auxiliary_loss"].null_count() == (
        3 if name in ("classifier", "centre_mask") else 0
    )


@pytest.mark.parametrize("name", ["rotation", "cpc", "centre_mask"])
@pytest.mark.parametrize(("network", "side"), [("stl", 96), ("imagenet", 256)])
def test_small_networks_take_pictures_of_the_real_size(network, side, name, tmp_path):
    pixels, labels = pictures(8, side=side)
    setup = setup_of(network, "small", models.find(name).configuration)
    changes = {"epochs": 1, "batch_size": 4, "epoch_pictures": 8}
    setup = setup.model_copy(update=changes)
    fitted = train(setup, name, Held(pixels), labels, seed=0, work=tmp_path, device="cpu")
    assert outputs(fitted, Held(pixels))["features"].shape == (8, 64)


def test_a_seed_decides_the_weights(tmp_path):
    pixels, labels = pictures()
    made, setup = {}, tiny(AuxiliarySetup)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(seed + len(folder))
        train(setup, "rotation", Held(pixels), labels, seed=seed, work=tmp_path / folder)
        made[folder] = weights(tmp_path / folder)
    assert same(made["a"], made["b"]) and not same(made["a"], made["c"])


def test_a_classifier_learns_and_is_measured_on_test(tmp_path):
    test = evaluation()
    rows = []
    fitted = fit(tmp_path, setup=tiny(epochs=8), test=test, progress=lambda *row: rows.append(row))
    history = fitted.history
    assert history.columns[:5] == ["epoch", "rate", "loss", "accuracy", "auxiliary_loss"]
    assert history["epoch"].to_list() == list(range(1, 9)) == [row[0] for row in rows]
    assert history["test_accuracy"].is_null().to_list() == [True] * 6 + [False] * 2
    assert history["test_accuracy"][-1] > 0.9 and history["loss"][-1] < history["loss"][0]
    found = outputs(fitted, test.pictures)
    novel = test.labels == -1
    odds = np.exp(found["logits"] - found["logits"].max(1, keepdims=True))
    for name, score in (("ap_msp", -1 / odds.sum(1)), ("ap_odin", found["odin"])):
        wanted = average_precision_score(novel, score.astype(np.float64))
        assert history[name][-1] == pytest.approx(wanted, abs=1e-6)
    right = (found["logits"].argmax(1) == test.labels)[~novel].mean()
    assert history["test_accuracy"][-1] == pytest.approx(right)


def test_outputs_go_with_the_head_and_do_not_depend_on_the_batch(tmp_path):
    fitted = fit(tmp_path)
    pixels, labels = pictures(20, seed=3)
    found = outputs(fitted, Held(pixels))
    assert found["logits"].shape == (20, 3) and found["logits"].dtype == np.float32
    assert found["features"].shape == (20, 16) and found["odin"].dtype == np.float64
    Reference(Outputs(found["logits"], found["features"]), labels, head=fitted.head())
    plain = outputs(fitted, Held(pixels), with_odin=False)
    assert set(plain) == {"logits", "features"}
    assert np.allclose(plain["logits"], found["logits"], atol=1e-5)
    alone = outputs(fitted, Held(pixels[7:8]))
    for name, value in alone.items():
        assert np.allclose(value[0], found[name][7], rtol=1e-4, atol=1e-5)


def test_whole_pictures_are_scored_where_that_is_asked_for(tmp_path):
    odin = {"whole_picture": True, "temperature": 1.0}
    fitted = fit(tmp_path, setup=tiny(crop=12, padding=0.0, odin=odin))
    pixels, _ = pictures(8, seed=3)
    found = outputs(fitted, Held(pixels))
    middle = outputs(fitted, Held(np.pad(pixels[:, 2:14, 2:14], [(0, 0), (2, 2), (2, 2), (0, 0)])))
    assert np.allclose(found["logits"], middle["logits"])
    assert not np.allclose(found["odin"], middle["odin"])


def test_a_saved_classifier_is_the_same(tmp_path):
    fitted = fit(tmp_path, "rotation")
    path = tmp_path / training.MODEL
    kept = load(path, device="cpu")
    pixels, _ = pictures(10, seed=3)
    first, second = outputs(fitted, Held(pixels)), outputs(kept, Held(pixels))
    assert all((value == second[name]).all() for name, value in first.items())
    assert kept.setup.auxiliary_weight == 0.5 and kept.model == "rotation"
    assert kept.setup == AuxiliarySetup(**read_header(path)["setup"])
    assert kept.history.equals(fitted.history)


def test_a_trained_model_is_not_trained_again_and_another_is_refused(tmp_path):
    fit(tmp_path)
    stamp = (tmp_path / training.MODEL).stat().st_mtime_ns
    fit(tmp_path, progress=killer(1))
    assert (tmp_path / training.MODEL).stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tmp_path, setup=tiny(learning_rate=0.01))
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tmp_path, test=evaluation())


def test_other_files_are_refused(tmp_path):
    from storage.tensors import write_tensors

    write_tensors(tmp_path / "m.safetensors", {"a": np.zeros(1)}, {"detector": "x"})
    with pytest.raises(SourceError, match="holds no picture classifier"):
        load(tmp_path / "m.safetensors")


def test_an_epoch_is_as_long_as_the_setup_says(tmp_path, monkeypatch):
    from tasks.semantic.models.updates import Updates

    taken: list[np.ndarray] = []
    step = Updates.class_step
    monkeypatch.setattr(
        Updates, "class_step", lambda self, rows, o: taken.append(rows) or step(self, rows, o)
    )
    fit(tmp_path, setup=tiny(epochs=1, epoch_pictures=100))
    # 100 // 16 batches of 16 from 48 pictures: two whole passes.
    assert [len(rows) for rows in taken] == [16] * 6
    assert (np.bincount(np.concatenate(taken)) == 2).all()


def test_mistakes_are_one_sentence(tmp_path):
    pixels, labels = pictures()

    def run(labels: np.ndarray, test: Evaluation | None = None, pixels: np.ndarray = pixels):
        train(tiny(), "classifier", Held(pixels), labels, seed=0, work=tmp_path, test=test)

    with pytest.raises(ConfigError, match="expected 0 to K-1 without gaps"):
        run(labels + 1)
    with pytest.raises(ConfigError, match="expected one int64"):
        run(labels.astype(np.int32))
    with pytest.raises(ConfigError, match="0 of 48 pictures are anomalies"):
        Evaluation(Held(pixels), labels)
    with pytest.raises(ConfigError, match="a label is 3, but the classes are 0 to 2"):
        run(labels, Evaluation(Held(pixels), np.where(labels == 0, -1, labels + 1)))
    with pytest.raises(ConfigError, match="all pictures have one colour"):
        run(labels, pixels=np.full_like(pixels, 7))
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, H, W, 3\)"):
        run(labels, pixels=pixels[..., :2])
    with pytest.raises(ConfigError, match=r"pictures of \(16, 12\) cannot be turned"):
        sideways = Held(pixels[:, :, :12])
        train(tiny(AuxiliarySetup), "rotation", sideways, labels, seed=0, work=tmp_path)
    with pytest.raises(TrainingError, match=r"diverged in epoch 1.*lower learning_rate"):
        setup = tiny(learning_rate=1e30, schedule="steps")
        train(setup, "classifier", Held(pixels), labels, seed=0, work=tmp_path)


# ---------------------------------------------------------------- real pictures


def cifar(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and classes by name, 0 airplane to 9 truck."""
    import cv2

    with zipfile.ZipFile(shared_path(f"images/cifar10/cifar10_jpeg_{part}.zip")) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        data = [np.frombuffer(archive.read(name), np.uint8) for name in names]
    pixels = np.stack([cv2.imdecode(row, cv2.IMREAD_COLOR_RGB) for row in data])
    classes = sorted({name.split("/")[-2] for name in names})
    return pixels, np.array([classes.index(name.split("/")[-2]) for name in names])


@pytest.mark.slow
def test_a_small_run_beats_chance_on_real_cifar(tmp_path):
    """Without airplanes: nine classes, chance 11 %. No promise of the anomalies: after so short a
    training their average precision is still that of a random detector, 10 %."""
    (pixels, classes), (tested, truth) = cifar("train_first1000"), cifar("test")
    known = (classes > 0) & (np.arange(len(classes)) % 2 == 0)
    some = np.arange(len(truth)) % 5 == 0
    test = Evaluation(Held(tested[some]), truth[some].astype(np.int64) - 1)
    setup = setup_of("cifar", "small", AuxiliarySetup).model_copy(update={"epochs": 3})
    fitted = train(
        setup,
        "rotation",
        Held(pixels[known]),
        classes[known].astype(np.int64) - 1,
        seed=0,
        work=tmp_path,
        device="cpu",
        test=test,
    )
    last = fitted.history.row(-1, named=True)
    assert last["test_accuracy"] > 0.40
    # Four transforms: chance is log 4 = 1.39.
    assert last["auxiliary_loss"] < 1.2
