"""Point clouds as pictures: what a viewer sees of a shape from fixed directions.

Clouds (N, P, 3) with y up, in the unit sphere, enter; pictures (N, V, side, side, 3) leave, grey on
white. Directions go once around the up axis, all from the same height. Each point is put into its
pixel, the nearest to the viewer wins, and a morphological closing fills the gaps between points;
its width follows their number. Slopes of the smoothed depth give normals, and those a shade under
a light beside the viewer; nearer surfaces are lighter. Nothing is drawn at random, and no cloud
sees another.
"""

import math

import torch
from torch.nn import functional

# Share of the picture's side that the unit sphere fills.
FILLED = 0.9
# Where the light comes from, seen by the viewer: a little from the left and from above.
LIGHT = (-0.35, 0.5, 0.79)
# What is left in shadow, and how much darker the far end of the sphere is than the near one.
AMBIENT, FOG = 0.25, 0.4
WHITE = 255


def directions(views: int, elevation: float) -> torch.Tensor:
    """Matrices (V, 3, 3) that turn a shape before the viewer, who looks along -z; y is up there.

    The first viewer stands before the shape, the next ones to its right, `elevation` degrees up.
    """
    around = torch.arange(views, dtype=torch.float64) * (2 * math.pi / views)
    down = torch.full_like(around, math.radians(elevation))
    cos, sin, low, high = around.cos(), around.sin(), down.cos(), down.sin()
    rows = [
        [cos, torch.zeros_like(cos), -sin],
        [-high * sin, low, -high * cos],
        [low * sin, high, low * cos],
    ]
    return torch.stack([torch.stack(row, 1) for row in rows], 1).float()


def depth_pictures(clouds: torch.Tensor, turns: torch.Tensor, side: int) -> torch.Tensor:
    """(N, V, side, side): height of the nearest point towards the viewer, 0 to 1; -1 for none."""
    seen = torch.einsum("vij,npj->nvpi", turns, clouds)
    half = (side - 1) / 2
    column = (half + seen[..., 0] * FILLED * half).round().long().clamp(0, side - 1)
    row = (half - seen[..., 1] * FILLED * half).round().long().clamp(0, side - 1)
    height = ((seen[..., 2] + 1) / 2).clamp(0, 1)
    pixels = clouds.new_full((*height.shape[:2], side * side), -1.0)
    pixels.scatter_reduce_(2, row * side + column, height, "amax")
    return pixels.view(*height.shape[:2], side, side)


def closed(depth: torch.Tensor, width: int) -> torch.Tensor:
    """Gaps of up to twice the width filled; what is there keeps its outline."""
    window = 2 * width + 1
    padded = functional.pad(depth, (width,) * 4, value=-1.0)
    grown = functional.max_pool2d(padded, window, 1, width)
    return -functional.max_pool2d(-grown, window, 1)


def shaded(depth: torch.Tensor, width: int) -> torch.Tensor:
    """Brightness 0 to 1 of depths, 1 where nothing is."""
    side, mask = depth.shape[-1], (depth >= 0).float()
    window = 2 * width + 1

    def mean(values: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(values, window, 1, width, count_include_pad=False)

    smooth = mean(depth * mask) / mean(mask).clamp(min=1e-6)
    # Depth is half a unit a unit, a pixel is 2 / (filled * side) units.
    steepness = FILLED * (side - 1) / 2
    edge = functional.pad(smooth, (1, 1, 1, 1), mode="replicate")
    right = (edge[..., 1:-1, 2:] - edge[..., 1:-1, :-2]) * steepness
    up = (edge[..., :-2, 1:-1] - edge[..., 2:, 1:-1]) * steepness
    facing = (-right * LIGHT[0] - up * LIGHT[1] + LIGHT[2]) / (1 + right**2 + up**2).sqrt()
    light = AMBIENT + (1 - AMBIENT) * facing.clamp(0, 1)
    near = 1 - FOG * (1 - smooth)
    return torch.where(mask > 0, light * near, 1.0)


def shape_pictures(
    clouds: torch.Tensor, turns: torch.Tensor, side: int, spread: float = 1.0
) -> torch.Tensor:
    """uint8 (N, V, side, side, 3); `spread` scales how wide gaps are filled."""
    width = max(1, math.ceil(spread * side / math.sqrt(clouds.shape[1])))
    depth = closed(depth_pictures(clouds, turns, side), width)
    grey = (shaded(depth, width) * WHITE).round().to(torch.uint8)
    return grey[..., None].expand(*grey.shape, 3)
