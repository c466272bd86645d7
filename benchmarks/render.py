"""World states to novel masks: the two renderers side by side, and reading the states.

`python -m benchmarks.render [--published 6]` times, in one run and on the same states (the shared
Polycraft 1.x episode with the crafting table taken for novel): Blender with the published settings
(scene loaded anew, 128 samples), Blender with the exact settings, every sample ray through
Open3D's Embree scene, and raycast; once on frames that show the novel block, once on the real mix,
where two of three show nothing. Ratios are against the published settings, by wall clock and by
processor time, since other work on the machine disturbs only the first.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tasks.novelcraft.blender import BlenderRenderer
from tasks.novelcraft.raycast import SAMPLES, render, samples_needed, samples_per_pixel
from tasks.novelcraft.scene import Scene, build_scene, pixel_rays
from tasks.novelcraft.worldstate import AIR, parse_world_state

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[2] / "shared"))
EPISODE = SHARED / "data" / "novelcraft" / "episodes" / "polycraft_v1"
NOVEL = ("minecraft:crafting_table",)
MEMORY_FRAMES = 2000


def plain_loop(path: Path) -> tuple[np.ndarray, list[str]]:
    """How the released code reads a state: json.load and a growing array."""
    with path.open() as file:
        cells = json.load(file)["map"]
    places = np.zeros((0, 3), int)
    names = []
    for place, block in cells.items():
        if block["name"] != AIR:
            row = np.array([[int(part) for part in place.split(",")]])
            places = np.concatenate([places, row])
            names.append(block["name"])
    return places, names


def embree(scene: Scene) -> np.ndarray:
    """Every sample ray against a triangle scene built for the frame."""
    import open3d as o3d

    cast = o3d.t.geometry.RaycastingScene()
    kinds = []
    for low, high, novel in zip(scene.lower, scene.upper, scene.novel, strict=True):
        box = o3d.t.geometry.TriangleMesh.create_box(*(high - low)).translate(low)
        kinds.append((cast.add_triangles(box), novel))
    rays = pixel_rays(scene, SAMPLES)
    starts = np.broadcast_to(scene.eye, rays.shape)
    found = cast.cast_rays(np.concatenate([starts, rays], axis=2).astype(np.float32))
    novel = [number for number, is_novel in kinds if is_novel]
    shown = np.isin(found["geometry_ids"].numpy(), novel)
    return samples_per_pixel(shown) >= samples_needed("published")


def timed(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Least wall and processor seconds of a round."""
    best = [np.inf, np.inf]
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        spent = (time.perf_counter() - wall, time.process_time() - processor)
        best = [min(pair) for pair in zip(best, spent, strict=True)]
    return best[0], best[1]


@contextmanager
def quiet() -> Iterator[None]:
    """Blender writes its progress to the process's standard output."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def compare(title: str, scenes: Sequence[Scene], published: int, folder: str) -> None:
    few = list(scenes)[:: -(-len(scenes) // published)]
    some = list(scenes)[:: -(-len(scenes) // (4 * published))]
    reference = BlenderRenderer(folder, "published")
    exact = BlenderRenderer(folder, "exact")
    with quiet():
        reference.render(few[0])
        spent = {"blender published": (timed(lambda: [*map(reference.render, few)], 1), len(few))}
        exact.render(some[0])
        spent["blender exact"] = (timed(lambda: [*map(exact.render, some)], 2), len(some))
    spent["open3d, all rays"] = (timed(lambda: [*map(embree, few)], 2), len(few))
    spent["raycast"] = (timed(lambda: [*map(render, scenes)], 5), len(scenes))
    print(
        f"\n{title}\n{'':20}{'frames':>8}{'ms/frame':>12}{'CPU ms':>10}{'frames/s':>10}{'ratio':>9}"
    )
    base = np.array(spent["blender published"][0]) / len(few)
    for name, (seconds, frames) in spent.items():
        wall, processor = np.array(seconds) / frames
        ratio, by_processor = base / (wall, processor)
        print(
            f"{name:20}{frames:8}{wall * 1e3:12.2f}{processor * 1e3:10.2f}{1 / wall:10.1f}"
            f"{ratio:8.0f}x{by_processor:8.0f}x by CPU"
        )


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=int, default=6, help="frames for the slow renderer")
    published = parser.parse_args().published
    files = sorted(EPISODE.glob("*.json"), key=lambda path: int(path.stem))
    if not files:
        sys.exit(f"no states in {EPISODE}: set NOVELTY_SHARED to the shared data")
    ours, _ = timed(lambda: [parse_world_state(path.read_bytes()) for path in files], 5)
    plain, _ = timed(lambda: [plain_loop(path) for path in files], 5)
    print(
        f"reading a state: ours {ours / len(files) * 1e3:.2f} ms, json.load and a loop "
        f"{plain / len(files) * 1e3:.2f} ms, ratio {plain / ours:.1f}x"
    )
    states = [parse_world_state(path.read_bytes()) for path in files]
    scenes = [build_scene(state, NOVEL) for state in states]
    showing = [scene for scene in scenes if render(scene).pixels]
    before = resident()
    for i in range(MEMORY_FRAMES):
        render(scenes[i % len(scenes)])
    print(f"memory over {MEMORY_FRAMES} raycast frames: {resident() - before:+.1f} MB")
    with tempfile.TemporaryDirectory() as folder:
        compare(f"{len(showing)} frames that show the novel block", showing, published, folder)
        compare(f"the real mix, {len(scenes)} frames", scenes, published, folder)
    both, _ = timed(
        lambda: [render(build_scene(parse_world_state(p.read_bytes()), NOVEL)) for p in files], 3
    )
    print(f"\nfile to mask, raycast, real mix: {len(files) / both:.0f} frames/s")
    sys.stdout.flush()
    os._exit(0)  # bpy may crash while it unloads


if __name__ == "__main__":
    main()
