"""A classifier by file is used as it is: its own logits, saved whole, of the right classes only."""

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks.learning.samples import Samples
from tasks.models import load_model
from tasks.models.base import Fitting
from tasks.models.pretrained import Pretrained
from tasks.scores.base import Reference
from tests.features.test_resnet import cifar_shape, random_state

SHAPE = cifar_shape(20, width=4, classes=3)


def pictures(classes: int = 3) -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(6, dtype=np.int64) % classes
    return Samples(list("abcdef"), labels, {"images": images})


def fitted(path) -> Pretrained:
    model = Pretrained(Pretrained.resolve(None, {"weights": path, "scoring_batch": 4}))
    history = model.fit(pictures(), None, Fitting(device="cpu"))
    assert history.is_empty()
    return model


@pytest.fixture
def path(tmp_path):
    torch.save(random_state(SHAPE), tmp_path / "three.th")
    return tmp_path / "three.th"


def test_it_puts_out_what_the_network_of_the_file_computes(path):
    model = fitted(path)
    outputs = model.outputs(pictures())
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    values = (pictures().images()[:] / 255 - mean) / deviation
    inputs = torch.from_numpy(values.transpose(0, 3, 1, 2).copy()).float()
    expected = model.network.embed(inputs)
    np.testing.assert_allclose(outputs.features, expected.numpy(), rtol=1e-4, atol=1e-5)
    state = random_state(SHAPE)
    logits = expected @ state["fc.weight"].T + state["fc.bias"]
    np.testing.assert_allclose(outputs.logits, logits.numpy(), rtol=1e-4, atol=1e-5)
    Reference(train=outputs, head=model.head())  # refuses a head that does not make the logits


def test_saved_whole_it_needs_no_file(path, tmp_path):
    model = fitted(path)
    model.save(tmp_path / "model.safetensors")
    path.unlink()
    again = load_model(tmp_path / "model.safetensors", device="cpu")
    given = pictures()
    np.testing.assert_array_equal(again.outputs(given).logits, model.outputs(given).logits)
    assert again.record == model.record and again.record["kind"] == "resnet"


def test_other_classes_and_no_file_are_refused(path):
    model = Pretrained(Pretrained.resolve(None, {"weights": path}))
    with pytest.raises(ConfigError, match="is for 3 classes, the protocol has 2 known ones"):
        model.fit(pictures(2), None, Fitting(device="cpu"))
    with pytest.raises(ConfigError, match="needs its weights"):
        Pretrained(Pretrained.resolve(None)).fit(pictures(), None, Fitting(device="cpu"))
