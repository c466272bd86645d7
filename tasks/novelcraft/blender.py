"""Renderer `blender`: the reference, Cycles on the CPU through bpy.

Enters: world states. Leaves: masks of the novel pixels (rule 6). Two settings by name:
`published` repeats the labelling code: the scene loaded anew for each frame, one object per block,
128 samples, Blackman-Harris 1.5 px, Filmic, 8-bit grey, novel where grey >= 128. `exact` asks
Cycles for the same sample rays as `raycast`: one merged mesh with a material per face, as many
image pixels for one pixel as it has samples, a ray through the centre of each, cut to the rectangle
novel boxes can touch.

bpy may crash on exit and grows over thousands of renders, so callers run `render_states` in child
processes, a chunk of frames each. Where surfaces of two boxes coincide, Cycles shows either one, a
part of each: `published` leaves it so, `exact` decides as `raycast` does.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import ConfigError, NativeError, RecordError
from schemas.extras import require_library
from tasks.novelcraft.masks import GREY_THRESHOLD
from tasks.novelcraft.raycast import SAMPLES, novel_window, samples_needed, samples_per_pixel
from tasks.novelcraft.scene import Scene, View, build_scene
from tasks.novelcraft.worldstate import parse_world_state, world_state

SETTINGS = ("exact", "published")
PUBLISHED_SAMPLES = 128

_HAIR = 1e-4

# Corner 4i+2j+k of a box is upper where a bit is set.
_FACES = np.array(
    [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]], np.int32
)


def render_states(item: dict[str, Any], out_dir: str | Path) -> dict[str, Any]:
    """Render many frames in this process.

    `item` holds `states` (parsed documents) or `path` (a JSON-lines file, with optional `start` and
    `count` of lines), `novel` (names), and optionally `settings`, `coverage`, `samples`, `threads`
    and the fields of `View`. Images pass through `out_dir`. The result has one entry per state:
    `masks` (n, h, w) bool, `pixels` (n,) int64, and `errors`: {"index", "rule", "message"} of
    states that are not valid, whose masks are empty.
    """
    known = {"states", "path", "start", "count", "novel"}
    known |= {"settings", "coverage", "samples", "threads"}
    options = {name: value for name, value in item.items() if name not in known}
    try:
        view = View(**options)
    except TypeError as error:
        raise ConfigError(f"blender: {error}; expected {sorted(known)} and the view") from None
    renderer = BlenderRenderer(
        out_dir,
        item.get("settings", "exact"),
        item.get("coverage", "published"),
        int(item.get("threads", 0)),
        int(item.get("samples", SAMPLES)),
    )
    masks, errors = [], []
    for index, read in enumerate(_readers(item)):
        mask = np.zeros((view.resolution, view.resolution), bool)
        try:
            mask = renderer.render(build_scene(read(), item["novel"], view))
        except RecordError as error:
            errors.append({"index": index, "rule": error.rule, "message": error.message})
        masks.append(mask)
    stack = np.array(masks, bool).reshape(-1, view.resolution, view.resolution)
    return {"masks": stack, "pixels": np.count_nonzero(stack, axis=(1, 2)), "errors": errors}


def _readers(item: dict[str, Any]) -> Iterator[Any]:
    if ("states" in item) == ("path" in item):
        raise ConfigError("blender: expected either states or path in the item")
    if "states" in item:
        for document in item["states"]:
            yield lambda document=document: world_state(document)
        return
    start = int(item.get("start", 0))
    stop = start + int(item["count"]) if "count" in item else None
    with open(item["path"], "rb") as file:
        for line in islice(file, start, stop):
            yield lambda line=line: parse_world_state(line)


class BlenderRenderer:
    """Cycles in this process. Images pass through `out_dir`; `threads` 0 takes every core."""

    def __init__(
        self,
        out_dir: str | Path,
        settings: str = "exact",
        coverage: str = "published",
        threads: int = 0,
        samples: int = SAMPLES,
    ) -> None:
        if settings not in SETTINGS:
            raise ConfigError(f"settings is {settings!r}, expected one of {', '.join(SETTINGS)}")
        if settings == "published" and coverage != "published":
            raise ConfigError(
                f"coverage is {coverage!r}, expected published with the published settings, which "
                "fix the rule; use settings exact"
            )
        self.settings = settings
        self.samples = samples
        self.least = samples_needed(coverage, samples)
        self.threads = threads
        self.image = Path(out_dir) / "blender.png"

    def render(self, scene: Scene) -> np.ndarray:
        """The mask of one frame."""
        return self._published(scene) if self.settings == "published" else self._exact(scene)

    def _published(self, scene: Scene) -> np.ndarray:
        stage = _new_stage(scene.view.resolution, PUBLISHED_SAMPLES, 1.5, "Filmic")
        bpy = _blender()
        black, white = _emission(0.0), _emission(1.0)
        meshes: dict[tuple[float, bool], Any] = {}
        heights = scene.upper[:, 1] - scene.lower[:, 1]
        for lower, height, novel in zip(scene.lower, heights, scene.novel, strict=True):
            kind = (float(height), bool(novel))
            if kind not in meshes:
                box = np.array([[-0.5, -0.5, -0.5]]), np.array([[0.5, height - 0.5, 0.5]])
                meshes[kind] = _mesh(*box, np.array([0]), [white if novel else black])
            block = bpy.data.objects.new("block", meshes[kind])
            block.location = lower + 0.5
            stage.collection.objects.link(block)
        _place_camera(stage, scene)
        return self._image(stage) >= GREY_THRESHOLD

    def _exact(self, scene: Scene) -> np.ndarray:
        n = scene.view.resolution
        mask = np.zeros((n, n), bool)
        window = novel_window(scene)
        if window is None:
            return mask
        x0, y0, x1, y1 = window
        bpy = _blender()
        stage = bpy.context.scene
        if stage.get("settings") != self.settings:
            stage = _new_stage(n * self.samples, 1, 0.01, "Raw")
            stage["settings"] = self.settings
            stage.cycles.use_auto_tile = False
            _emission(0.0), _emission(1.0)
        stage.render.resolution_x = stage.render.resolution_y = n * self.samples
        # Objects moved in place once left Blender drawing the old scene: make them anew.
        for group in (bpy.data.objects, bpy.data.meshes, bpy.data.cameras):
            bpy.data.batch_remove(list(group))
        materials = [bpy.data.materials["black"], bpy.data.materials["white"]]
        mesh = _mesh(*_without_ties(scene), scene.novel.astype(np.int32), materials)
        stage.collection.objects.link(bpy.data.objects.new("world", mesh))
        _place_camera(stage, scene)
        stage.render.use_border = stage.render.use_crop_to_border = True
        stage.render.border_min_x, stage.render.border_max_x = x0 / n, x1 / n
        stage.render.border_min_y, stage.render.border_max_y = 1 - y1 / n, 1 - y0 / n
        shown = self._image(stage) >= GREY_THRESHOLD
        expected = ((y1 - y0) * self.samples, (x1 - x0) * self.samples)
        if shown.shape != expected:
            raise NativeError(f"blender drew {shown.shape} samples, expected {expected}")
        mask[y0:y1, x0:x1] = samples_per_pixel(shown, self.samples) >= self.least
        return mask

    def _image(self, stage: Any) -> np.ndarray:
        import cv2

        bpy = _blender()
        stage.render.threads_mode = "FIXED" if self.threads else "AUTO"
        stage.render.threads = max(self.threads, 1)
        self.image.unlink(missing_ok=True)
        stage.render.filepath = str(self.image)
        bpy.ops.render.render(write_still=True)
        grey = cv2.imread(str(self.image), cv2.IMREAD_GRAYSCALE)
        if grey is None:
            raise NativeError(f"blender left no image at {self.image}")
        return grey


def _without_ties(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the boxes, a hair smaller where surfaces would coincide: a box that holds the
    camera, so that its inner side comes before what touches it from outside (a novel one first);
    and a box that is not novel and overlaps a novel one, so that the novel one encloses it."""
    lower, upper, novel = scene.lower, scene.upper, scene.novel
    holds = ((lower < scene.eye) & (scene.eye < upper)).all(1)
    meets = (lower[:, None] < upper[novel]) & (upper[:, None] > lower[novel])
    enclosed = ~novel & meets.all(2).any(1)
    shrink = _HAIR * np.where(holds, 1 + novel, enclosed)[:, None]
    return lower + shrink, upper - shrink


