"""Facts of NovelCraft's image preprocessing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.features import images as preprocessing


def picture(height: int = 256, width: int = 256, count: int = 2) -> torch.Tensor:
    draws = np.random.default_rng(0)
    return torch.from_numpy(draws.integers(0, 256, (count, height, width, 3), np.uint8))


def test_the_item_bar_is_the_bottom_22_rows():
    images = picture()
    cropped = preprocessing.crop_item_bar(images)
    assert cropped.shape == (2, 3, 234, 256)
    assert cropped.dtype == torch.uint8
    assert torch.equal(cropped[1, 2], images[1, :234, :, 2])


def test_an_image_no_higher_than_the_bar_is_refused():
    with pytest.raises(ConfigError, match="item_bar_rows"):
        preprocessing.crop_item_bar(picture(height=22))


@pytest.mark.parametrize(
    ("scale", "size"), [(1, (234, 256)), (0.75, (175, 192)), (0.5, (117, 128))]
)
def test_published_sizes(scale, size):
    assert preprocessing.for_classifier(picture(count=1), scale=scale).shape == (1, 3, *size)


def test_values_are_imagenet_normalised():
    images = torch.zeros((1, 32, 32, 3), dtype=torch.uint8)
    images[..., 0] = 255
    out = preprocessing.for_classifier(images)
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    np.testing.assert_allclose(out.mean((0, 2, 3)), expected, rtol=1e-6)
    assert out.std((0, 2, 3)).max() < 1e-6


def test_the_patch_grid_is_13_by_15():
    cropped = preprocessing.crop_item_bar(picture())
    grid = preprocessing.patch_grid(cropped)
    assert grid.shape == (2, 13, 15, 3, 32, 32)
    assert torch.equal(grid[1, 3, 5], cropped[1, :, 48:80, 80:112])
    assert grid.data_ptr() == cropped.data_ptr()


def test_a_patch_larger_than_the_image_is_refused():
    with pytest.raises(ConfigError, match="smaller than a patch"):
        preprocessing.patch_grid(preprocessing.crop_item_bar(picture(height=50)))


def test_rows_come_back_by_repetition():
    images = picture()
    out = preprocessing.for_whole_autoencoder(images)
    assert out.shape == (2, 3, 256, 256)
    assert torch.equal(out[:, :, 234:], out[:, :, 233:234].expand(-1, -1, 22, -1))
    assert torch.equal(out[:, :, :234] * 255, preprocessing.crop_item_bar(images).float())


@given(st.integers(24, 80), st.integers(8, 80), st.floats(0.2, 1))
def test_sizes_round_down(height, width, scale):
    images = torch.zeros((1, height, width, 3), dtype=torch.uint8)
    size = (int((height - 22) * scale), int(width * scale))
    if min(size) < 1:
        with pytest.raises(ConfigError, match="larger"):
            preprocessing.for_classifier(images, scale=scale)
        return
    assert preprocessing.for_classifier(images, scale=scale).shape[2:] == size
    if scale < 1:
        padded = preprocessing.for_whole_autoencoder(images, scale=scale)
        assert padded.shape[2:] == (int(height * scale), int(width * scale))
