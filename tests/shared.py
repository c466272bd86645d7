"""Where the shared real data is: NOVELTY_SHARED, else the folder beside the repository."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[1].parent / "shared"))


def shared_path(name: str) -> Path:
    """A file or folder of the shared data; the test is skipped with the reason if it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"shared data not found: {path} (set NOVELTY_SHARED)")
    return path
