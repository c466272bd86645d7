"""ODIN with its step on the input, on top of a fitted classifier of pictures.

x' = x - eps * sign(gradient) / std with sign(0) = +1 (docs/semantic.md, 13), where the gradient is
that of the cross entropy of the predicted class at temperature T; the largest softmax probability
of x' at T is the KNOWN score, novelty is minus it. At T = 1000 these numbers lie within a few
thousandths of each other, so the softmax is taken in float64. Without a step (eps = 0) no gradient
is needed; the score file tasks/scores/odin.py is that case for any logits.

x is normalised, (pixel - mean) / std, and `std` is in the units of a SPACE that must be named:
`pixel255` (CIFAR and STL code; a step of some 8e-7 of a normalised unit, so that little but the
temperature is left), `pixel1` (CPC and NovelCraft code; some 1.9e-4), `normalised` (no division:
eps itself).

The classifier below is any model of pictures with `inputs(batch, whole=...)` (what its network
takes), `classify(inputs)` (logits and features) and `input_deviation()` (std of pixels 0-255 by
channel); the latter two need a fitted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks import models, networks
from tasks.features.images import IMAGENET_MEAN
from tasks.learning.devices import seeded, to_device
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.trainer import compute_in_batches
from tasks.models.base import BaseRun, Fitting, Model
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

    from tasks.learning.trainer import Batch

# Normalised pictures -> logits, features
Classify = Callable[["torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]

ALL = "all"
METHODS = ("inputs", "classify", "input_deviation")
"""What a model must have for ODIN to build on it."""


class OdinSettings(Settings):
    """The score; defaults are the CIFAR and STL code's."""

    temperature: float = Field(1000.0, gt=0, description="Divisor of the logits.")
    epsilon: float = Field(
        5e-5, ge=0, description="Size of the input step, in the units of space; 0: none."
    )
    space: Literal["pixel255", "pixel1", "normalised"] = Field(
        "pixel255",
        description="Where epsilon is measured: pixels 0-255, pixels 0-1, normalised pixels.",
    )
    step: Literal["corrected", "released"] = Field(
        "corrected",
        description="released also subtracts ImageNet's mean from the sign (NovelCraft code).",
    )
    whole_picture: bool = Field(
        False, description="Score the picture before it is cut to its middle (CPC code)."
    )


class Configuration(OdinSettings):
    base: str = Field(
        ALL, description="Classifier that it builds on; all: a run for each one that is chosen."
    )
    choose: Literal["fixed", "validation"] = Field(
        "fixed",
        description="Take temperature and epsilon as given, or the best of the grid by AUROC on "
        "validation samples.",
    )
    temperatures: tuple[float, ...] = Field(
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), description="Grid for choose = validation."
    )
    epsilons: tuple[float, ...] = Field(
        tuple(round(i * 0.0002, 4) for i in range(21)), description="Grid for choose = validation."
    )


def step_size(settings: OdinSettings, std: torch.Tensor) -> torch.Tensor:
    """Length of the step in normalised units, by channel; `std` (3,) is that of pixels 0-255."""
    import torch

    if settings.space == "normalised":
        return torch.full_like(std, settings.epsilon)
    return settings.epsilon / (std if settings.space == "pixel255" else std / 255)


def perturbed(
    pictures: torch.Tensor,
    gradient: torch.Tensor,
    step: torch.Tensor,
    mean: Sequence[float] | None = None,
) -> torch.Tensor:
    """A step of `step` (3,) against the gradient's sign less `mean`; zero counts as positive."""
    import torch

    sign = torch.where(gradient >= 0, 1.0, -1.0).to(pictures)
    if mean is not None:
        sign = sign - to_device(np.array(mean, np.float32), sign.device)[None, :, None, None]
    return pictures - sign * step.to(pictures)[None, :, None, None]


