"""A frozen network with a linear head: features as the network makes them, a head that learns."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from schemas.errors import ConfigError
from tasks.features.backbones import middle_square
from tasks.learning.samples import NOVEL, Samples
from tasks.models import load_model
from tasks.models.backbone import SMALL_SIDE, Backbone
from tasks.models.base import Fitting
from tasks.scores.base import Reference
from tests.features.test_resnet import cifar_shape, random_state
from tests.models.synthetic import samples


@pytest.fixture
def by_file(tmp_path):
    torch.save(random_state(cifar_shape(20, width=8)), tmp_path / "r.th")
    changes = {"weights": tmp_path / "r.th", "epochs": 40, "batch_size": 16, "learning_rate": 0.01}
    return Backbone.resolve("small", changes)


def fitted(settings, train: Samples) -> Backbone:
    model = Backbone(settings)
    model.fit(train, None, Fitting(seed=1, device="cpu"))
    return model


def test_the_head_learns_classes_that_the_file_does_not_know(by_file):
    train, test = (samples(("images",), 60, 0, seed=seed) for seed in (1, 2))
    model = fitted(by_file, train)
    outputs = model.outputs(test)
    assert outputs.logits.shape == (60, 3) and outputs.features.shape == (60, 32)
    assert (outputs.logits.argmax(1) == test.labels).mean() > 0.9
    Reference(train=outputs, head=model.head())  # refuses a head that does not make the logits


def test_pictures_and_their_features_are_the_same_to_it(by_file, tmp_path):
    train = samples(("images",), 24, 0, seed=1)
    model = fitted(by_file, train)
    model.save(tmp_path / "m.safetensors")
    by_features = load_model(tmp_path / "m.safetensors", device="cpu")
    rows = {"features": model.embed(train)}
    given = Samples(train.ids, train.labels, rows)
    expected = model.outputs(train)
    for one in (by_features, fitted(by_file, given)):
        np.testing.assert_array_equal(one.outputs(given).logits, expected.logits)
    assert (tmp_path / "m.safetensors").stat().st_size < 10_000  # the head alone


def test_features_are_the_networks_own_in_any_batch(by_file):
    images = samples(("images",), 20, 4, seed=3)
    model = Backbone(by_file)
    model.prepare(device="cpu")
    every = model.embed(images)
    alone = model.embed(images.take(np.array([7])))
    np.testing.assert_allclose(alone[0], every[7], rtol=1e-4, atol=1e-5)
    pixels = torch.from_numpy(images.images()[:]).permute(0, 3, 1, 2).float() / 255
    small = functional.interpolate(
        pixels, size=(32, 32), mode="bicubic", align_corners=False, antialias=True
    ).clamp(0, 1)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    deviation = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    expected = model.frozen.embed((small - mean) / deviation)
    np.testing.assert_allclose(every, expected.numpy(), rtol=1e-3, atol=1e-4)


def test_the_middle_is_shown_and_the_item_bar_is_not():
    images = torch.zeros((1, 50, 60, 3), dtype=torch.uint8)
    images[:, 40:] = 255
    shown = middle_square(images, 28, 0.7, item_bar_rows=10)
    assert shown.shape == (1, 3, 28, 28) and not shown.any()
    images[:, 6:34, 16:44] = 200
    whole = middle_square(images, 28, 0.7, item_bar_rows=10)
    torch.testing.assert_close(whole, torch.full((1, 3, 28, 28), 200 / 255))


def test_without_a_file_it_is_efficientnet_of_the_package():
    settings = Backbone.resolve("small")
    assert settings.side == SMALL_SIDE and Backbone.resolve("paper").side is None
    assert list(Backbone.weights_files(settings)) == ["efficientnet_lite0"]
    model = Backbone(Backbone.resolve("small", {"side": 64}))
    model.prepare(device="cpu")
    given = samples(("images",), 30, 10, seed=4)
    rows = model.embed(given)
    assert rows.shape == (40, 1280)
    known = rows[given.labels != NOVEL]
    far = np.linalg.norm(rows[:, None] - known[None], axis=2)
    far[far == 0] = np.inf
    assert far.min(1)[30:].min() > far.min(1)[:30].max()


def test_labels_are_needed(by_file):
    given = samples(("images",), 6, 0, seed=1)
    with pytest.raises(ConfigError, match="needs labels"):
        fitted(by_file, Samples(given.ids, None, given.arrays))
