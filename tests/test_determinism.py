"""Same raw files: byte-identical Parquet, whatever the surroundings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import build_toy, parquet_bytes, write_raw

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
from pathlib import Path
from tests.toy import build_toy
lake, raw, workers, reverse = sys.argv[1:]
build_toy(Path(lake), Path(raw), workers=int(workers), reverse=reverse == "1")
"""


@pytest.mark.parametrize(
    ("workers", "reverse", "zone", "seed", "threads"),
    [
        (1, "0", "UTC", "0", "1"),
        (4, "1", "Asia/Tokyo", "12345", "2"),
        (2, "1", "America/Lima", "7", "8"),
    ],
)
def test_surroundings_do_not_show(tmp_path, workers, reverse, zone, seed, threads):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    environment = os.environ | {
        "TZ": zone,
        "PYTHONHASHSEED": seed,
        "POLARS_MAX_THREADS": threads,
        "LC_ALL": "C",
        "PYTHONPATH": str(ROOT),
    }
    arguments = [str(tmp_path / "other"), str(tmp_path / "raw"), str(workers), reverse]
    subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, cwd=tmp_path, check=True
    )
    mine, theirs = parquet_bytes(tmp_path / "lake"), parquet_bytes(tmp_path / "other")
    assert {k: v for k, v in mine.items() if k.endswith(".parquet")} == {
        k: v for k, v in theirs.items() if k.endswith(".parquet")
    }


LINEAR_ALGEBRA = """
import hashlib
import numpy as np
from tasks.engine.threads import one_blas_thread

one_blas_thread()
from scipy.linalg import cholesky

rows = np.random.default_rng(0).random((600, 1024))
products = rows.T @ rows + np.eye(1024)
print(hashlib.sha256(products.tobytes() + cholesky(products, lower=True).tobytes()).hexdigest())
"""


def test_linear_algebra_does_not_depend_on_the_number_of_threads():
    said = {
        subprocess.run(
            [sys.executable, "-c", LINEAR_ALGEBRA],
            env=os.environ | {"OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(said) == 1
