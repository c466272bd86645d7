"""The seven visual transforms of KOWL-718 (nuisance novelty; docs/kowl.md, rule 15).

Enters: the frames of one clip, uint8 RGB. Leaves: as many frames of the same size, changed. A
clip's parameters are drawn once, from (seed, transform, sample_id) alone, so they are the same for
all of its frames and in any order or shard; only noise is new in each frame.

Meaning and rounding are those of torchvision on tensors, which the release calls: brightness and
hue truncate, blur and perspective round. On purpose not as there: noise is clipped (the release
wraps around), and a border pixel of a perspective is mixed with the fill colour once, not twice.
numpy and scipy only, so it may run in a process that has imported decord.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import ConfigError
from schemas.kowl import TransformSettings
from tasks.learning.draws import item_rng

Colour = tuple[int, int, int]
BLACK: Colour = (0, 0, 0)


class Transform(NamedTuple):
    """`apply(frames, **draw(settings, rng, height, width))`; frames are (N, H, W, 3)."""

    draw: Callable[[TransformSettings, np.random.Generator, int, int], dict[str, Any]]
    apply: Callable[..., np.ndarray]


def transform_clip(
    frames: np.ndarray, name: str, settings: TransformSettings, seed: int, sample_id: str
) -> np.ndarray:
    """The frames (..., H, W, 3) of a clip under one of `TRANSFORMS`; the argument is not changed.

    The release transforms whole pictures and crops later: give it those for the same geometry.
    """
    if frames.dtype != np.uint8 or frames.ndim < 3 or frames.shape[-1] != 3:
        raise ValueError(f"expected uint8 (..., H, W, 3), found {frames.dtype} {frames.shape}")
    height, width = frames.shape[-3:-1]
    drawn = draw_parameters(name, height, width, settings, seed, sample_id)
    pictures = frames.reshape(math.prod(frames.shape[:-3]), height, width, 3)
    return TRANSFORMS[name].apply(pictures, **drawn).reshape(frames.shape)


def draw_parameters(
    name: str, height: int, width: int, settings: TransformSettings, seed: int, sample_id: str
) -> dict[str, Any]:
    """What `transform_clip` draws for this clip: plain numbers, fit for a table or JSON."""
    if name not in TRANSFORMS:
        raise ConfigError(f"{name!r} is no transform; choose one of {', '.join(TRANSFORMS)}")
    rng = item_rng(seed, "transform", name, sample_id)
    return TRANSFORMS[name].draw(settings, rng, height, width)


# ---------------------------------------------------------------- colours


def invert(frames: np.ndarray) -> np.ndarray:
    return ~frames


def jitter(frames: np.ndarray, brightness: float, hue: float, hue_first: bool) -> np.ndarray:
    """Factor of the brightness and shift of the hue, one after the other."""
    scaled = np.clip(np.arange(256) * brightness, 0, 255).astype(np.uint8)
    if hue_first:
        return scaled[_per_frame(frames, lambda frame: _shift_hue(frame, hue))]
    return _per_frame(frames, lambda frame: _shift_hue(scaled[frame], hue))


def _draw_jitter(settings: TransformSettings, rng: np.random.Generator, *_: int) -> dict[str, Any]:
    # torchvision draws the order too; it matters, since bright values are cut off at 255.
    return {
        "brightness": rng.uniform(1 - settings.brightness, 1 + settings.brightness),
        "hue": rng.uniform(-settings.hue, settings.hue),
        "hue_first": bool(rng.integers(2)),
    }


def _shift_hue(frame: np.ndarray, shift: float) -> np.ndarray:
    """Turn the hue, keep HSV's saturation and value.

    With the hue h in sixths of a turn, a colour whose own hue is c has the intensity
    value - chroma * clip(|h - c| - 1, 0, 1), the distance taken around the circle.
    """
    red, green, blue = np.moveaxis(frame, -1, 0).astype(np.float32)
    value = np.maximum(np.maximum(red, green), blue)
    chroma = value - np.minimum(np.minimum(red, green), blue)
    scale = np.float32(1) / np.maximum(chroma, 1)
    hue = np.where(
        value == red,
        (green - blue) * scale,
        np.where(value == green, (blue - red) * scale + 2, (red - green) * scale + 4),
    )
    turned = np.empty_like(frame)
    for channel, centre in enumerate((0, 2, 4)):
        ahead = hue + np.float32(6 * shift - centre + 3)
        ahead -= 6 * np.floor(ahead / 6)
        away = np.clip(np.abs(ahead - 3) - 1, 0, 1)
        # torchvision's way from 0 ... 1 back to 8 bits: times 255.999, then truncate.
        turned[..., channel] = (value - chroma * away) * np.float32(255.999 / 255)
    return turned


def blur(frames: np.ndarray, sigma: float, width: int, height: int) -> np.ndarray:
    """Convolution with a sampled Gaussian; the picture is mirrored about its edge pixels."""
    from scipy.ndimage import correlate1d

    across, down = _gaussian(sigma, width), _gaussian(sigma, height)

    def blurred(frame: np.ndarray) -> np.ndarray:
        rows = correlate1d(frame, across, axis=1, output=np.float32, mode="mirror")
        return _rounded(correlate1d(rows, down, axis=0, mode="mirror"))

    return _per_frame(frames, blurred)


def _draw_blur(settings: TransformSettings, rng: np.random.Generator, *_: int) -> dict[str, Any]:
    return {
        "sigma": rng.uniform(settings.blur_sigma_low, settings.blur_sigma_high),
        "width": settings.blur_width,
        "height": settings.blur_height,
    }


def _gaussian(sigma: float, size: int) -> np.ndarray:
    weights = np.exp(-0.5 * ((np.arange(size) - size // 2) / sigma) ** 2)
    return weights / weights.sum()


def add_noise(
    frames: np.ndarray, mean: float, std: float, channels: str, noise_seed: int
) -> np.ndarray:
    """Normal noise, new in each frame; frame k gets the same whatever comes after it."""
    rng = np.random.default_rng(noise_seed)
    shape = (*frames.shape[1:3], 1 if channels == "shared" else 3)

    def noisy(frame: np.ndarray) -> np.ndarray:
        noise = rng.standard_normal(shape, dtype=np.float32)
        return _rounded(frame + (noise * np.float32(std) + np.float32(mean)))

    return _per_frame(frames, noisy)


def _draw_noise(settings: TransformSettings, rng: np.random.Generator, *_: int) -> dict[str, Any]:
    return {
        "mean": settings.noise_mean,
        "std": settings.noise_std,
        "channels": settings.noise_channels,
        "noise_seed": int(rng.integers(2**63)),
    }


# ---------------------------------------------------------------- geometry


def flip(frames: np.ndarray) -> np.ndarray:
    """Upside down."""
    return np.ascontiguousarray(frames[:, ::-1])


def rotate(frames: np.ndarray, degrees: float, fill: Colour) -> np.ndarray:
    """Counter-clockwise about the centre; nearest pixel, same size."""
    height, width = frames.shape[1:3]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    y, x = np.ogrid[0.5 - height / 2 : height / 2, 0.5 - width / 2 : width / 2]
    source_x = np.floor(cos * x - sin * y + width / 2)
    source_y = np.floor(sin * x + cos * y + height / 2)
    place = _framed_places(source_x, source_y, height, width)
    return _per_frame(frames, lambda frame: _framed(frame, fill).take(place, axis=0))


def _draw_rotation(
    settings: TransformSettings, rng: np.random.Generator, *_: int
) -> dict[str, Any]:
    return {
        "degrees": rng.uniform(settings.rotation_low, settings.rotation_high),
        "fill": _draw_fill(settings, rng),
    }


def warp(frames: np.ndarray, corners: list[tuple[int, int]], fill: Colour) -> np.ndarray:
    """Move the corners, clockwise from the top left, to these (x, y); bilinear."""
    from scipy.sparse import csr_array

    height, width = frames.shape[1:3]
    a, b, c, d, e, f, g, h, i = _projection(corners, height, width)
    y, x = np.ogrid[0.5:height, 0.5:width]
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = g * x + h * y + i
        source_x = _near((a * x + b * y + c) / depth - 0.5, width)
        source_y = _near((d * x + e * y + f) / depth - 0.5, height)
    left = np.minimum(np.floor(source_x), width - 1)
    top = np.minimum(np.floor(source_y), height - 1)
    across, down = source_x - left, source_y - top
    corner = _framed_places(left, top, height, width)
    places = np.stack([corner, corner + 1, corner + width + 2, corner + width + 3], axis=-1)
    shares = np.stack([1 - across, across, 1 - across, across], axis=-1)
    shares *= np.stack([1 - down, 1 - down, down, down], axis=-1)
    starts = np.arange(0, places.size + 1, 4)
    shape = (height * width, (height + 2) * (width + 2))
    entries = (shares.ravel().astype(np.float32), places.ravel(), starts)
    mixture = csr_array(entries, shape=shape)

    def warped(frame: np.ndarray) -> np.ndarray:
        mixed = mixture @ _framed(frame, fill).astype(np.float32)
        return _rounded(mixed).reshape(frame.shape)

    return _per_frame(frames, warped)


def _draw_perspective(
    settings: TransformSettings, rng: np.random.Generator, height: int, width: int
) -> dict[str, Any]:
    if min(height, width) < 2:
        raise ValueError(f"perspective of {height} x {width} pixels; expected 2 x 2 or more")
    most_x = int(settings.distortion * (width // 2))
    most_y = int(settings.distortion * (height // 2))
    inward = rng.integers([most_x + 1, most_y + 1], size=(4, 2)).tolist()
    corners = [
        (x - dx if x else dx, y - dy if y else dy)
        for (x, y), (dx, dy) in zip(_edges(height, width), inward, strict=True)
    ]
    return {"corners": corners, "fill": _draw_fill(settings, rng)}


def _edges(height: int, width: int) -> list[tuple[int, int]]:
    return [(0, 0), (width - 1, 0), (width - 1, height - 1), (0, height - 1)]


def _projection(corners: list[tuple[int, int]], height: int, width: int) -> np.ndarray:
    """Nine coefficients of the projection that takes `corners` to the corners of the picture.

    The last one is 1, but where the picture's first pixel is thrown to the horizon it is 0.
    """
    rows, targets = [], []
    for (x, y), (source_x, source_y) in zip(corners, _edges(height, width), strict=True):
        rows.append([x, y, 1, 0, 0, 0, -source_x * x, -source_x * y])
        rows.append([0, 0, 0, x, y, 1, -source_y * x, -source_y * y])
        targets += [source_x, source_y]
    system, target_values = np.array(rows, float), np.array(targets, float)
    solved, _, rank, _ = np.linalg.lstsq(system, target_values, rcond=None)
    if rank == len(solved):
        return np.append(solved, 1.0)
    whole = np.column_stack([system, -target_values])
    return np.linalg.svd(whole)[2][-1]  # what it takes to nothing


def _draw_fill(settings: TransformSettings, rng: np.random.Generator) -> Colour:
    return BLACK if settings.fill == "black" else tuple(rng.integers(256, size=3).tolist())


def _near(source: np.ndarray, size: int) -> np.ndarray:
    """Coordinates, with all that is off the picture, or on the horizon, just beside it."""
    return np.clip(np.nan_to_num(source, nan=-1, posinf=size, neginf=-1), -1, size)


def _framed(frame: np.ndarray, fill: Colour) -> np.ndarray:
    """The pixels one after another, a border of the fill colour, one pixel wide, among them."""
    height, width = frame.shape[:2]
    framed = np.empty((height + 2, width + 2, 3), np.uint8)
    framed[:] = fill
    framed[1:-1, 1:-1] = frame
    return framed.reshape(-1, 3)


def _framed_places(x: np.ndarray, y: np.ndarray, height: int, width: int) -> np.ndarray:
    """Where `_framed` holds pixel (x, y); places off the picture fall on the frame."""
    column = np.clip(x, -1, width).astype(np.intp) + 1
    row = np.clip(y, -1, height).astype(np.intp) + 1
    return row * (width + 2) + column


# ---------------------------------------------------------------- all of them


def _per_frame(frames: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """One frame at a time stays in the processor's cache and needs little memory."""
    changed = np.empty(frames.shape, np.uint8)
    for number, frame in enumerate(frames):
        changed[number] = change(frame)
    return changed


def _rounded(picture: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def _draw_nothing(*_: Any) -> dict[str, Any]:
    return {}


TRANSFORMS = {
    "color_invert": Transform(_draw_nothing, invert),
    "color_jitter": Transform(_draw_jitter, jitter),
    "gaussian_blur": Transform(_draw_blur, blur),
    "gaussian_noise": Transform(_draw_noise, add_noise),
    "rotation": Transform(_draw_rotation, rotate),
    "vertical_flip": Transform(_draw_nothing, flip),
    "perspective": Transform(_draw_perspective, warp),
}