def _blender() -> Any:
    return require_library("bpy")


def _new_stage(resolution: int, samples: int, filter_width: float, view_transform: str) -> Any:
    bpy = _blender()
    bpy.ops.wm.read_factory_settings(use_empty=True)
    stage = bpy.context.scene
    stage.render.engine = "CYCLES"
    stage.cycles.device = "CPU"
    stage.cycles.samples = samples
    stage.cycles.use_adaptive_sampling = False
    stage.cycles.use_denoising = False
    stage.cycles.pixel_filter_type = "BLACKMAN_HARRIS"
    stage.cycles.filter_width = filter_width
    stage.render.resolution_x = stage.render.resolution_y = resolution
    stage.render.resolution_percentage = 100
    stage.render.dither_intensity = 0.0
    stage.view_settings.view_transform = view_transform
    stage.render.image_settings.file_format = "PNG"
    stage.render.image_settings.color_mode = "BW"
    stage.render.image_settings.color_depth = "8"
    stage.world = bpy.data.worlds.new("black")
    stage.world.color = (0.0, 0.0, 0.0)
    return stage


def _emission(value: float) -> Any:
    bpy = _blender()
    material = bpy.data.materials.new("white" if value else "black")
    material.use_nodes = True
    nodes = material.node_tree.nodes
    nodes.clear()
    emission = nodes.new("ShaderNodeEmission")
    emission.inputs["Color"].default_value = (value, value, value, 1.0)
    output = nodes.new("ShaderNodeOutputMaterial")
    material.node_tree.links.new(emission.outputs[0], output.inputs["Surface"])
    return material


def _mesh(lower: np.ndarray, upper: np.ndarray, material: np.ndarray, materials: list) -> Any:
    """One mesh of all boxes, box i in materials[material[i]]."""
    bpy = _blender()
    bits = np.array([(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)])
    corners = np.where(bits, upper[:, None], lower[:, None]).astype(np.float32)
    faces = (_FACES + 8 * np.arange(len(lower), dtype=np.int32)[:, None, None]).reshape(-1, 4)
    mesh = bpy.data.meshes.new("boxes")
    mesh.vertices.add(8 * len(lower))
    mesh.vertices.foreach_set("co", corners.ravel())
    mesh.loops.add(faces.size)
    mesh.loops.foreach_set("vertex_index", faces.ravel())
    mesh.polygons.add(len(faces))
    mesh.polygons.foreach_set("loop_start", np.arange(0, faces.size, 4, dtype=np.int32))
    mesh.polygons.foreach_set("material_index", np.repeat(material, 6).astype(np.int32))
    for each in materials:
        mesh.materials.append(each)
    mesh.update()
    return mesh


def _place_camera(stage: Any, scene: Scene) -> None:
    bpy = _blender()
    import mathutils

    camera = bpy.data.cameras.new("camera")
    camera.sensor_fit = "HORIZONTAL"
    camera.angle = np.radians(scene.view.fov)
    camera.clip_start, camera.clip_end = scene.view.near, scene.view.far
    holder = bpy.data.objects.new("camera", camera)
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = scene.rotation, scene.eye
    holder.matrix_world = mathutils.Matrix(pose.tolist())
    stage.collection.objects.link(holder)
    stage.camera = holder
