"""Deep ensemble: several VGG classifiers; score = -max of their mean softmax (NovelCraft 5.1).

Builds on a fitted `vgg_classifier`, which is member 0; the others have its settings, other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from tasks.detectors.base import Detector, TorchSettings
from tasks.detectors.vgg_classifier import VggClassifier, softmax
from tasks.learning.samples import Samples
from tasks.learning.training import Progress
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch


class Configuration(TorchSettings):
    members: int = Field(5, ge=2, description="Networks, the shared classifier included.")


class DeepEnsemble(Detector):
    name: ClassVar[str] = "deep_ensemble"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    gives: ClassVar[frozenset[str]] = frozenset({"novelty", "logits"})
    requires: ClassVar[str | None] = "vgg_classifier"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"members": 3},
    }
    others: list[VggClassifier]

    def _fit(
        self,
        train: Samples,
        valid: Samples | None,
        *,
        seed: int,
        checkpoints: Path | None,
        progress: Progress | None,
    ) -> pl.DataFrame:
        self.others = []
        histories = []
        for member in range(1, self.settings.members):
            other = VggClassifier(self.base.settings)
            other.prepare(device=self.device, base=None)
            history = other.train_network(
                train,
                valid,
                seed=int(np.random.SeedSequence([seed, member]).generate_state(1)[0]),
                checkpoint=checkpoints / f"member_{member}.safetensors" if checkpoints else None,
                progress=progress,
            )
            self.others.append(other)
            self.record[f"member_{member}_initial_weights"] = other.record["initial_weights"]
            histories.append(history.with_columns(pl.lit(member, pl.Int64).alias("member")))
        return pl.concat(histories)

    def _outputs(self, samples: Samples) -> Outputs:
        """The logits are logarithms of the mean probabilities; they are no head of any features."""
        images = Samples(samples.ids, samples.labels, {"images": samples.images()})
        logits = [self.base.outputs(samples).logits]
        logits += [other.outputs(images).logits for other in self.others]
        mean = np.mean([softmax(member) for member in logits], 0)
        # The logarithm of a probability that vanished in float64 would be infinite.
        log_mean = np.log(np.maximum(mean, np.finfo(np.float64).tiny))
        return Outputs(log_mean.astype(np.float32), None, -mean.max(1))

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {
            f"member_{member}.{name}": value
            for member, other in enumerate(self.others, 1)
            for name, value in other.state().items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.others = []
        for member in range(1, self.settings.members):
            other = VggClassifier(self.base.settings)
            other.prepare(device=self.device, base=None)
            prefix = f"member_{member}."
            other.restore(
                {
                    name.removeprefix(prefix): value
                    for name, value in state.items()
                    if name.startswith(prefix)
                }
            )
            self.others.append(other)
