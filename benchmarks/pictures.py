"""Images per second: the Parquet cache against an image-folder loader, in one run.

`python -m benchmarks.pictures` writes image folders of ImageNet-like JPEGs (the shared ImageNet
photographs, each several times) and of CIFAR-10 JPEGs, both found through NOVELTY_SHARED, builds
the cache from them with the stage of the benchmark, and reads both in the same random order on one
thread into the same batches: uint8 RGB, centre crop 224 of 256 x 256 (ImageNet) or
the whole picture (CIFAR-10), normalised to float32 (N, 3, H, W). The folder loader does what the
usual one does: open the file, convert to RGB, shorter side to 256, centre crop. Times are
processor time (the machine may be shared), best of some rounds. "Held" is what small sets are
trained from: decoded once, whose cost is reported, then only gathered.
"""

import argparse
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from schemas.semantic import PictureSettings
from storage.raw import open_raw
from tasks.engine.stage import Build
from tasks.learning.memory import use_memory
from tasks.learning.pictures import Pictures, close_pictures
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.samples import read_pictures
from tasks.semantic.sources import list_images

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[2] / "shared"))
IMAGES = SHARED / "data" / "images"
BATCH = 64


def normalised(pixels: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) bytes to (N, 3, H, W) floats around 0."""
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).astype(np.float32) / 127.5 - 1


def from_folder(paths: list[Path], side: int | None, crop: int) -> None:
    from PIL import Image

    for start in range(0, len(paths), BATCH):
        batch = []
        for path in paths[start : start + BATCH]:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
            if side is not None:
                short = min(image.size)
                size = [int(length * side / short) for length in image.size]
                image = image.resize(size, Image.Resampling.BILINEAR)
            left, top = ((length - crop) // 2 for length in image.size)
            batch.append(np.asarray(image.crop((left, top, left + crop, top + crop))))
        normalised(np.stack(batch))


def from_parquet(pictures: Pictures, order: np.ndarray, crop: int) -> None:
    edge = (pictures.shape[1] - crop) // 2
    for start in range(0, len(order), BATCH):
        pixels = pictures[order[start : start + BATCH]]
        normalised(pixels[:, edge : edge + crop, edge : edge + crop])


def seconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def opened(
    files: list[Path], ids: pl.Series, order: np.ndarray, crop: int, rounds: int, gigabytes: float
) -> tuple[float, float]:
    """Seconds to open the pictures with so much memory, and to go through them."""
    use_memory(gigabytes)
    close_pictures()
    pictures = read_pictures(files, ids)
    started = time.process_time()
    pictures[:1]
    opening = time.process_time() - started
    return opening, seconds(lambda: from_parquet(pictures, order, crop), rounds)


def compare(name: str, root: Path, folder: Path, side: int | None, crop: int, rounds: int) -> None:
    with Build("semantic", folder / f"lake_{name}", workers=1) as build:
        listing = list_images(name, open_raw(root))
        started = time.perf_counter()
        pieces = build.run(read_images, plan_image_shards([listing]), PictureSettings())
        wall = time.perf_counter() - started
        images = build.read("images").sort("sample_id")
    files = [piece.part("pictures").path for piece in pieces]
    order = np.random.default_rng(0).permutation(images.height)
    paths = [root / images["file"][int(row)] for row in order]
    plain = seconds(lambda: from_folder(paths, side, crop), rounds)
    opening, ours = opened(files, images["sample_id"], order, crop, rounds, gigabytes=1e-9)
    holding, held = opened(files, images["sample_id"], order, crop, rounds, gigabytes=100.0)
    cached = sum(file.stat().st_size for file in files)
    raw = sum(path.stat().st_size for path in paths)
    print(f"\n{name}: {images.height} images, {raw / 1e6:.1f} MB raw, {cached / 1e6:.1f} MB cached")
    print(f"  making the cache      {images.height / wall:9.0f} images/s (wall, one child process)")
    print(f"  image folder          {images.height / plain:9.0f} images/s")
    print(f"  cache                 {images.height / ours:9.0f} images/s, {plain / ours:.1f} times")
    print(f"  cache, pixels held    {images.height / held:9.0f} images/s, {plain / held:.1f} times")
    print(f"  decoding all to hold  {holding:9.2f} s")
    print(f"  opening the cache     {opening:9.2f} s")


def write_folders(root: Path, photographs: int, small: int) -> tuple[Path, Path]:
    """Photographs again and again until there are so many; CIFAR-10 test images."""
    sources = sorted((IMAGES / "imagenet_sample").glob("*.JPEG"))
    for number in range(photographs):
        source = sources[number % len(sources)]
        wnid = source.name.partition("_")[0]
        path = root / "imagenet" / "train" / wnid / f"{wnid}_{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
    with zipfile.ZipFile(IMAGES / "cifar10" / "cifar10_jpeg_test.zip") as archive:
        for name in sorted(archive.namelist())[:: max(1, 10_000 // small)]:
            archive.extract(name, root / "cifar10")
    return root / "imagenet", root / "cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=int, default=430, help="ImageNet-like images")
    parser.add_argument("--small", type=int, default=5000, help="CIFAR-10 images")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the best counts")
    options = parser.parse_args()
    if not IMAGES.exists():
        sys.exit(f"images not found: {IMAGES}; set NOVELTY_SHARED")
    import cv2

    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        large, small = write_folders(folder, options.photographs, options.small)
        compare("imagenet", large, folder, 256, 224, options.rounds)
        compare("cifar10", small, folder, None, 32, options.rounds)


if __name__ == "__main__":
    main()
