"""Both autoencoders: what goes in, and the score against a plain loop."""

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks.features.autoencoder import Autoencoder
from tasks.models.autoencoder_full import AutoencoderFull
from tasks.models.autoencoder_patch import AutoencoderPatch
from tests.models.synthetic import fit, novelty, samples, tiny

ONE_EPOCH = {"epochs": 1, "milestones": ()}


@pytest.fixture(scope="module")
def few():
    return samples(("images",), 16, 0, seed=8)


def test_defaults_are_the_papers():
    for kind in (AutoencoderFull, AutoencoderPatch):
        paper = kind.resolve("paper")
        assert (paper.epochs, paper.batch_size, paper.learning_rate) == (8000, 128, 1e-3)
        assert (paper.code, paper.noise, paper.width, paper.scale) == (100, 1 / 40, 1, 1)
        assert paper.order == "balanced" and paper.precision == "float32"
    assert (paper.pooling, paper.patches_per_image) == ("mean", 1)


def test_the_code_has_100_values_between_0_and_1():
    network = Autoencoder(32, 32).eval()
    images = torch.rand((2, 3, 32, 32))
    code = network.encoder(images)
    assert code.shape == (2, 100)
    assert ((code > 0) & (code < 1)).all()
    assert network(images).shape == images.shape
    widths = [m.out_channels for m in network.encoder.modules() if isinstance(m, torch.nn.Conv2d)]
    assert sorted(set(widths)) == [32, 64, 128, 256]


def test_the_layers_are_those_of_lsa():
    """Counts and values are those of the published LSA layers with the same weights."""
    with torch.device("meta"):
        counts = [sum(p.numel() for p in Autoencoder(n, n).parameters()) for n in (32, 256)]
    assert counts == [4_720_356, 137_615_076]
    network = Autoencoder(32, 32).eval()
    for number, (name, weights) in enumerate(network.named_parameters()):
        wave = torch.sin(torch.arange(weights.numel(), dtype=torch.float64) + number)
        scale = weights[0].numel() ** -0.5 if weights.dim() > 1 else 0.5
        shift = float(weights.dim() == 1 and name.endswith("weight"))
        weights.data = (wave.view(weights.shape) * scale + shift).float()
    pixels = torch.sin(torch.arange(2 * 3 * 32 * 32, dtype=torch.float64) * 0.7) / 2 + 0.5
    images = pixels.float().view(2, 3, 32, 32)
    with torch.no_grad():
        code, copies = network.encoder(images), network(images)
    near = {"rtol": 0, "atol": 2e-5}
    np.testing.assert_allclose(code[0, :4], [0.281256, 0.936664, 0.760622, 0.053257], **near)
    np.testing.assert_allclose(copies[1, :, 16, 10], [0.394176, -0.072089, -0.514453], **near)
    errors = ((copies - images) ** 2).double().mean((1, 2, 3))
    np.testing.assert_allclose(errors, [0.568327, 0.568406], **near)


def test_one_step_of_the_papers_settings(few):
    """All but the number of epochs and the width; classes come equally often."""
    paper = AutoencoderPatch.resolve("paper", {"epochs": 1, "width": 0.125, "cpu_threads": 1})
    history = fit(AutoencoderPatch(paper), few)
    assert history.height == 1
    assert 0 < history["loss"][0] < 1


def test_sides_that_do_not_divide_are_refused(few):
    with pytest.raises(ConfigError, match="multiples of 8"):
        fit(AutoencoderFull(tiny(AutoencoderFull, scale=0.7)), few)


def test_the_whole_image_score_is_its_squared_error(few, test_set):
    model = AutoencoderFull(tiny(AutoencoderFull, **ONE_EPOCH))
    fit(model, few)
    x = model.prepared(torch.from_numpy(test_set.images()[:3]))
    assert x.shape == (3, 3, 32, 32)
    with torch.no_grad():
        error = (model.layers["autoencoder"](x) - x).double() ** 2
    np.testing.assert_allclose(novelty(model, test_set)[:3], error.mean((1, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_the_patch_score_pools_every_patch(few, test_set, scale):
    settings = tiny(AutoencoderPatch, **ONE_EPOCH, scale=scale, pooling="mean")
    model = AutoencoderPatch(settings)
    fit(model, few)
    largest = AutoencoderPatch(settings.model_copy(update={"pooling": "max"}))
    largest.record = model.record
    largest.restore(model.state())
    from tasks.features.images import crop_item_bar, scaled, to_unit

    x = scaled(to_unit(crop_item_bar(torch.from_numpy(test_set.images()[:2]))), scale)
    height, width = x.shape[2:]
    for row in range(2):
        patches = [
            x[row : row + 1, :, top : top + 32, left : left + 32]
            for top in range(0, height - 31, 16)
            for left in range(0, width - 31, 16)
        ]
        assert len(patches) == {1.0: 3, 0.8: 2}[scale]
        with torch.no_grad():
            errors = [float(((model.layers["autoencoder"](p) - p) ** 2).mean()) for p in patches]
        assert novelty(model, test_set)[row] == pytest.approx(np.mean(errors), rel=1e-4)
        assert novelty(largest, test_set)[row] == pytest.approx(np.max(errors), rel=1e-4)


def test_training_takes_patches_of_the_grid():
    model = AutoencoderPatch(tiny(AutoencoderPatch, patches_per_image=5))
    images = torch.from_numpy(samples(("images",), 4, 0, seed=9).images())
    torch.manual_seed(0)
    chosen = model.training_inputs(images)
    assert chosen.shape == (20, 3, 32, 32)
    grid = model.grid(images).float() / 255
    for number, patch in enumerate(chosen):
        options = grid[number // 5].flatten(0, 1)
        assert (options == patch).flatten(1).all(1).any()
    assert len({patch.numpy().tobytes() for patch in chosen}) > 4
