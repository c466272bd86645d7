"""One model of both modalities: fuses a visual and a symbolic score of each frame or episode.

Scores of two fitted models enter as arrays "visual" and "symbolic" (`paired_scores` joins them;
`episode_scores` first, for episodes: maxima must be calibrated by maxima). Known validation samples
calibrate; those that the two were trained on would look too normal.
Rules: `fisher` and `max` turn each score into an empirical p-value and give -2 (log p + log q) or
-2 log min(p, q); neither claims to be a test, since the frames of an episode are not independent.
`range` adds the scores mapped to [0, 1] by the range of the calibration, as NovelCraft's released
fusion does; `released` has the constants of the released ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.samples import Samples
from tasks.models.base import BaseRun, Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

MODALITIES = ("visual", "symbolic")
# Smallest and largest score that the released fusion maps to 0 and 1.
RELEASED = {"visual": (0.0, 0.0065), "symbolic": (0.2429, 29.5301)}


class Configuration(Settings):
    rule: Literal["fisher", "max", "range", "released"] = Field(
        "fisher", description="How the two scores become one."
    )
    visual: str = Field("patch_memory", description="Model that the visual score is of.")
    symbolic: str = Field("symbolic_mlp", description="Model that the symbolic score is of.")
    context: int = Field(5, ge=1, description="Context of the symbolic model's run.")


class Multimodal(Model):
    name: ClassVar[str] = "multimodal"
    modality: ClassVar[str] = "runs"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"rule": "range", "visual": "autoencoder_patch"},
        "small": {},
    }
    calibration: dict[str, np.ndarray]

    @classmethod
    def bases_of(cls, settings: Any) -> tuple[BaseRun, ...]:
        return (
            BaseRun(settings.visual, "outputs"),
            BaseRun(settings.symbolic, "outputs", {"context": settings.context}),
        )

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        known = None if valid is None else valid.known()
        if known is None or not len(known):
            raise ConfigError(
                f"model {self.name}: no known validation samples; give the scores of normal "
                "frames or episodes that neither model was trained on"
            )
        self.calibration = {name: np.sort(_scores(known, name)) for name in MODALITIES}
        self.record = {
            "visual": self.settings.visual,
            "symbolic": self.settings.symbolic,
            "calibration_samples": str(len(known)),
        }
        rows = [
            (name, len(scores), scores[0], np.median(scores), scores[-1])
            for name, scores in self.calibration.items()
        ]
        columns = ["modality", "samples", "least", "median", "largest"]
        return pl.DataFrame(rows, schema=columns, orient="row")

    def _outputs(self, samples: Samples) -> Outputs:
        rule = self.settings.rule
        parts = []
        for name in MODALITIES:
            scores, calibration = _scores(samples, name), self.calibration[name]
            if rule in ("fisher", "max"):
                parts.append(2 * surprise(scores, calibration))
            else:
                low, high = (
                    RELEASED[name] if rule == "released" else (calibration[0], calibration[-1])
                )
                parts.append((scores - low) / (high - low if high > low else 1))
        return Outputs(novelty=np.maximum(*parts) if rule == "max" else parts[0] + parts[1])

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.calibration)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.calibration = {name: state[name].numpy() for name in MODALITIES}


def surprise(scores: np.ndarray, calibration: np.ndarray) -> np.ndarray:
    """-log of the empirical p-value (1 + number of calibration scores >= score) / (n + 1).

    `calibration` is sorted. Beyond its largest score p falls on as 1 / distance (in units of
    largest minus median), so that order is kept and yet no modality can drown the other.
    """
    n, largest = len(calibration), calibration[-1]
    at_least = n - np.searchsorted(calibration, scores, side="left")
    unit = largest - np.median(calibration)
    beyond = np.maximum(scores - largest, 0) / (unit if unit > 0 else max(abs(largest), 1.0))
    return np.log((n + 1) / (at_least + 1)) + np.log1p(beyond)


def _scores(samples: Samples, name: str) -> np.ndarray:
    scores = samples.array(name)[:].astype(np.float64)
    if scores.ndim != 1:
        raise ConfigError(f"{name} scores have shape {scores.shape}, expected one number each")
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ConfigError(
            f"{bad.size} {name} scores are not finite, first {samples.ids[bad[0]]}: "
            f"{scores[bad[0]]}; look for a diverged model"
        )
    return scores


def paired_scores(
    visual: pl.DataFrame,
    symbolic: pl.DataFrame,
    labels: np.ndarray | None = None,
    *,
    on: Literal["frame_id", "episode_id"] = "frame_id",
) -> Samples:
    """Two score tables of the same frames or episodes; samples in the order of `visual`."""
    paired = visual.select(on, pl.col("score").alias("visual")).join(
        symbolic.select(on, pl.col("score").alias("symbolic")),
        on=on,
        how="left",
        validate="1:1",
        maintain_order="left",
    )
    missing = paired.filter(pl.col("symbolic").is_null())
    if missing.height:
        raise ConfigError(
            f"{missing.height} of {paired.height} have a visual score but no symbolic one, first "
            f"{on} {missing[on][0]}; score the same episodes with both models"
        )
    arrays = {name: paired[name].to_numpy() for name in MODALITIES}
    return Samples(paired[on].to_list(), labels, arrays)


def episode_scores(frames: pl.DataFrame, *, drop_last: bool = True) -> pl.DataFrame:
    """The largest frame score of each episode; `frames` has episode_id, position, score.

    The last frame of an episode is left out, since its picture may show the next game, unless it is
    the only one.
    """
    last = pl.col("position") == pl.col("position").max().over("episode_id")
    alone = pl.len().over("episode_id") == 1
    used = frames.filter(~last | alone) if drop_last else frames
    return used.group_by("episode_id").agg(pl.col("score").max()).sort("episode_id")
