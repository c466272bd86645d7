"""Pictures in any budget: the same pixels, the same training, memory that does not grow."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.errors import ConfigError, LakeError
from schemas.semantic import PICTURES
from storage.parquet import write_parquet
from tasks.learning.memory import memory_left, new_array, use_memory
from tasks.learning.pictures import Pictures, close_pictures
from tasks.learning.samples import NOVEL, Samples

SIDE = 8


@pytest.fixture(autouse=True)
def plain_budget(tmp_path):
    yield
    use_memory(4.0)
    close_pictures()


def write_pictures(folder: Path, count: int, side: int = SIDE, files: int = 3) -> list[Path]:
    """Drawn pictures p000000, p000001, ... as parts of the table, dealt out by turns."""
    import cv2

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(files):
        rows = []
        for row in range(number, count, files):
            pixels = pixels_of(row, side)
            png = cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
            rows.append((f"p{row:06}", side, side, "png", png))
        frame = pl.DataFrame(rows, PICTURES.polars_schema, orient="row")
        path = folder / f"{number}.parquet"
        write_parquet(frame, PICTURES, path)
        paths.append(path)
    return paths


def pixels_of(row: int, side: int = SIDE) -> np.ndarray:
    """Drawn pixels; in a large picture squares of one colour, so that its file is small."""
    cell = max(1, side // 16)
    cells = np.random.default_rng(row).integers(0, 256, (side // cell, side // cell, 3), np.uint8)
    return cells.repeat(cell, 0).repeat(cell, 1)


@pytest.mark.parametrize("held", [0, 7, 40])
def test_the_same_pixels_whatever_is_held(tmp_path, held):
    files = write_pictures(tmp_path / "parts", 20)
    use_memory(held * SIDE * SIDE * 3 / 1e9, tmp_path / "work")
    order = np.random.default_rng(0).permutation(20)
    pictures = Pictures(files, [f"p{row:06}" for row in order])
    expected = np.stack([pixels_of(row) for row in order])
    assert pictures.shape == expected.shape and len(pictures) == 20
    np.testing.assert_array_equal(pictures[[5, 0, 19, 5]], expected[[5, 0, 19, 5]])
    np.testing.assert_array_equal(pictures[3], expected[3])
    np.testing.assert_array_equal(pictures[4:17], expected[4:17])
    again = pickle.loads(pickle.dumps(pictures))
    np.testing.assert_array_equal(again[:], expected)
    unread = Pictures(files, pictures.ids).take(np.array([2, 9]))
    np.testing.assert_array_equal(unread[:], expected[[2, 9]])
    samples = Samples(list(pictures.ids), None, {"images": pictures})
    in_memory = Samples(list(pictures.ids), None, {"images": expected})
    assert samples.fingerprint() == in_memory.fingerprint()


def test_what_is_held_is_given_back(tmp_path):
    files = write_pictures(tmp_path / "parts", 30)
    use_memory(20 * SIDE * SIDE * 3 / 1e9, tmp_path / "work")
    before = memory_left()
    first = Pictures(files, [f"p{row:06}" for row in range(12)])
    first[:1]
    assert memory_left() == before - 12 * SIDE * SIDE * 3
    second = Pictures(files, [f"p{row:06}" for row in range(12, 30)])
    second[:1]
    assert memory_left() < SIDE * SIDE * 3
    np.testing.assert_array_equal(second[17], pixels_of(29))
    del first, second
    close_pictures()
    assert memory_left() == before


def test_an_array_over_the_budget_lies_in_a_file(tmp_path):
    use_memory(1e-3, tmp_path / "work")
    small, large = new_array((10, 5), np.float32), new_array((1000, 500), np.float32)
    assert type(small) is np.ndarray and isinstance(large, np.memmap)
    large[:] = 1
    assert large.sum() == 500_000 and not list((tmp_path / "work").iterdir())


def test_rows_without_a_label_are_left_where_they_are(tmp_path):
    files = write_pictures(tmp_path / "parts", 6)
    labels = np.array([0, NOVEL, 1, NOVEL, 0, 1])
    ids = [f"p{row:06}" for row in range(6)]
    known = Samples(ids, labels, {"images": Pictures(files, ids)}).known()
    assert not isinstance(known.images(), np.ndarray)
    np.testing.assert_array_equal(known.images()[:], [pixels_of(row) for row in (0, 2, 4, 5)])


def test_wrong_pictures_are_said(tmp_path):
    files = write_pictures(tmp_path / "parts", 4, files=1)
    other = write_pictures(tmp_path / "others", 4, side=9, files=1)
    with pytest.raises(LakeError, match="1 pictures are not in the table, such as p000004"):
        Pictures(files, ["p000001", "p000004"])[:]
    with pytest.raises(ConfigError, match=r"several sizes \(8 x 8, 9 x 9"):
        Pictures([*files, *other], ["p000001", "p000002"])[:]
    frame = pl.read_parquet(files[0]).with_columns(data=pl.lit(b"no picture"))
    write_parquet(frame, PICTURES, files[0])
    with pytest.raises(LakeError, match="p000000 is damaged"):
        Pictures(files, ["p000000"])[:]


# ---------------------------------------------------------------- memory

CHILD = """
import json, sys, threading, time
import numpy as np
from pathlib import Path
from tasks.learning.memory import use_memory
from tasks.learning.pictures import Pictures
from tasks.learning.samples import Samples
from tasks.models import find
from tasks.models.base import Fitting

folder, count, budget, names = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
use_memory(budget, Path(folder) / "work")
files = sorted(Path(folder, str(count)).glob("*.parquet"))
peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = max(peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

ids = [f"p{row:06}" for row in range(count)]
samples = Samples(ids, np.arange(count) % 3, {"images": Pictures(files, ids)})
peaks = {}
for name in names.split(","):
    kind = find(name)
    model = kind(kind.resolve("small", json.loads(sys.argv[5]).get(name, {})))
    watcher = threading.Thread(target=watch)
    watcher.start()
    model.fit(samples, samples, Fitting(device="cpu", work=Path(folder, f"{name}-{count}")))
    model.outputs(samples)
    done.set()
    watcher.join()
    done.clear()
    peaks[name], peak = peak, 0
print(json.dumps(peaks))
"""
MODELS = {
    "pixel_gaussian": {"side": 4},
    "patch_memory": {"candidates": 500},
    "backbone": {"epochs": 1},
}


def peak_memory(folder: Path, count: int, models: dict, budget: float) -> dict[str, int]:
    """RssAnon in kB of a process that fits these models on so many pictures and passes them."""
    arguments = [folder, count, budget, ",".join(models), json.dumps(models)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_memory_does_not_grow_with_the_number_of_pictures(tmp_path):
    """Ten times as many pictures, 74 MB of pixels, in a budget of 1 MB."""
    models = {"colour_rarity": {}}
    for count in (150, 1500):
        write_pictures(tmp_path / str(count), count, side=128, files=count // 50)
    few, many = (peak_memory(tmp_path, count, models, 1e-3) for count in (150, 1500))
    assert many["colour_rarity"] < 1.2 * few["colour_rarity"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_of_trainings_does_not_grow_with_the_number_of_pictures(tmp_path):
    for count in (80, 800):
        write_pictures(tmp_path / str(count), count, side=192, files=count // 20)
    few, many = (peak_memory(tmp_path, count, MODELS, 5e-3) for count in (80, 800))
    for name in MODELS:
        assert many[name] < 1.2 * few[name], name
