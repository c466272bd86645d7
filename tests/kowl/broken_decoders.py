"""Decoders for `tests/kowl/test_videos.py` that hang with the GIL held, or die."""

import ctypes
import os
from pathlib import Path
from typing import Any


def hang(item: Any, out_dir: Path) -> dict[str, Any]:
    ctypes.PyDLL(None).sleep(1000)
    return {}


def die(item: Any, out_dir: Path) -> dict[str, Any]:
    os.abort()
