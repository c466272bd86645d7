"""Statistics of features as LeRobot's `stats.json` and episode metadata hold them.

Enter: numbers of shape (frames, width), or pictures as counts of every level of every channel.
Leave: min, max, mean, std, count and the quantiles q01, q10, q50, q90, q99. LeRobot samples
pictures; here every pixel counts, since 256 levels a channel hold all there is to know.
Source: huggingface/lerobot, src/lerobot/datasets/compute_stats.py (pictures: values / 255 in
shape (3, 1, 1), count = frames).
"""

import numpy as np
from numpy.typing import NDArray

from schemas.errors import LakeError

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Stats = dict[str, list]


def number_stats(values: NDArray[np.float64]) -> Stats:
    """Statistics of each column; NaN stands for a frame without a value and is left out."""
    stats: dict[str, list] = {name: [] for name in ("min", "max", "mean", "std", *QUANTILES)}
    counts = []
    for column in values.T:
        known = column[~np.isnan(column)]
        counts.append(known.size)
        if known.size == 0:
            known = np.zeros(1)
        measured = (known.min(), known.max(), known.mean(), known.std())
        measured += tuple(np.quantile(known, list(QUANTILES.values())))
        for name, value in zip(stats, measured, strict=True):
            stats[name].append(float(value))
    return stats | {"count": [min(counts)]}


def picture_stats(levels: NDArray[np.int64], frames: int) -> Stats:
    """Statistics of pictures from `levels`: how often each of 256 levels occurs in 3 channels."""
    scale = np.arange(256) / 255
    total = levels.sum(axis=1, keepdims=True)
    share = levels / total
    mean = share @ scale
    spread = np.sqrt(np.maximum(share @ scale**2 - mean**2, 0))
    cumulated = levels.cumsum(axis=1)
    present = levels > 0
    stats = {
        "min": scale[present.argmax(axis=1)],
        "max": scale[255 - present[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": spread,
    }
    for name, quantile in QUANTILES.items():
        stats[name] = scale[(cumulated >= quantile * total).argmax(axis=1)]
    return {name: value.reshape(3, 1, 1).tolist() for name, value in stats.items()} | {
        "count": [frames]
    }


def read_picture(png: bytes, frame_id: str) -> tuple[bytes, NDArray[np.int64]]:
    """The PNG as 8-bit RGB (the same bytes where it is that already), and its levels."""
    import cv2

    picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise LakeError(f"the picture of {frame_id} cannot be decoded; run `novelty verify`")
    # Bytes 24 and 25 of a PNG are bit depth and colour type; type 2 is RGB without alpha.
    if tuple(png[24:26]) != (8, 2):
        _, data = cv2.imencode(".png", picture)
        png = data.tobytes()
    levels = [np.bincount(picture[..., channel].ravel(), minlength=256) for channel in (2, 1, 0)]
    return png, np.stack(levels).astype(np.int64)
