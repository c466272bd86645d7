"""Meshes to sampled clouds, and farthest points, against plain programs, in one run.

`python -m benchmarks.shapes` reads meshes of ModelNet40_mini.zip (found through NOVELTY_SHARED) and
reports, on one thread: meshes per second to 2,048 uniform points for our reader and sampler, for a
plain Open3D loop and for trimesh; the whole way (read, 16,384 candidates, the farthest 4,096,
normalised) for ours and for Open3D; the stage with its child process and Parquet; and farthest
points for ours, the straightforward numpy loop, Open3D and fpsample, also as our option. trimesh
and fpsample are optional. Sets of farthest points are compared where the other side promises the
same rule.
"""

import argparse
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from schemas.threedos import Farthest, ShapeSettings
from storage.raw import open_raw
from tasks.engine.stage import Build
from tasks.threedos.formats import surface_of
from tasks.threedos.ingest import plan_shape_shards, sample_shapes
from tasks.threedos.sampling import (
    bucketed_farthest_points,
    farthest_points,
    make_cloud,
    normalise,
    sample_surface,
    shape_rng,
)
from tasks.threedos.sources import list_shapes
from tasks.threedos.text_meshes import read_off

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[2] / "shared"))
ARCHIVE = SHARED / "data" / "shapes" / "ModelNet40_mini.zip"
UNIFORM, CANDIDATES, POINTS = 2048, 16_384, 4096
SIZES = ((10_000, 1_024), (16_384, 4_096), (100_000, 4_096))


def optional(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        print(f"{name} is not installed: left out (pip install {name})")
        return None


def seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """The best of some rounds, in processor time: the machine may be shared."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def show(title: str, rows: dict[str, float], per: float = 1, unit: str = "s") -> None:
    print(f"\n{title}\n{'':34}{unit:>12}{'to ours':>10}")
    ours = next(iter(rows.values()))
    for name, found in rows.items():
        print(f"{name:34}{per / found if per != 1 else found:12.4g}{found / ours:10.2f}")


# ---------------------------------------------------------------- meshes


def ours_uniform(paths: list[Path]) -> None:
    for path in paths:
        surface = surface_of(read_off(path.read_bytes()))
        sample_surface(surface.corners, surface.areas, UNIFORM, shape_rng(0, path.name))


def open3d_uniform(paths: list[Path]) -> None:
    import open3d

    for path in paths:
        mesh = open3d.io.read_triangle_mesh(str(path))
        np.asarray(mesh.sample_points_uniformly(UNIFORM).points)


def trimesh_uniform(paths: list[Path]) -> None:
    trimesh = sys.modules["trimesh"]
    for path in paths:
        trimesh.load(path, force="mesh").sample(UNIFORM)


def ours_whole(paths: list[Path], farthest: Farthest = "plain") -> None:
    for path in paths:
        surface = surface_of(read_off(path.read_bytes()))
        rng = shape_rng(0, path.name)
        candidates = sample_surface(surface.corners, surface.areas, CANDIDATES, rng)
        make_cloud(candidates, POINTS, "unit_sphere", farthest)


def open3d_whole(paths: list[Path]) -> None:
    import open3d

    for path in paths:
        cloud = open3d.io.read_triangle_mesh(str(path)).sample_points_uniformly(CANDIDATES)
        chosen = cloud.farthest_point_down_sample(POINTS)
        normalise(np.asarray(chosen.points)).astype(np.float32)


def stage_seconds(count: int, folder: Path) -> float:
    """Wall time of the stage for the first meshes, child processes and Parquet included."""
    settings = ShapeSettings(points=POINTS, candidates=CANDIDATES)
    with zipfile.ZipFile(ARCHIVE) as archive:
        for name in sorted(archive.namelist())[:count]:
            archive.extract(name, folder / "raw")
    listing = list_shapes("modelnet40", open_raw(folder / "raw"), settings)
    started = time.perf_counter()
    with Build("threedos", folder / "lake", workers=1) as build:
        build.run(sample_shapes, plan_shape_shards([listing]), settings)
    return time.perf_counter() - started


def compare_meshes(count: int, folder: Path) -> None:
    import open3d

    open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)
    paths = []
    with zipfile.ZipFile(ARCHIVE) as archive:
        for number, name in enumerate(sorted(archive.namelist())[:: max(1, 1688 // count)][:count]):
            paths.append(folder / f"{number}.off")
            # Open3D reads no triangle from a file whose header is glued to the counts.
            paths[-1].write_bytes(b"OFF\n" + archive.read(name)[3:].lstrip())
    rows = {
        "ours": seconds(lambda: ours_uniform(paths)),
        "plain Open3D loop": seconds(lambda: open3d_uniform(paths)),
    }
    if optional("trimesh"):
        rows["trimesh"] = seconds(lambda: trimesh_uniform(paths))
    show(f"{len(paths)} meshes to {UNIFORM} uniform points", rows, len(paths), "meshes/s")
    some = paths[: max(2, count // 8)]
    rows = {
        "ours, ordered": seconds(lambda: ours_whole(some), 1),
        "plain Open3D loop, unordered": seconds(lambda: open3d_whole(some), 1),
    }
    if optional("fpsample"):
        rows["ours, ordered, bucket"] = seconds(lambda: ours_whole(some, "bucket"), 1)
    title = f"{len(some)} meshes to the farthest {POINTS} of {CANDIDATES}, normalised"
    show(title, rows, len(some), "meshes/s")
    wall = stage_seconds(len(some), folder)
    print(f"the stage, child process and Parquet included: {len(some) / wall:.1f} meshes/s (wall)")


# ---------------------------------------------------------------- farthest points


def plain_farthest(points: np.ndarray, count: int) -> np.ndarray:
    nearest = np.full(len(points), np.inf, points.dtype)
    chosen = np.zeros(count, int)
    for number in range(1, count):
        last = points[chosen[number - 1]]
        nearest = np.minimum(nearest, ((points - last) ** 2).sum(axis=1))
        chosen[number] = nearest.argmax()
    return chosen


def compare_farthest() -> None:
    import open3d

    fpsample = optional("fpsample")
    for size, count in SIZES:
        points = np.random.default_rng(0).normal(size=(size, 3))
        points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
        cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(points))
        ours = farthest_points(points, count)
        rows = {"ours": seconds(lambda p=points, c=count: farthest_points(p, c))}
        if size < 50_000:
            plain = plain_farthest(points, count)
            if not np.array_equal(ours, plain):
                sys.exit("our farthest points differ from those of the plain loop")
            rows["straightforward numpy"] = seconds(
                lambda p=points, c=count: plain_farthest(p, c), 1
            )
        rows["Open3D, unordered"] = seconds(
            lambda p=cloud, c=count: p.farthest_point_down_sample(c), 1
        )
        if fpsample is not None:
            rows["fpsample, plain"] = seconds(
                lambda p=points, c=count: fpsample.fps_sampling(p, c, start_idx=0)
            )
            rows["ours, --shapes.farthest bucket"] = seconds(
                lambda p=points, c=count: bucketed_farthest_points(p, c)
            )
        show(f"farthest {count} of {size} points", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", type=int, default=400, help="meshes to read")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        # Read when the libraries load, so it must be there from the start.
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.shapes", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | one)
    if not ARCHIVE.exists():
        sys.exit(f"meshes not found: {ARCHIVE}; set NOVELTY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        compare_meshes(options.meshes, Path(folder))
    compare_farthest()


if __name__ == "__main__":
    main()
