"""Deep ensemble: several VGG classifiers; novelty = -max of their mean softmax (NovelCraft 5.1).

Builds on a fitted `vgg_classifier`, which is member 0; the others have its settings, other seeds.
In float32, as released, two thirds of the published scores are exactly -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.learning.samples import Samples
from tasks.learning.trainer import under
from tasks.models.base import BaseRun, Fitting, Model
from tasks.models.frames import ThreadSettings
from tasks.models.vgg_classifier import VggClassifier, softmax
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch


class Configuration(ThreadSettings):
    members: int = Field(5, ge=2, description="Networks, the shared classifier included.")
    softmax: Literal["float32", "float64"] = Field(
        "float32", description="Precision of the probabilities that novelty is made of."
    )


class DeepEnsemble(Model):
    name: ClassVar[str] = "deep_ensemble"
    version: ClassVar[int] = 2
    modality: ClassVar[str] = "image"
    gives: ClassVar[frozenset[str]] = frozenset({"novelty", "logits"})
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"members": 3, "softmax": "float64"},
    }
    others: list[VggClassifier]

    @classmethod
    def bases_of(cls, settings: Any) -> tuple[BaseRun, ...]:
        return (BaseRun("vgg_classifier"),)

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        self.others = []
        histories = []
        for member in range(1, self.settings.members):
            other = VggClassifier(self.bases[0].settings)
            seed = int(np.random.SeedSequence([fitting.seed, member]).generate_state(1)[0])
            work = None if fitting.work is None else fitting.work / f"member_{member}"
            history = other.fit(train, valid, replace(fitting, seed=seed, work=work, keep=None))
            self.others.append(other)
            self.record[f"member_{member}_initial_weights"] = other.record["initial_weights"]
            histories.append(history.with_columns(pl.lit(member, pl.Int64).alias("member")))
        return pl.concat(histories)

    def _outputs(self, samples: Samples) -> Outputs:
        """The logits are logarithms of the mean probabilities; they are no head of any features."""
        members = [member.outputs(samples).logits for member in (*self.bases, *self.others)]
        logits = [rows for rows in members if rows is not None]
        mean = np.mean([softmax(rows) for rows in logits], 0)
        # The logarithm of a probability that vanished in float64 would be infinite.
        log_mean = np.log(np.maximum(mean, np.finfo(np.float64).tiny))
        if self.settings.softmax != "float64":
            mean = np.mean([softmax(rows, self.settings.softmax) for rows in logits], 0)
        return Outputs(log_mean.astype(np.float32), None, -mean.max(1).astype(np.float64))

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {
            f"member_{member}.{name}": value
            for member, other in enumerate(self.others, 1)
            for name, value in other.state().items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.others = []
        for member in range(1, self.settings.members):
            other = VggClassifier(self.bases[0].settings)
            other.prepare(device=self.device)
            other.classes = self.bases[0].classes
            other.restore(under(f"member_{member}.", state))
            self.others.append(other)
