"""What a machine may lack: the shared real data (NOVELTY_SHARED, else the folder beside the
repository) and system libraries. Tests that need it are skipped with the reason."""

import os
from pathlib import Path

import pytest

from tasks.operations.doctor import missing_libraries_of

SHARED = Path(os.environ.get("NOVELTY_SHARED", Path(__file__).parents[1].parent / "shared"))


def shared_path(name: str) -> Path:
    """A file or folder of the shared data; the test is skipped with the reason if it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"shared data not found: {path} (set NOVELTY_SHARED)")
    return path


def need_libraries(user: str) -> None:
    """Skip the test where the system lacks libraries of `BLENDER` or `OPEN3D`."""
    if lacking := missing_libraries_of(user):
        pytest.skip(f"{user} needs {', '.join(lacking)} of the system (make doctor)")
