"""A picture network on views of clouds: one vector a cloud, in any company, and a head on it."""

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks.learning.samples import NOVEL, Samples
from tasks.models import load_model
from tasks.models.backbone import SMALL_SIDE, Backbone
from tasks.models.base import Fitting
from tasks.models.view_backbone import ViewBackbone
from tasks.scores.base import Reference
from tests.features.test_resnet import cifar_shape, random_state


def clouds(count: int, seed: int = 0, points: int = 300) -> Samples:
    """Flat, tall and long boxes; the rest, a fourth of them, are spheres, which are novel."""
    rng = np.random.default_rng(seed)
    sizes = np.array([[1, 0.1, 1], [0.2, 1, 0.2], [1, 0.2, 0.2]])
    rows, labels = [], []
    for number in range(count):
        kind = number % 4
        cloud = rng.normal(size=(points, 3)) if kind == 3 else rng.uniform(-1, 1, (points, 3))
        cloud /= np.linalg.norm(cloud, axis=1, keepdims=True) if kind == 3 else 1
        cloud = cloud * (1 if kind == 3 else sizes[kind] * rng.uniform(0.8, 1.2, 3))
        rows.append(cloud)
        labels.append(NOVEL if kind == 3 else kind)
    ids = [str(number) for number in range(count)]
    return Samples(ids, np.array(labels), {"clouds": np.array(rows, np.float32)})


@pytest.fixture
def settings(tmp_path):
    torch.save(random_state(cifar_shape(20, width=8)), tmp_path / "r.th")
    changes = {"weights": tmp_path / "r.th", "views": 3, "epochs": 30, "learning_rate": 0.01}
    return ViewBackbone.resolve("small", changes)


def prepared(settings) -> ViewBackbone:
    model = ViewBackbone(settings)
    model.prepare(device="cpu")
    return model


def test_without_a_file_it_is_efficientnet_of_the_package():
    small, paper = ViewBackbone.resolve("small"), ViewBackbone.resolve("paper")
    assert small == paper.model_copy(update={"side": SMALL_SIDE})
    assert list(ViewBackbone.weights_files(small)) == ["efficientnet_lite0"]
    assert set(ViewBackbone.embeds) <= set(ViewBackbone.configuration.model_fields)
    model = prepared(ViewBackbone.resolve("small", {"side": 32, "views": 2}))
    assert model.embed(clouds(2)).shape == (2, 1280)


def test_the_head_learns_shapes_and_the_unknown_lie_far_from_them(settings, tmp_path):
    train, test = clouds(32, seed=1).known(), clouds(32, seed=2)
    model = ViewBackbone(settings)
    model.fit(train, None, Fitting(seed=1, device="cpu"))
    outputs, known = model.outputs(test), test.labels != NOVEL
    assert (outputs.logits.argmax(1) == test.labels)[known].mean() > 0.9
    Reference(train=outputs, head=model.head())  # refuses a head that does not make the logits
    far = np.linalg.norm(outputs.features[:, None] - model.outputs(train).features[None], axis=2)
    assert np.median(far.min(1)[~known]) > np.quantile(far.min(1)[known], 0.9)
    model.save(tmp_path / "m.safetensors")
    again = load_model(tmp_path / "m.safetensors", device="cpu")
    rows = Samples(test.ids, test.labels, {"features": outputs.features})
    np.testing.assert_array_equal(again.outputs(rows).logits, outputs.logits)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_it_pools_what_the_model_of_pictures_makes_of_each_view(settings, pooling):
    model = prepared(settings.model_copy(update={"pooling": pooling}))
    given = clouds(2)
    pictures = model.pictures(torch.from_numpy(given.array("clouds")[:]), model.turns())
    plain = Backbone(Backbone.resolve(None, {"weights": settings.weights, "shown": 1}))
    plain.prepare(device="cpu")
    rows = plain.embed(Samples.unnamed(images=pictures.flatten(0, 1).numpy())).reshape(2, 3, -1)
    expected = rows.max(1) if pooling == "max" else rows.mean(1)
    np.testing.assert_allclose(model.embed(given), expected, rtol=1e-4, atol=1e-5)


def test_a_vector_does_not_depend_on_other_clouds(settings):
    model, given = prepared(settings), clouds(5)
    every = model.embed(given)
    for row in (4, 1):
        np.testing.assert_array_equal(model.embed(given.take(np.array([row])))[0], every[row])


def test_a_density_shows_fewer_points_as_the_setting_does(settings):
    given = clouds(3)
    sparse = Samples(given.ids, None, given.arrays, about={"points": 40})
    every, seen = (prepared(settings).embed(samples) for samples in (given, sparse))
    trained = prepared(settings.model_copy(update={"points": 40})).embed(given)
    np.testing.assert_array_equal(seen, trained)
    assert np.abs(seen - every).max() > 1e-3
    whole = Samples(given.ids, None, given.arrays, about={"points": 10_000})
    np.testing.assert_array_equal(prepared(settings).embed(whole), every)


def test_a_cloud_of_one_place_is_seen_and_one_without_points_is_refused(settings):
    model = prepared(settings)
    assert np.isfinite(model.embed(Samples.unnamed(clouds=np.ones((1, 9, 3), np.float32)))).all()
    with pytest.raises(ConfigError, match="clouds without points"):
        model.embed(Samples.unnamed(clouds=np.ones((1, 0, 3), np.float32)))
    with pytest.raises(ConfigError, match=r"expected float32 \(shapes, points, 3\)"):
        model.embed(Samples.unnamed(clouds=np.ones((1, 9, 2), np.float32)))
    assert model.embed(clouds(4).take(np.array([], int))).shape[0] == 0
