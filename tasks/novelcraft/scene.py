"""A world state to the scene that labels it: axis-aligned boxes and a pinhole camera (rule 6).

Enters: a `WorldState`, the novel names, a `View`. Leaves: a `Scene` in Minecraft axes (x, height,
z; block centres are integers). Boxes are 1x1x1, trunks (names containing `minecraft:log`) 1x3x1,
entities 1x1.8x1; nothing else exists: no floor, no leaves, no sky.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schemas.errors import ConfigError
from tasks.novelcraft.worldstate import WorldState

PUBLISHED_FOV = 71.0 + 0.6 * 4 / 9
PUBLISHED_EYE_OFFSET = 1.1 + 0.03 * 2 / 9
TRUNK = "minecraft:log"
CUBE_HEIGHT, TRUNK_HEIGHT, ENTITY_HEIGHT = 1.0, 3.0, 1.8


@dataclass(frozen=True)
class View:
    """How the player's pose becomes a camera.

    `published` is the rotation the labels were made with, Rx(pitch) Ry(180 - yaw), wrong when the
    player looks up or down and does not face south; `corrected` is Ry(180 - yaw) Rx(-pitch)
    (rule 6 of docs/novelcraft.md). Angles are degrees, lengths blocks; the image is square.
    """

    rotation: Literal["published", "corrected"] = "published"
    fov: float = PUBLISHED_FOV
    eye_offset: float = PUBLISHED_EYE_OFFSET
    resolution: int = 256
    near: float = 0.1
    far: float = 100.0

    def __post_init__(self) -> None:
        if self.rotation not in ("published", "corrected"):
            raise ConfigError(f"rotation is {self.rotation!r}, expected published or corrected")
        if not 0.0 < self.fov < 180.0:
            raise ConfigError(f"fov is {self.fov}, expected degrees between 0 and 180")
        if not np.isfinite(self.eye_offset):
            raise ConfigError(f"eye_offset is {self.eye_offset}, expected a finite number")
        if not 1 <= self.resolution <= 4096:
            raise ConfigError(f"resolution is {self.resolution}, expected 1 to 4096 pixels")
        if not 0.0 < self.near <= self.far - 4.0:
            raise ConfigError(
                f"clip is {self.near}..{self.far}, expected 0 < near and far at least 4 blocks "
                "beyond it, so that no box reaches past both"
            )

    @property
    def half_width(self) -> float:
        """Half the width of the image at depth 1."""
        return float(np.tan(np.radians(self.fov) / 2))


@dataclass(frozen=True, eq=False)
class Scene:
    """Box i spans lower[i]..upper[i], is called labels[label_index[i]] and is novel if novel[i].

    Boxes have unit footprints centred on integers; blocks come first, then entities. `eye` is the
    camera's position; the columns of `rotation` are its right, up and backward axes.
    """

    lower: np.ndarray
    upper: np.ndarray
    label_index: np.ndarray
    labels: tuple[str, ...]
    novel: np.ndarray
    eye: np.ndarray
    rotation: np.ndarray
    view: View

    def corners(self, boxes: np.ndarray) -> np.ndarray:
        """(B, 8, 3) corners as right, up, depth. Corner 4i+2j+k is upper where a bit is set."""
        bounds = np.stack([self.lower[boxes] - self.eye, self.upper[boxes] - self.eye], axis=1)
        x, y, z = np.moveaxis(bounds[..., None] * (self.rotation * (1.0, 1.0, -1.0)), 2, 0)
        corners = x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]
        return corners.reshape(-1, 8, 3)


def build_scene(state: WorldState, novel: Iterable[str], view: View | None = None) -> Scene:
    """The boxes and the camera of one frame.

    A name in `novel` is a block key as in name_to_novel_block.csv, or a bare name, which matches
    every variant (a forgotten variant would silently label nothing), or an entity's name or type.
    """
    view = view or View()
    novel_names = frozenset([novel] if isinstance(novel, str) else novel)
    names = tuple(sorted({entity.name for entity in state.entities}))
    rank = {name: len(state.keys) + i for i, name in enumerate(names)}
    ranks = np.array([rank[entity.name] for entity in state.entities], np.int32)
    label_index = np.concatenate([state.key_index, ranks])
    heights = np.array(
        [TRUNK_HEIGHT if TRUNK in key else CUBE_HEIGHT for key in state.keys]
        + [ENTITY_HEIGHT] * len(names)
    )
    is_novel = np.array(
        [key in novel_names or key.partition("_var_")[0] in novel_names for key in state.keys]
        + [name in novel_names for name in names],
        bool,
    )[label_index]
    of_type = np.array([entity.type in novel_names for entity in state.entities], bool)
    is_novel[len(state.positions) :] |= of_type
    places = np.array([entity.position for entity in state.entities], np.int32).reshape(-1, 3)
    lower = np.concatenate([state.positions, places]) - 0.5
    upper = lower + 1.0
    upper[:, 1] = lower[:, 1] + heights[label_index]
    eye = np.array(state.player, float)
    eye[1] += view.eye_offset
    return Scene(
        lower,
        upper,
        label_index,
        (*state.keys, *names),
        is_novel,
        eye,
        camera_rotation(state.yaw, state.pitch, view.rotation),
        view,
    )


def camera_rotation(yaw: float, pitch: float, rotation: str) -> np.ndarray:
    """Camera to world axes, angles in degrees. The camera looks along its -z, its +y is up."""
    turn = np.radians(180.0 - yaw)
    tilt = np.radians(pitch if rotation == "published" else -pitch)
    c, s = np.cos(turn), np.sin(turn)
    about_y = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    c, s = np.cos(tilt), np.sin(tilt)
    about_x = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    product = about_x @ about_y if rotation == "published" else about_y @ about_x
    # Right angles come out exact, so that symmetric views give symmetric masks.
    return np.round(product, 15) + 0.0


def pixel_rays(
    scene: Scene, samples: int = 1, rows: slice = slice(None), columns: slice = slice(None)
) -> np.ndarray:
    """(rows, columns, 3) world directions of unit depth through the centres of samples x samples
    parts of every pixel; `rows` and `columns` choose among resolution * samples."""
    n = scene.view.resolution * samples
    across = ((np.arange(n) + 0.5) * (2.0 / n) - 1.0) * scene.view.half_width
    right, up, backward = scene.rotation.T[..., None, None]
    # Each coordinate lies by itself in memory: what goes over all three of a ray is fast then.
    return np.moveaxis(across[columns] * right - across[rows][:, None] * up - backward, 0, -1)


def hit_depth(scene: Scene, box: np.ndarray | int, directions: np.ndarray) -> np.ndarray:
    """Depth at which rays of unit depth first meet the surface of their box between the clip
    planes, else inf. `box` is one for all rays or one for each.

    A ray that starts inside a box, or enters it before the near plane, meets the far side from
    within, as in Blender, where both sides of a face are seen.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        first = (scene.lower[box] - scene.eye) / directions
        second = (scene.upper[box] - scene.eye) / directions
    # Not a number: the ray runs in the plane of a face, which does not bound it: fmax, fmin.
    enter = np.fmax.reduce(np.minimum(first, second), axis=-1, initial=-np.inf)
    leave = np.fmin.reduce(np.maximum(first, second), axis=-1, initial=np.inf)
    depth = np.where(enter >= scene.view.near, enter, leave)
    hit = (enter <= leave) & (depth >= scene.view.near) & (depth <= scene.view.far)
    return np.where(hit, depth, np.inf)
