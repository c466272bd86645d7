"""What a novelty detector is: fit on known samples, then score any; higher = more novel.

`Samples` (ids, labels, named arrays) enter, `Outputs` leave: a float64 novelty of each, and logits
and features where the detector has them. A fitted detector is saved as one safetensors file whose
metadata holds its name, settings and record; no pickle anywhere.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, TrainingError
from storage.tensors import as_tensors, write_tensors
from tasks.engine.plugins import Plugin
from tasks.learning.devices import choose_device
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.training import Progress
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch

NOVELTY_ONLY = frozenset({"novelty"})


class TorchSettings(Settings):
    """Settings of a detector that runs a network."""

    cpu_threads: int = Field(
        2, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )


@dataclass(frozen=True)
class BaseRun:
    """A run that a detector builds on: which model, which of its settings are a condition."""

    model: str
    reads: Literal["model", "outputs"]
    settings: Mapping[str, Any] = field(default_factory=dict)


class Detector(Plugin, ABC):
    """Subclasses set the class variables and implement `_fit`, `state`, `restore` and one of
    `_score` and `_outputs`.

    `modality` is the kind of sample that it takes (`runs`: outputs of other runs), `needs` are the
    arrays that it reads, `gives` what it puts out. One that `requires` another is fitted on top of
    it. A detector that is not `seeded` draws nothing at random.
    """

    modality: ClassVar[str] = "image"
    needs: ClassVar[tuple[str, ...]]
    gives: ClassVar[frozenset[str]] = NOVELTY_ONLY
    requires: ClassVar[str | None] = None
    seeded: ClassVar[bool] = True

    def __init__(self, settings: Settings | str = "paper") -> None:
        if isinstance(settings, str):
            settings = self.resolve(settings)
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"detector {self.name} takes {self.configuration.__name__}, "
                f"not {type(settings).__name__}"
            )
        self.settings: Any = settings
        self.record: dict[str, str] = {}
        self.device = "cpu"
        self.base: Any = None

    @classmethod
    def variants(cls, preset: str, changes: Mapping[str, Any]) -> list[Settings]:
        """Resolved settings, one for each run that the choice asks for."""
        return [cls.resolve(preset, changes)]

    @classmethod
    def bases(cls, settings: Any) -> tuple[BaseRun, ...]:
        """Runs that one with these settings builds on."""
        return (BaseRun(cls.requires, "model"),) if cls.requires else ()

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        """Checkpoint files that training starts from, by name."""
        path = getattr(settings, "weights", None)
        return {} if path is None else {"weights": path}

    def prepare(self, *, device: str, base: Detector | None) -> None:
        """Choose the device and take the fitted detector that this one builds on."""
        if self.requires and (base is None or base.name != self.requires):
            found = "none" if base is None else base.name
            raise ConfigError(
                f"detector {self.name} builds on a fitted {self.requires}, found {found}; "
                "pass it as base"
            )
        self.base = base if self.requires else None
        self.device = choose_device(device)

    def fit(
        self,
        train: Samples,
        valid: Samples | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
        checkpoints: Path | None = None,
        progress: Progress | None = None,
        base: Detector | None = None,
    ) -> pl.DataFrame:
        """Learn from `train`; returns one row per epoch (or per candidate that was tried)."""
        if not len(train):
            raise ConfigError(f"detector {self.name}: no training samples")
        if train.labels is not None and (train.labels == NOVEL).any():
            raise ConfigError(
                f"detector {self.name}: {int((train.labels == NOVEL).sum())} training samples are "
                "labelled novel (-1); train on known classes only"
            )
        self.prepare(device=device, base=base)
        return self._fit(train, valid, seed=seed, checkpoints=checkpoints, progress=progress)

    def outputs(self, samples: Samples) -> Outputs:
        """What one pass leaves of each sample; novelty is float64, higher = more novel."""
        outputs = self._outputs(samples)
        novelty = outputs.novelty
        if novelty is None or novelty.shape != (len(samples),):
            found = None if novelty is None else novelty.shape
            raise ValueError(f"detector {self.name}: scores {found} of {len(samples)} samples")
        bad = np.flatnonzero(~np.isfinite(novelty))
        if bad.size:
            raise TrainingError(
                f"detector {self.name}: {bad.size} scores are not finite, first "
                f"{samples.ids[bad[0]]}: {novelty[bad[0]]}; the training diverged, lower its rate"
            )
        return outputs

    def score(self, samples: Samples) -> np.ndarray:
        """The novelty alone."""
        novelty = self.outputs(samples).novelty
        assert novelty is not None
        return novelty

    def head(self) -> Head | None:
        """The last layer, where the logits are linear in the features."""
        return None

    @abstractmethod
    def _fit(
        self,
        train: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        """See `fit`."""

    def _outputs(self, samples: Samples) -> Outputs:
        """See `outputs`; where there is no more than a novelty, `_score` gives it."""
        return Outputs(novelty=np.asarray(self._score(samples), np.float64))

    def _score(self, samples: Samples) -> np.ndarray:
        """One number per sample, higher = more novel."""
        raise AssertionError(f"detector {self.name} has neither _score nor _outputs")

    @abstractmethod
    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        """What `fit` learned, without the settings and without `base`."""

    @abstractmethod
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave."""

    def fingerprint(self) -> str:
        """sha256 of the learned state."""
        digest = hashlib.sha256(self.name.encode())
        for name, value in sorted(as_tensors(self.state()).items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.numpy())
        return digest.hexdigest()

    def base_fingerprint(self) -> str:
        return self.base.fingerprint() if self.base else ""

    def save(self, path: Path) -> None:
        header = {
            "detector": self.name,
            "settings": self.settings.model_dump_json(),
            "record": self.record,
            "base": self.base_fingerprint(),
        }
        write_tensors(path, self.state(), header)
