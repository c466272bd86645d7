"""Novelty detectors, one file each; a new file is found by itself.

Every module of this package is a detector named like its file, except `base`, `training` and names
that begin with an underscore. Nothing is imported until a detector is asked for, and a detector's
module must not import torch before `fit` or `score` (configs and content keys need only settings).
"""

from pathlib import Path

from pydantic import ValidationError

from schemas.errors import ConfigError, SourceError
from storage.tensors import read_header, read_tensors
from tasks.detectors.base import Detector
from tasks.engine.plugins import Plugins

PLUGINS = Plugins(__name__, __path__, "model", Detector)
detector_names = PLUGINS.names
find_detector = PLUGINS.find
chosen_detectors = PLUGINS.chosen


def load_detector(path: Path, *, device: str = "auto", base: Detector | None = None) -> Detector:
    """The fitted detector that `Detector.save` wrote; `base` where it `requires` another one."""
    header = read_header(path)
    kind = find_detector(header["detector"])
    try:
        settings = kind.configuration.model_validate_json(header["settings"])
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
