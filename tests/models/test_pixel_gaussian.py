"""The trivial baseline: the density it claims, and a published number on real CIFAR-10."""

import csv
import io
import zipfile

import numpy as np
import pytest
from PIL import Image
from scipy.stats import multivariate_normal
from sklearn.metrics import average_precision_score

from schemas.errors import TrainingError
from tasks.learning.samples import Samples
from tasks.models import load_model
from tasks.models.base import Fitting
from tasks.models.pixel_gaussian import Configuration, PixelGaussian, noisy, shrunk_side
from tests.shared import shared_path

PARTS = {"train": "train_first1000", "test": "test"}
# One draw of noise moves an AP by 0.004 (standard deviation over seeds); the file has two digits.
TOLERANCE = 0.012


def some(count: int, side: int, seed: int = 0) -> Samples:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)
    return Samples([f"{seed}/{number}" for number in range(count)], None, {"images": pixels})


def fitted(train: Samples, side: int, seed: int = 0) -> PixelGaussian:
    model = PixelGaussian(Configuration(side=side))
    model.fit(train, None, Fitting(seed=seed, device="cpu"))
    return model


def test_the_density_is_that_of_three_gaussians():
    train, test = some(200, 3), some(7, 3, seed=1)
    ours = fitted(train, 3, seed=5).outputs(test).novelty
    learned, points = (noisy(one.images()[:], one.ids, 5) for one in (train, test))
    plain = -sum(
        multivariate_normal(part.mean(0), np.cov(part.T, bias=True)).logpdf(points[channel])
        for channel, part in enumerate(learned)
    )
    assert np.allclose(ours, plain, rtol=1e-9)


def test_noise_goes_by_image_and_seed():
    samples = some(6, 2)
    pixels, ids = samples.images()[:], samples.ids
    whole = noisy(pixels, ids, 3)
    assert np.array_equal(whole[:, 4:], noisy(pixels[4:], ids[4:], 3))
    assert not np.array_equal(whole, noisy(pixels, ids, 4))
    noise = whole * 256 % 1
    assert len(np.unique(noise)) == noise.size  # no two pixels share theirs
    back = np.floor(whole * 256).reshape(3, 6, 2, 2).transpose(1, 2, 3, 0)
    assert np.array_equal(back, pixels)


@pytest.mark.parametrize(
    ("side", "images", "expected"), [(32, 9000, 32), (32, 2048, 32), (32, 2047, 16), (32, 3, 1)]
)
def test_pictures_shrink_until_there_are_images_enough(side, images, expected):
    assert shrunk_side(side, images) == expected


def test_a_saved_model_gives_the_same_bits(tmp_path):
    model = fitted(some(100, 8), 4, seed=2)
    path = tmp_path / "model.safetensors"
    model.save(path)
    test = some(20, 8, seed=1)
    kept = load_model(path, device="cpu")
    assert np.array_equal(kept.outputs(test).novelty, model.outputs(test).novelty)
    # Means and the lower halves of the roots, nothing else.
    assert path.stat().st_size < 3 * 8 * (16 + 16 * 17 / 2) + 1000


def test_too_few_images_are_a_sentence():
    with pytest.raises(TrainingError, match=r"pixels of 5 pictures at side 4 have no full .* side"):
        fitted(some(5, 8), 4)


def published() -> dict[str, float]:
    with shared_path("images/expected/trivial_baseline_computed.csv").open(newline="") as file:
        return {
            row["held_out"]: float(row["average_precision"])
            for row in csv.DictReader(file)
            if row["train_images"].startswith("train_first1000")
        }


def real(part: str) -> tuple[Samples, np.ndarray]:
    """Pictures by id, and their classes."""
    path = shared_path(f"images/cifar10/cifar10_jpeg_{PARTS[part]}.zip")
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        read = [np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in names]
    ids = [f"cifar10/{name.removesuffix('.jpg')}" for name in names]
    return Samples(ids, None, {"images": np.stack(read)}), np.array([i.split("/")[2] for i in ids])


def test_one_class_of_real_cifar10():
    held = "horse"
    train, known = real("train")
    test, classes = real("test")
    model = fitted(train.take(np.flatnonzero(known != held)), 32)
    found = 100 * average_precision_score(classes == held, model.outputs(test).novelty)
    assert abs(found - published()[held]) < TOLERANCE
