"""Novelty detectors, one file each; a new file is found by itself.

Every module of this package is a detector named like its file, except `base`, `training` and names
that begin with an underscore. Nothing is imported until a detector is asked for, and a detector's
module must not import torch before `fit` or `score` (configs and content keys need only settings).
"""

import pkgutil
from importlib import import_module
from pathlib import Path

from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from tasks.detectors.base import Detector, read_header, read_tensors

_NOT_DETECTORS = {"base", "training"}


def detector_names() -> tuple[str, ...]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(n for n in found if not n.startswith("_") and n not in _NOT_DETECTORS))


def find_detector(name: str) -> type[Detector]:
    """The class of the detector called `name`."""
    if name not in detector_names():
        raise ConfigError(f"no detector {name!r}; there are: {', '.join(detector_names())}")
    module = import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, Detector)
            and value.__module__ == module.__name__
            and getattr(value, "name", None) == name
        ):
            return value
    raise ConfigError(f"tasks/detectors/{name}.py defines no Detector with name = {name!r}")


def load_detector(path: Path, *, device: str = "auto", base: Detector | None = None) -> Detector:
    """The fitted detector that `Detector.save` wrote; `base` where it `requires` another one."""
    header = read_header(path)
    kind = find_detector(header["detector"])
    try:
        settings = type(kind.presets["paper"]).model_validate_json(header["settings"])
    except ValidationError as error:
        raise SourceError(
            f"{path} has settings of another version: {error.errors()[0]['msg']} at "
            f"{error.errors()[0]['loc']}; fit the detector again"
        ) from error
    detector = kind(settings)
    detector.prepare(device=device, base=base)
    if header["base"] != detector.base_fingerprint():
        raise ConfigError(
            f"{path} was fitted on another {kind.requires}: fingerprint {header['base']}, found "
            f"{detector.base_fingerprint()}; load the one that was saved with it"
        )
    detector.record = header["record"]
    detector.restore(read_tensors(path))
    return detector
