"""What stages that train models share: names of files, progress, weights."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import SourceError
from storage.filehash import sha256_file
from storage.raw import RawFile

log = logging.getLogger(__name__)

# epoch, number of epochs, values of the epoch
Progress = Callable[[int, int, Mapping[str, float]], None]

MODEL = "model.safetensors"
BASE = "base.safetensors"


def weights_file(path: Path) -> RawFile:
    """A checkpoint file as an input of a shard."""
    if not path.is_file():
        raise SourceError(f"weights file {path} does not exist; name a checkpoint file")
    return RawFile(path.name, path.stat().st_size, sha256_file(path), str(path.absolute()))


@dataclass(frozen=True)
class EpochLines:
    """Progress of training: a line an epoch."""

    title: str

    def __call__(self, epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        measures = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
        log.info(f"  {self.title}: epoch {epoch}/{epochs}, {measures}")
