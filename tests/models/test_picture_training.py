"""Training of picture classifiers: presets, resuming bit for bit, what is kept, a real run."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError, SourceError, TrainingError
from storage.tensors import read_tensors, write_tensors
from tasks import models
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.trainer import rate_at
from tasks.models import load_model
from tasks.models.base import Fitting
from tasks.models.pictures import PictureClassifier
from tasks.scores.base import Outputs, Reference
from tests.models.test_pictures import CLASSIFIERS, NETWORKS
from tests.shared import shared_path

torch.set_num_threads(1)


def tiny(name: str = "classifier", **changes: Any) -> Any:
    kind = models.find(name)
    values = {"epochs": 3, "batch_size": 16, "evaluations": 2} | changes
    if name == "cpc":
        values["cpc"] = {"patch": 8, "context": 8}
    shape = kind.network_settings("cifar", "small", {"width": 4, "dropout": 0.1})
    return kind(kind.resolve("small", values, "cifar"), "cifar", shape)


def pictures(count: int = 48, seed: int = 0, side: int = 16) -> Samples:
    """Three classes: bright above, bright on the left, bright in the middle; noise on top."""
    rng = np.random.default_rng(seed)
    base = np.full((3, side, side), 60)
    half, quarter = side // 2, side // 4
    base[0, :half], base[1, :, :half], base[2, quarter:-quarter, quarter:-quarter] = 190, 190, 190
    labels = np.arange(count) % 3
    pixels = base[labels][..., None] + rng.normal(0, 25, (count, side, side, 3))
    return samples_of(pixels.clip(0, 255).astype(np.uint8), labels)


def samples_of(pixels: np.ndarray, labels: np.ndarray) -> Samples:
    ids = [str(row) for row in range(len(pixels))]
    return Samples(ids, labels.astype(np.int64), {"images": pixels})


def fit(model: Any, work: Path | None = None, samples: Samples | None = None, **more: Any) -> Any:
    fitting = Fitting(seed=5, device="cpu", work=work, **more)
    return model.fit(samples or pictures(), None, fitting)


class Killed(Exception):
    pass


def killer(at: int):
    def progress(epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        if epoch == at:
            raise Killed

    return progress


# ---------------------------------------------------------------- presets


def test_paper_presets_have_the_constants_of_the_paper():
    every = [models.find("classifier").resolve("paper", {}, name) for name in NETWORKS]
    assert [s.batch_size for s in every] == [4 * 128, 4 * 64, 64]
    assert [s.epoch_samples for s in every] == [50_000, 10_000, None]
    for settings in every:
        assert (settings.epochs, settings.milestones, settings.decay) == (200, (60, 120, 160), 0.2)
        assert (settings.learning_rate, settings.momentum) == (0.1, 0.9)
        assert (settings.optimizer, settings.nesterov) == ("sgd", True)
        assert settings.weight_decay == 5e-4 and settings.evaluations == 10
    cifar, _, imagenet = every
    assert (imagenet.crop, imagenet.padding, cifar.crop, cifar.padding) == (224, 0, None, 1 / 8)


def test_settings_that_do_not_fit_are_refused():
    for name, setting, value in (
        ("cpc", "cpc", {"patch": 12, "margin": 4}),
        ("centre_mask", "mask", {"side": 0.9}),
    ):
        with pytest.raises(ConfigError, match=f"{name}: wrong settings: {setting}: "):
            models.find(name).resolve("paper", {setting: value}, "cifar")
    with pytest.raises(ConfigError, match="classifier has no preset 'big'; there are: paper, sm"):
        models.find("classifier").resolve("big", {}, "cifar")
    with pytest.raises(ConfigError, match=r"network is None, expected one of .*cifar"):
        models.find("classifier")("small")


def test_the_rate_drops_to_a_fifth_after_60_120_and_160_epochs():
    settings = models.find("classifier").resolve("paper", {}, "cifar")
    rates = [rate_at(settings, 0.1, epoch) for epoch in (1, 60, 61, 120, 121, 160, 161, 200)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008])


def test_one_cycle_rises_and_falls():
    settings = tiny(epochs=10, rise=0.2).settings
    rates = [rate_at(settings, 0.5, 1 + step // 10, step % 10, 10) for step in range(100)]
    assert max(rates) == pytest.approx(0.5) and np.argmax(rates) == 19
    assert (np.diff(rates[:20]) > 0).all() and (np.diff(rates[19:]) < 0).all()


def test_the_last_epochs_are_kept(tmp_path):
    def kept(**changes: int) -> list[int]:
        model = tiny(epochs=200, **changes)
        return [epoch for epoch in range(1, 201) if model.keeps(epoch)]

    assert kept(evaluations=10) == list(range(191, 201))
    assert kept(evaluations=3, evaluate_every=5) == [190, 195, 200]
    found = []
    last = tiny(evaluations=2)
    fit(last, keep=lambda model, epoch: found.append((epoch, model.fingerprint())))
    assert [epoch for epoch, _ in found] == [2, 3]
    assert found[0][1] != found[1][1] == last.fingerprint()


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_killed_training_ends_with_the_same_bits(name, tmp_path):
    changes = {"checkpoint_every": 1}
    whole, killed, again = (tiny(name, **changes) for _ in range(3))
    history = fit(whole, tmp_path / "whole")
    with pytest.raises(Killed):
        fit(killed, tmp_path / "killed", progress=killer(2))
    torch.manual_seed(99)
    rows = []
    found = fit(again, tmp_path / "killed", progress=lambda *row: rows.append(row[0]))
    assert rows == [3]
    assert again.fingerprint() == whole.fingerprint() and history.equals(found)
    learned = name not in ("classifier", "centre_mask", "light_classifier")
    assert ("auxiliary_loss" in history.columns) is learned


@pytest.mark.parametrize("name", ["rotation", "cpc", "centre_mask"])
@pytest.mark.parametrize(("network", "side"), [("stl", 96), ("imagenet", 256)])
def test_small_networks_take_pictures_of_the_real_size(network, side, name):
    kind = models.find(name)
    settings = kind.resolve("small", {"epochs": 1, "batch_size": 4, "epoch_samples": 8}, network)
    model = kind(settings, network, kind.network_settings(network, "small"))
    fit(model, samples=pictures(8, side=side))
    assert model.outputs(pictures(8, side=side)).features.shape == (8, 64)


def test_a_seed_decides_the_weights():
    made = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        model = tiny("rotation")
        model.fit(pictures(), None, Fitting(seed=seed, device="cpu"))
        made.append(model.fingerprint())
    assert made[0] == made[1] != made[2]


def test_a_classifier_learns():
    model = tiny(epochs=8)
    history = fit(model)
    assert history.columns[:3] == ["epoch", "rate", "loss"]
    assert history["loss"][-1] < history["loss"][0]
    test = pictures(30, seed=1)
    assert (model.outputs(test).logits.argmax(1) == test.labels).mean() > 0.9


def test_outputs_go_with_the_head_and_do_not_depend_on_the_batch():
    model = tiny()
    fit(model)
    test = pictures(20, seed=3)
    found = model.outputs(test)
    assert found.logits.shape == (20, 3) and found.logits.dtype == np.float32
    assert found.features.shape == (20, 16)
    Reference(Outputs(found.logits, found.features), test.labels, head=model.head())
    alone = model.outputs(test.take(np.array([7])))
    for name in ("logits", "features"):
        one, every = getattr(alone, name)[0], getattr(found, name)[7]
        assert np.allclose(one, every, rtol=1e-4, atol=1e-5)


def odin_of(base: PictureClassifier, **changes: Any) -> Any:
    kind = models.find("odin")
    model = kind(kind.resolve("small", {"base": base.name, **changes}, "cifar"))
    model.fit(pictures(), None, Fitting(device="cpu"), bases=[base])
    return model


def test_odin_goes_over_a_classifier():
    base = tiny("rotation")
    fit(base)
    test = pictures(20, seed=3)
    found = odin_of(base).outputs(test)
    assert found.novelty.dtype == np.float64 and len(np.unique(found.novelty)) == 20
    assert (found.predicted == base.outputs(test).logits.argmax(1)).all()
    still = odin_of(base, epsilon=0.0, temperature=1.0).outputs(test).novelty
    odds = np.exp(base.outputs(test).logits.astype(np.float64))
    assert np.allclose(still, -(odds / odds.sum(1, keepdims=True)).max(1))


def test_whole_pictures_are_scored_where_that_is_asked_for():
    base = tiny(crop=12, padding=0.0)
    fit(base)
    test = pictures(8, seed=3)
    cut = np.pad(test.images()[:, 2:14, 2:14], [(0, 0), (2, 2), (2, 2), (0, 0)])
    middle = samples_of(cut, test.labels)
    assert np.allclose(base.outputs(test).logits, base.outputs(middle).logits)
    for whole in (False, True):
        odin = odin_of(base, whole_picture=whole, temperature=1.0)
        same = np.allclose(odin.outputs(test).novelty, odin.outputs(middle).novelty)
        assert same is not whole


def test_a_saved_classifier_is_the_same(tmp_path):
    model = tiny("rotation")
    fit(model)
    model.save(tmp_path / "m.safetensors")
    kept = load_model(tmp_path / "m.safetensors", device="cpu")
    test = pictures(10, seed=3)
    first, second = model.outputs(test), kept.outputs(test)
    assert (first.logits == second.logits).all() and (first.features == second.features).all()
    assert kept.settings.auxiliary_weight == 0.5 and kept.name == "rotation"
    assert kept.record == model.record and kept.network_shape.width == 4
    assert set(read_tensors(tmp_path / "m.safetensors")) == set(model.state())


def test_a_checkpoint_of_another_training_and_other_files_are_refused(tmp_path):
    fit(tiny(), tmp_path)
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tiny(learning_rate=0.01), tmp_path)
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tiny(), tmp_path, pictures(seed=9))
    write_tensors(tmp_path / "m.safetensors", {"a": np.zeros(1)}, {"x": "y"})
    with pytest.raises(SourceError, match="holds no model"):
        load_model(tmp_path / "m.safetensors")


def test_an_epoch_is_as_long_as_the_settings_say(monkeypatch):
    steps: list[np.ndarray] = []
    losses = PictureClassifier.losses
    monkeypatch.setattr(
        PictureClassifier,
        "losses",
        lambda self, batch: steps.append(batch.rows) or losses(self, batch),
    )
    fit(tiny(epochs=1, epoch_samples=100))
    # 100 // 16 batches of 16 from 48 pictures: two whole passes.
    assert [len(rows) for rows in steps] == [16] * 6
    assert (np.bincount(np.concatenate(steps)) == 2).all()


def test_mistakes_are_one_sentence():
    samples = pictures()
    pixels, labels = samples.images(), samples.labels
    with pytest.raises(ConfigError, match=r"16 training samples are labelled novel \(-1\)"):
        fit(tiny(), samples=samples_of(pixels, np.where(labels == 0, NOVEL, labels)))
    with pytest.raises(ConfigError, match="all pictures have one colour"):
        fit(tiny(), samples=samples_of(np.full_like(pixels, 7), labels))
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, H, W, 3\)"):
        fit(tiny(), samples=samples_of(pixels[..., :2], labels))
    with pytest.raises(ConfigError, match="pictures of 12 x 16 pixels cannot be turned"):
        fit(tiny("rotation"), samples=samples_of(pixels[:, :, :12], labels))
    with pytest.raises(TrainingError, match=r"diverged in epoch 1.*lower learning_rate"):
        fit(tiny(learning_rate=1e30, schedule="steps"))


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
def test_a_small_run_beats_chance_on_real_cifar():
    """Without airplanes: nine classes, chance 11 %."""
    (pixels, classes), (tested, truth) = cifar("train_first1000"), cifar("test")
    known = (classes > 0) & (np.arange(len(classes)) % 2 == 0)
    some = (np.arange(len(truth)) % 5 == 0) & (truth > 0)
    model = models.find("rotation")("small", "cifar")
    model.settings = model.settings.model_copy(update={"epochs": 3})
    train = samples_of(pixels[known], classes[known] - 1)
    history = model.fit(train, None, Fitting(seed=0, device="cpu"))
    predicted = model.outputs(samples_of(tested[some], truth[some])).logits.argmax(1)
    assert (predicted == truth[some] - 1).mean() > 0.40
    # Four transforms: chance is log 4 = 1.39.
    assert history["auxiliary_loss"][-1] < 1.2