def odin(
    classify: Classify, pictures: torch.Tensor, std: torch.Tensor, settings: OdinSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, features and novelty (float64) of normalised pictures (B, 3, H, W)."""
    import torch
    from torch.nn import functional

    with torch.set_grad_enabled(settings.epsilon > 0):
        leaf = pictures.detach().requires_grad_(settings.epsilon > 0)
        logits, features = classify(leaf)
    moved = logits.detach()
    if settings.epsilon > 0:
        with torch.enable_grad():
            scaled = logits.float() / settings.temperature
            loss = functional.cross_entropy(scaled, scaled.argmax(1), reduction="sum")
            (gradient,) = torch.autograd.grad(loss, leaf)
        mean = IMAGENET_MEAN if settings.step == "released" else None
        with torch.no_grad():
            moved, _ = classify(perturbed(pictures, gradient, step_size(settings, std), mean))
    novelty = -(moved.double() / settings.temperature).softmax(1).amax(1)
    return logits.detach(), features.detach(), novelty


class Odin(Model):
    name: ClassVar[str] = "odin"
    modality: ClassVar[str] = "image"
    configuration: ClassVar[type[Settings]] = Configuration
    temperature: float
    epsilon: float

    @classmethod
    def preset_values(cls, preset: str, network: str | None) -> dict[str, Any]:
        """What models on its base's network have as `odin`."""
        below = {} if network is None else networks.find(network).training(preset)
        return dict(below.get("odin", {}))

    @classmethod
    def variants(
        cls, preset: str, changes: Mapping[str, Any], network: str | None, names: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """One for each base; with `all` and no classifier chosen, `classifier` is the one."""
        base = cls.resolve(preset, changes, network).base
        bases = [base] if base != ALL else [name for name in names if _fits(name)] or ["classifier"]
        return [{**changes, "base": name} for name in bases]

    @classmethod
    def bases_of(cls, settings: Any) -> tuple[BaseRun, ...]:
        if not _fits(settings.base):
            raise ConfigError(
                f"{cls.name}: base is {settings.base}, expected a classifier of pictures"
            )
        return (BaseRun(settings.base),)

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        history = pl.DataFrame()
        if self.settings.choose == "validation":
            names, numbers = ("temperature", "epsilon"), self.settings
            grid = [(t, e) for e in numbers.epsilons for t in numbers.temperatures]
            best, history = best_candidate(self, names, grid, self._novelty_at, valid, fitting)
        else:
            best = {"temperature": self.settings.temperature, "epsilon": self.settings.epsilon}
        self.temperature, self.epsilon = best["temperature"], best["epsilon"]
        self.record["chosen"] = best
        return history

    def _novelty_at(self, valid: Samples, temperature: float, epsilon: float) -> np.ndarray | None:
        self.temperature, self.epsilon = temperature, epsilon
        return self._outputs(valid).novelty

    def _outputs(self, samples: Samples) -> Outputs:
        base: Any = self.bases[0]
        settings = self.settings.model_copy(
            update={"temperature": self.temperature, "epsilon": self.epsilon}
        )
        whole = {"whole": True} if settings.whole_picture else {}
        deviation = base.input_deviation()

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            logits, _, novelty = odin(
                base.classify, base.inputs(batch, **whole), deviation, settings
            )
            if settings.whole_picture:
                logits, _ = base.classify(base.inputs(batch))  # the class is its base's
            return {"predicted": logits.argmax(1), "novelty": novelty}

        with seeded([0], self.device, base.settings.cpu_threads):
            arrays = compute_in_batches(compute, samples, self.device, base.scoring_batch())
        return Outputs(novelty=arrays["novelty"], predicted=arrays["predicted"])

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return {"temperature": np.array([self.temperature]), "epsilon": np.array([self.epsilon])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.temperature, self.epsilon = float(state["temperature"]), float(state["epsilon"])


def _fits(name: str) -> bool:
    """Whether ODIN can build on the model of that name."""
    return name in models.names() and all(hasattr(models.find(name), m) for m in METHODS)


def best_candidate(
    model: Model,
    names: Sequence[str],
    grid: Sequence[tuple[float, ...]],
    novelty: Callable[..., np.ndarray | None],
    valid: Samples | None,
    fitting: Fitting,
) -> tuple[dict[str, float], pl.DataFrame]:
    """The first candidate of the largest AUROC on validation samples, and a row for each.

    `names` are those of a candidate's numbers; `novelty` is called with the samples and them.
    """
    from sklearn.metrics import roc_auc_score

    novel = np.zeros(0, bool) if valid is None or valid.labels is None else valid.labels == NOVEL
    if novel.all() or not novel.any():
        raise ConfigError(
            f"model {model.name}: choose = validation needs known and novel validation samples, "
            f"found {int((~novel).sum())} and {int(novel.sum())}; set choose to fixed"
        )
    rows = []
    for number, values in enumerate(grid, 1):
        area = float(roc_auc_score(novel, novelty(valid, *values)))
        rows.append({**dict(zip(names, values, strict=True)), "valid_auroc": area})
        if fitting.progress is not None:
            fitting.progress(number, len(grid), rows[-1])
    history = pl.DataFrame(rows, schema=dict.fromkeys((*names, "valid_auroc"), pl.Float64))
    best = int(history["valid_auroc"].arg_max() or 0)
    is_best = pl.int_range(pl.len()) == best
    candidate = dict(zip(names, map(float, grid[best]), strict=True))
    return candidate, history.with_columns(is_best.cast(pl.Float64).alias("chosen"))
