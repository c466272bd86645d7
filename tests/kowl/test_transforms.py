"""Each transform against a formula of its own; one draw per clip, from its name alone."""

import colorsys
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from schemas.config import make_config
from schemas.errors import ConfigError
from tasks.kowl.transforms import (
    TRANSFORMS,
    TransformSettings,
    _edges,
    _projection,
    add_noise,
    blur,
    draw_parameters,
    jitter,
    rotate,
    transform_clip,
    warp,
)

PUBLISHED = TransformSettings()
STRONG = TransformSettings(blur_sigma_low=1, blur_sigma_high=5, fill="random")
NAMES = sorted(TRANSFORMS)
BLACK = (0, 0, 0)
PINNED_CORNERS = [[29, 24], [185, 19], [223, 188], [43, 168]]
PINNED_DEGREES = 78.88049582151157


def clip(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def draws(name: str, count: int, key: str, **changed: Any) -> np.ndarray:
    chosen = TransformSettings(**changed)
    return np.array(
        [draw_parameters(name, 12, 16, chosen, 0, f"clip{n}")[key] for n in range(count)]
    )


def test_the_seven_transforms() -> None:
    assert NAMES == [
        "color_invert",
        "color_jitter",
        "gaussian_blur",
        "gaussian_noise",
        "perspective",
        "rotation",
        "vertical_flip",
    ]


# ---------------------------------------------------------------- exact small cases


def test_invert_and_flip_are_involutions() -> None:
    frames = clip(2, 3, 5, 4)
    inverted = transform_clip(frames, "color_invert", PUBLISHED, 0, "a")
    np.testing.assert_array_equal(inverted, 255 - frames.astype(int))
    flipped = transform_clip(frames, "vertical_flip", PUBLISHED, 0, "a")
    for row in range(5):
        np.testing.assert_array_equal(flipped[..., row, :, :], frames[..., 4 - row, :, :])
    for name, once in (("color_invert", inverted), ("vertical_flip", flipped)):
        np.testing.assert_array_equal(transform_clip(once, name, PUBLISHED, 9, "b"), frames)


def test_brightness_truncates_and_stops_at_255() -> None:
    grey = np.array([0, 1, 3, 100, 170, 171, 255], np.uint8)
    frames = np.broadcast_to(grey[:, None], (1, 1, 7, 3))
    for hue_first in (False, True):
        brighter = jitter(frames, brightness=1.5, hue=0, hue_first=hue_first)
        assert brighter[0, 0, :, 1].tolist() == [0, 1, 4, 150, 255, 255, 255]
        darker = jitter(frames, brightness=0.5, hue=0, hue_first=hue_first)
        assert darker[0, 0, :, 2].tolist() == [0, 0, 1, 50, 85, 85, 127]


def test_hue_by_a_third_of_a_turn_moves_the_channels_on() -> None:
    frames = clip(2, 6, 7)
    ahead = jitter(frames, brightness=1, hue=1 / 3, hue_first=True)
    np.testing.assert_array_equal(ahead, np.roll(frames, 1, axis=-1))
    back = jitter(frames, brightness=1, hue=-1 / 3, hue_first=True)
    np.testing.assert_array_equal(back, np.roll(frames, -1, axis=-1))
    np.testing.assert_array_equal(jitter(frames, brightness=1, hue=0, hue_first=False), frames)


@given(seed=st.integers(0, 2**32), hue=st.floats(-0.5, 0.5))
def test_hue_agrees_with_the_standard_library(seed: int, hue: float) -> None:
    frames = clip(1, 3, 4, seed=seed)
    frames[0, 0] //= 100  # few values, so that channels are often equal
    found = jitter(frames, brightness=1, hue=hue, hue_first=True).reshape(-1, 3)
    for pixel, turned in zip(frames.reshape(-1, 3) / 255, found, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        exact = np.array(colorsys.hsv_to_rgb((h + hue) % 1, s, v)) * 255.999
        clear = np.abs(exact - np.rint(exact)) > 1e-3
        np.testing.assert_array_equal(turned[clear], np.floor(exact)[clear])
        assert np.abs(turned - exact).max() < 1.01


def test_order_of_brightness_and_hue_matters_where_values_are_cut_off() -> None:
    frames = np.array([[[[200, 100, 0]]]], np.uint8)
    # (255, 150, 0) turned by a sixth of the wheel; (100, 200, 0) brightened.
    assert jitter(frames, 1.5, 1 / 6, hue_first=False).ravel().tolist() == [105, 255, 0]
    assert jitter(frames, 1.5, 1 / 6, hue_first=True).ravel().tolist() == [150, 255, 0]


def convolved(picture: np.ndarray, sigma: float, width: int, height: int) -> np.ndarray:
    """Blur by its definition: a two-dimensional kernel on a reflected picture."""
    x, y = np.arange(width) - width // 2, np.arange(height) - height // 2
    kernel = np.exp(-(x[None, :] ** 2 + y[:, None] ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    around = [(height // 2,) * 2, (width // 2,) * 2, (0, 0)]
    padded = np.pad(picture.astype(float), around, mode="reflect")
    result = np.zeros(picture.shape)
    for row in range(height):
        for column in range(width):
            part = padded[row : row + picture.shape[0], column : column + picture.shape[1]]
            result += kernel[row, column] * part
    return result


@pytest.mark.parametrize(("sigma", "width", "height"), [(0.6, 3, 3), (1.3, 5, 9), (5.0, 7, 1)])
def test_blur_by_its_definition(sigma: float, width: int, height: int) -> None:
    frames = clip(3, 11, 8)
    for frame, found in zip(frames, blur(frames, sigma, width, height), strict=True):
        exact = convolved(frame, sigma, width, height)
        assert np.abs(found - exact).max() < 0.5 + 1e-3


def test_blur_of_one_bright_pixel() -> None:
    frames = np.zeros((1, 5, 5, 3), np.uint8)
    frames[0, 2, 2] = 200
    found = blur(frames, sigma=1.0, width=3, height=1)[0, :, :, 0]
    # exp(-1/2) = 0.6065: 200 * (0.6065, 1, 0.6065) / 2.2131
    assert found[2].tolist() == [0, 55, 90, 55, 0] and found[[0, 1, 3, 4]].sum() == 0


def test_blur_of_the_published_sigma_changes_no_8_bit_picture() -> None:
    hardest = (np.indices((12, 12)).sum(0) % 2 * 255).astype(np.uint8)
    frames = np.repeat(hardest[None, ..., None], 3, axis=-1)
    np.testing.assert_array_equal(blur(frames, 0.25, 5, 9), frames)
    assert (blur(frames, 0.27, 5, 9) != frames).all()


# ---------------------------------------------------------------- noise


def test_noise_is_normal_with_the_published_spread() -> None:
    grey = np.full((8, 64, 64, 3), 128, np.uint8)
    for channels in ("shared", "independent"):
        chosen = TransformSettings(noise_channels=channels)
        noise = transform_clip(grey, "gaussian_noise", chosen, 0, "a") - 128.0
        assert abs(noise.mean()) < 0.3 and abs(noise.std() - 10) < 0.3
        assert 0.66 < (np.abs(noise) < 10.5).mean() < 0.73
        assert 0.94 < (np.abs(noise) < 19.5).mean() < 0.96
        alike = np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1]
        assert alike == pytest.approx(1.0 if channels == "shared" else 0.0, abs=0.03)
        between = np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]
        assert abs(between) < 0.06


def test_noise_is_clipped_not_wrapped() -> None:
    black = transform_clip(np.zeros((2, 64, 64, 3), np.uint8), "gaussian_noise", PUBLISHED, 0, "a")
    assert black.max() < 80 and 0.47 < (black == 0).mean() < 0.55
    white = np.full((2, 64, 64, 3), 255, np.uint8)
    white = transform_clip(white, "gaussian_noise", PUBLISHED, 0, "a")
    assert white.min() > 175 and 0.47 < (white == 255).mean() < 0.55


def test_noise_of_a_frame_does_not_depend_on_later_frames() -> None:
    frames = clip(4, 5, 6)
    whole = transform_clip(frames, "gaussian_noise", PUBLISHED, 0, "a")
    part = transform_clip(frames[:2], "gaussian_noise", PUBLISHED, 0, "a")
    np.testing.assert_array_equal(whole[:2], part)
    added = add_noise(frames, mean=7, std=0, channels="shared", noise_seed=1)
    np.testing.assert_array_equal(added, np.minimum(frames.astype(int) + 7, 255))


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3, 4])
def test_rotation_by_right_angles_is_exact(quarters: int) -> None:
    for side in (6, 7):
        frames = clip(2, side, side)
        expected = np.rot90(frames, quarters, axes=(1, 2))
        np.testing.assert_array_equal(rotate(frames, 90 * quarters, (1, 2, 3)), expected)


def test_rotation_of_a_wide_picture_leaves_the_fill_at_its_sides() -> None:
    frames = np.full((1, 4, 8, 3), 200, np.uint8)
    turned = rotate(frames, 90, (1, 2, 3))[0]
    assert (turned[:, 2:6] == 200).all()
    assert (turned[:, :2] == (1, 2, 3)).all() and (turned[:, 6:] == (1, 2, 3)).all()


@pytest.mark.parametrize("degrees", [0.0, 17.3, 45.0, 101.0, 179.0, -33.0])
def test_rotation_agrees_with_pillow(degrees: float) -> None:
    frame = clip(60, 84)
    filled = (10, 20, 30)
    expected = Image.fromarray(frame).rotate(degrees, Image.Resampling.NEAREST, fillcolor=filled)
    same = (rotate(frame[None], degrees, filled)[0] == np.asarray(expected)).all(axis=-1)
    assert same.mean() > 0.995  # Pillow counts in 1/65536 of a pixel


@example(seed=9853, height=5, width=5)  # the first pixel goes to the horizon
@given(seed=st.integers(0, 2**32), height=st.integers(5, 300), width=st.integers(5, 300))
def test_projection_takes_the_drawn_corners_to_the_picture(
    seed: int, height: int, width: int
) -> None:
    drawn = draw_parameters("perspective", height, width, PUBLISHED, seed, "a")
    a, b, c, d, e, f, g, h, i = _projection(drawn["corners"], height, width)
    for (x, y), wanted in zip(drawn["corners"], _edges(height, width), strict=True):
        depth = g * x + h * y + i
        found = ((a * x + b * y + c) / depth, (d * x + e * y + f) / depth)
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("fill", [BLACK, (10, 200, 90)])
def test_perspective_agrees_with_grid_sample(fill: tuple[int, int, int]) -> None:
    import torch
    from torch.nn.functional import grid_sample

    height, width = 21, 30
    frames = clip(2, height, width)
    for seed in range(5):
        corners = draw_parameters("perspective", height, width, PUBLISHED, seed, "a")["corners"]
        matrix = _projection(corners, height, width).reshape(3, 3)
        y, x = np.mgrid[:height, :width] + 0.5
        source = np.stack([x, y, np.ones_like(x)], axis=-1) @ matrix.T
        grid = source[..., :2] / source[..., 2:] / (width / 2, height / 2) - 1
        # Shifted by the fill colour, so that the zeros beside the picture stand for it.
        shifted = torch.from_numpy(frames.astype(float) - fill).permute(0, 3, 1, 2)
        places = torch.from_numpy(grid).expand(2, -1, -1, -1)
        sampled = grid_sample(shifted, places, align_corners=False).permute(0, 2, 3, 1).numpy()
        assert np.abs(warp(frames, corners, fill) - (sampled + fill)).max() < 0.5 + 1e-3


def test_no_distortion_and_no_angle_change_nothing() -> None:
    still = TransformSettings(distortion=0, rotation_low=0, rotation_high=0, fill="random")
    for shape in ((224, 224), (2, 2), (37, 64)):
        frames = clip(1, *shape)
        for name in ("perspective", "rotation"):
            np.testing.assert_array_equal(transform_clip(frames, name, still, 0, "a"), frames)


def test_fill_colour_shows_no_rim() -> None:
    """A picture of the fill colour stays one, whatever the geometry."""
    frames = np.full((1, 40, 50, 3), (10, 200, 90), np.uint8)
    corners = draw_parameters("perspective", 40, 50, PUBLISHED, 3, "a")["corners"]
    np.testing.assert_array_equal(warp(frames, corners, (10, 200, 90)), frames)
    np.testing.assert_array_equal(rotate(frames, 33, (10, 200, 90)), frames)


def test_corners_on_one_line_are_no_crash() -> None:
    """No projection does it: with 4 x 4 pixels three corners may be on a line even at 0.5."""
    folded = TransformSettings(distortion=1)
    for seed in range(40):
        transform_clip(clip(1, 3, 4), "perspective", folded, seed, "a")


# ---------------------------------------------------------------- draws


def test_draws_fill_their_published_ranges() -> None:
    brightness = draws("color_jitter", 400, "brightness")
    assert 0.5 <= brightness.min() < 0.52 and 1.48 < brightness.max() <= 1.5
    hue = draws("color_jitter", 400, "hue")
    assert -0.3 <= hue.min() < -0.29 and 0.29 < hue.max() <= 0.3
    assert 0.4 < draws("color_jitter", 400, "hue_first").mean() < 0.6
    sigma = draws("gaussian_blur", 400, "sigma")
    assert 0.1 <= sigma.min() < 0.102 and 0.198 < sigma.max() <= 0.2
    angle = draws("rotation", 400, "degrees", rotation_low=-30, rotation_high=30)
    assert -30 <= angle.min() < -29 and 29 < angle.max() <= 30
    for values, middle in ((brightness, 1), (hue, 0), (sigma, 0.15), (angle, 0)):
        assert abs(values.mean() - middle) < 0.1 * np.ptp(values)


def test_corners_are_drawn_as_in_torchvision() -> None:
    """Of 16 x 12 pixels half of 8 and of 6: 0 ... 4 to the right or left, 0 ... 3 up or down."""
    corners = draws("perspective", 400, "corners")
    left, right, top, bottom = set(range(5)), set(range(11, 16)), set(range(4)), set(range(8, 12))
    found = [(set(corner[:, 0]), set(corner[:, 1])) for corner in corners.swapaxes(0, 1)]
    assert found == [(left, top), (right, top), (right, bottom), (left, bottom)]
    assert len({tuple(map(tuple, one)) for one in corners.tolist()}) > 390


def test_fill_is_black_or_a_colour_per_clip() -> None:
    for name in ("rotation", "perspective"):
        assert (draws(name, 3, "fill") == 0).all()
        colours = draws(name, 300, "fill", fill="random")
        assert colours.min() < 5 and colours.max() > 250 and len(np.unique(colours, axis=0)) > 290


def test_draws_of_one_clip_are_known() -> None:
    """The same on any machine, in any process: a change of these changes every stored feature."""
    drawn = {
        name: draw_parameters(name, 224, 224, PUBLISHED, 0, "v_000001_000011") for name in NAMES
    }
    assert json.loads(json.dumps(drawn["perspective"]["corners"])) == PINNED_CORNERS
    assert drawn["rotation"]["degrees"] == pytest.approx(PINNED_DEGREES)


@pytest.mark.parametrize("name", ["color_jitter", "gaussian_noise", "rotation", "perspective"])
def test_draw_depends_on_seed_and_clip_and_nothing_else(name: str) -> None:
    frames = clip(2, 32, 32)
    first = transform_clip(frames, name, STRONG, 0, "a")
    assert (transform_clip(frames, name, STRONG, 0, "b") != first).any()
    assert (transform_clip(frames, name, STRONG, 1, "a") != first).any()
    transform_clip(frames, name, STRONG, 0, "c")
    np.testing.assert_array_equal(transform_clip(frames, name, STRONG, 0, "a"), first)


def test_transforms_of_one_clip_do_not_share_their_draws() -> None:
    sigma = draws("gaussian_blur", 200, "sigma", blur_sigma_low=1, blur_sigma_high=2)
    angle = draws("rotation", 200, "degrees")
    assert abs(np.corrcoef(sigma, angle)[0, 1]) < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_all_frames_of_a_clip_get_the_same_draw(name: str) -> None:
    frames = np.broadcast_to(clip(24, 20), (2, 3, 24, 20, 3))
    changed = transform_clip(frames, name, STRONG, 0, "a")
    equal = (changed == changed[0, 0]).all()
    assert equal == (name != "gaussian_noise") and (changed != frames).any()


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    leading=st.lists(st.integers(0, 3), max_size=3),
    height=st.integers(2, 30),
    width=st.integers(2, 30),
    seed=st.integers(0, 2**32),
)
def test_any_shape_comes_back_and_frames_are_independent(
    name: str, leading: list[int], height: int, width: int, seed: int
) -> None:
    frames = clip(*leading, height, width, seed=seed)
    before = frames.copy()
    changed = transform_clip(frames, name, STRONG, seed, "a")
    assert changed.shape == frames.shape and changed.dtype == np.uint8
    assert not np.shares_memory(changed, frames)
    np.testing.assert_array_equal(frames, before)
    strided = transform_clip(np.asfortranarray(frames), name, STRONG, seed, "a")
    np.testing.assert_array_equal(strided, changed)
    if name != "gaussian_noise" and leading and frames.size:
        alone = transform_clip(frames[-1], name, STRONG, seed, "a")
        np.testing.assert_array_equal(alone, changed[-1])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"blur_width": 4}, "odd"),
        ({"blur_sigma_low": 0.3}, "blur_sigma_low"),
        ({"blur_sigma_low": 0.0}, "blur_sigma_low"),
        ({"rotation_low": 200}, "rotation_low"),
        ({"hue": 0.6}, "hue"),
        ({"distortion": 1.5}, "distortion"),
        ({"noise_std": -1}, "noise_std"),
        ({"fill": "white"}, "fill"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_settings_out_of_range(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(TransformSettings, values)


def test_unknown_transform_and_wrong_frames() -> None:
    with pytest.raises(ConfigError, match="'mirror' is no transform; choose one of color_invert"):
        transform_clip(clip(1, 4, 4), "mirror", PUBLISHED, 0, "a")
    for wrong in (clip(1, 4, 4) / 255, clip(1, 4, 4)[..., :2], clip(4)):
        with pytest.raises(ValueError, match="expected uint8"):
            transform_clip(wrong, "color_invert", PUBLISHED, 0, "a")
    with pytest.raises(ValueError, match="2 x 2 or more"):
        transform_clip(clip(1, 1, 4), "perspective", PUBLISHED, 0, "a")


def test_safe_in_a_process_with_decord() -> None:
    """Neither OpenCV, which decord breaks, nor torch, which is slow to import, comes along."""
    code = (
        "import sys, decord, numpy as np\n"
        "from tasks.kowl.transforms import *\n"
        "frames = np.zeros((2, 8, 8, 3), np.uint8)\n"
        "[transform_clip(frames, name, TransformSettings(), 0, 'a') for name in TRANSFORMS]\n"
        "print(sorted({'cv2', 'torch'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr
