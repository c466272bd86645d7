"""A picture network on frames of clips: the mean of what it makes of each, in any company."""

import numpy as np
import pytest
import torch

from tasks.learning.samples import Samples
from tasks.models import find, make_model
from tasks.models.backbone import SMALL_SIDE, Backbone
from tasks.models.frame_backbone import FrameBackbone
from tests.features.test_resnet import cifar_shape, random_state


def clips(count: int, frames: int, side: int = 64) -> Samples:
    shape = (count, frames, 1, side, side, 3)
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Samples([str(number) for number in range(count)], None, {"clips": values})


def prepared(**settings) -> FrameBackbone:
    model = make_model("frame_backbone", {"crops": 3, "crop": 64, **settings})
    model.prepare(device="cpu")
    return model


@pytest.fixture
def file(tmp_path):
    torch.save(random_state(cifar_shape(20, width=8)), tmp_path / "r.th")
    return tmp_path / "r.th"


def test_declaration():
    assert (FrameBackbone.modality, FrameBackbone.gives) == ("clip", {"features"})
    assert not FrameBackbone.needs_weights and not FrameBackbone.seeded
    for field, info in FrameBackbone.configuration.model_fields.items():
        assert info.description and info.description.endswith("."), field
    paper, small = find("frame_backbone").resolve("paper"), FrameBackbone.resolve("small")
    assert (paper.preprocessing, paper.views, paper.side) == ("spread", 8, None)
    assert small == paper.model_copy(update={"side": SMALL_SIDE})
    assert FrameBackbone.resolve("small", {"weights": "a.pth"}).side is None


@pytest.mark.parametrize("by_file", [True, False])
def test_it_is_the_mean_of_what_the_model_of_pictures_makes_of_each_frame(file, by_file):
    settings = {"weights": str(file)} if by_file else {"side": 32}
    samples = clips(2, 3)
    found = prepared(**settings).outputs(samples).features
    pictures = Backbone(Backbone.resolve(None, settings))
    pictures.prepare(device="cpu")
    frames = samples.array("clips").reshape(-1, 64, 64, 3)
    expected = pictures.embed(Samples.unnamed(images=frames)).reshape(2, 3, -1).mean(1)
    assert found.shape == (2, 32 if by_file else 1280) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_vector_does_not_depend_on_other_clips_nor_on_the_batch(file):
    samples = clips(5, 3)
    every = prepared(weights=str(file), batch=8).outputs(samples).features
    for batch in (1, 2):
        other = prepared(weights=str(file), batch=batch).outputs(samples).features
        np.testing.assert_array_equal(every, other)
