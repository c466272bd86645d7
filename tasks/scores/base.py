"""What a score is: what one pass of a model left in, one novelty a sample out.

`Outputs` are what one forward pass left: logits f (N, C) and penultimate features g (N, D), taken
BEFORE the last BatchNorm and activation (rule 10 of docs/threedos.md). `Reference` is what a score
may learn from: outputs of the training and validation samples and the `Head` that makes f of g.
3DOS's scores are normalities; here a score is NOVELTY, its negative: higher = more novel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from schemas.config import Settings
from schemas.errors import ConfigError, NoveltyError, SourceError
from storage.tensors import plain_tensors, read_header, read_tensors, write_tensors
from tasks.engine.plugins import Plugin
from tasks.learning.devices import to_host

if TYPE_CHECKING:
    import torch
    from torch import nn

NEEDS = frozenset({"logits", "features", "novelty", "head", "train", "valid"})
_OF_OUTPUTS = frozenset({"logits", "features", "novelty"})
_OF_REFERENCE = frozenset({"head", "train", "valid"})

# Numbers of a block that is worked on at a time, in float64: 32 MB.
_BLOCK = 2**22
# Rows by which a reference's head is tried on its outputs, and the difference that is let pass:
# outputs of mixed precision differ by about a thousandth of the largest logit.
_TRIED, _TOLERANCE = 64, 1e-2


@dataclass(frozen=True, eq=False)
class Outputs:
    """`logits` (N, C) and `features` (N, D), float32, a row per sample; some may be absent.

    `novelty` (N,) is the model's own, float64. `predicted` (N,) are the classes that a model names
    which puts out no logits.
    """

    logits: np.ndarray | None = None
    features: np.ndarray | None = None
    novelty: np.ndarray | None = None
    predicted: np.ndarray | None = None

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in ("logits", "features")}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        for name, array in arrays.items():
            if array.ndim != 2 or not array.shape[1] or array.dtype not in (np.float32, np.float64):
                raise ConfigError(
                    f"{name} are {array.dtype} {array.shape}, expected float32 (samples, columns)"
                )
            if not np.isfinite(array).all():
                row = int(np.flatnonzero(~np.isfinite(array).all(1))[0])
                raise NoveltyError(
                    f"{name} of row {row} are not all finite; the network diverged, train it again "
                    "with a lower rate"
                )
        if self.novelty is not None:
            arrays["novelty"] = self.novelty
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"outputs: found rows {lengths}, expected as many logits as features")

    def __len__(self) -> int:
        return next(
            len(array) for array in (self.logits, self.features, self.novelty) if array is not None
        )

    def largest(self) -> float:
        """The largest number of all, by size."""
        arrays = (self.logits, self.features, self.novelty)
        return max(float(np.abs(a).max()) for a in arrays if a is not None and a.size)


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """A BatchNorm as it is at evaluation: four tensors (D,)."""

    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor
    eps: float = 1e-5


@dataclass(frozen=True, eq=False)
class Head:
    """The last layers: logits = weight @ z + bias, z = activation(batch norm(g)).

    `weight` (C, D), `bias` (C,); `slope` of the activation below zero: 0.2 is DGCNN's leaky ReLU,
    0 a ReLU, 1 no activation. Works in the precision and on the device of g.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    norm: BatchNorm | None = None
    slope: float = 1.0

    def __post_init__(self) -> None:
        shapes = {"bias": (tuple(self.bias.shape), tuple(self.weight.shape[:1]))}
        if self.norm is not None:
            for name in ("weight", "bias", "mean", "var"):
                shape = tuple(getattr(self.norm, name).shape)
                shapes[f"batch norm {name}"] = shape, tuple(self.weight.shape[1:])
        wrong = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
        if self.weight.ndim != 2 or wrong:
            raise ConfigError(
                f"head: a weight {tuple(self.weight.shape)} does not go with "
                + ", ".join(f"{n} {f} (expected {e})" for n, (f, e) in wrong.items())
            )

    @classmethod
    def of(cls, linear: nn.Linear, norm: nn.BatchNorm1d | None = None, slope: float = 1.0) -> Head:
        """The head made of these layers; later changes of the layers do not reach it."""
        import torch

        def copied(tensor: torch.Tensor | None, missing: torch.Tensor) -> torch.Tensor:
            return missing if tensor is None else torch.from_numpy(to_host(tensor).copy())

        weight = torch.from_numpy(to_host(linear.weight).copy())
        bias = copied(linear.bias, torch.zeros(len(weight)))
        if norm is None:
            return cls(weight, bias, None, slope)
        if norm.running_mean is None or norm.running_var is None:
            raise ConfigError("head: the BatchNorm keeps no running mean; train it with one")
        zeros, ones = torch.zeros(norm.num_features), torch.ones(norm.num_features)
        kept = BatchNorm(
            copied(norm.weight, ones),
            copied(norm.bias, zeros),
            copied(norm.running_mean, zeros),
            copied(norm.running_var, ones),
            norm.eps,
        )
        return cls(weight, bias, kept, slope)

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def activated(self, g: torch.Tensor) -> torch.Tensor:
        """z (N, D), the input of the last Linear."""
        from torch.nn import functional

        if self.norm is not None:
            mean, var, weight, bias = (
                getattr(self.norm, name).to(g) for name in ("mean", "var", "weight", "bias")
            )
            g = functional.batch_norm(g, mean, var, weight, bias, eps=self.norm.eps)
        return functional.leaky_relu(g, self.slope)

    def linear(self, z: torch.Tensor) -> torch.Tensor:
        """Logits (N, C) of inputs of the last Linear."""
        from torch.nn import functional

        return functional.linear(z, self.weight.to(z), self.bias.to(z))

    def __call__(self, g: torch.Tensor) -> torch.Tensor:
        """Logits (N, C)."""
        return self.linear(self.activated(g))

    def save(self, path: Path) -> None:
        tensors = {"weight": self.weight, "bias": self.bias}
        header: dict[str, Any] = {"slope": self.slope, "eps": None}
        if self.norm is not None:
            header["eps"] = self.norm.eps
            for name in ("weight", "bias", "mean", "var"):
                tensors[f"norm.{name}"] = getattr(self.norm, name)
        write_tensors(path, tensors, {"head": header})

    @classmethod
    def load(cls, path: Path) -> Head:
        """As `save` wrote it, or a plain file of `weight` and `bias` alone, where z is g."""
        if (plain := plain_tensors(path)) is not None:
            if set(plain) != {"weight", "bias"}:
                names = ", ".join(sorted(plain)) or "nothing"
                raise SourceError(
                    f"{path} holds {names}, expected weight and bias of the last Linear; "
                    "`novelty export outputs` writes a head with a BatchNorm"
                )
            return cls(plain["weight"].float(), plain["bias"].float())
        header = read_header(path)
        if "head" not in header:
            raise SourceError(f"{path} holds no head but {sorted(header)}; name another file")
        tensors = read_tensors(path)
        slope, eps = header["head"]["slope"], header["head"]["eps"]
        norm = None
        if eps is not None:
            parts = {name: tensors[f"norm.{name}"] for name in ("weight", "bias", "mean", "var")}
            norm = BatchNorm(**parts, eps=eps)
        return cls(tensors["weight"], tensors["bias"], norm, slope)


@dataclass(frozen=True, eq=False)
class Reference:
    """What scores are fitted on; each score names the parts that it needs.

    `train_labels` and `valid_labels` are int64, the class of each row of `train` and of `valid`.
    """

    train: Outputs | None = None
    train_labels: np.ndarray | None = None
    valid: Outputs | None = None
    head: Head | None = None
    valid_labels: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("train", "valid"):
            outputs, labels = getattr(self, name), getattr(self, f"{name}_labels")
            if labels is not None and (
                outputs is None or labels.shape != (len(outputs),) or labels.dtype != np.int64
            ):
                raise ConfigError(
                    f"reference: {name} labels are {labels.dtype} {labels.shape}, expected int64, "
                    f"one for each row of {name}"
                )
            if outputs is not None and not len(outputs):
                raise ConfigError(f"reference: {name} has no rows; leave it out or fill it")
            if outputs is not None and self.head is not None:
                _try_head(self.head, outputs, name)


def _try_head(head: Head, outputs: Outputs, name: str) -> None:
    """Refuse features that were taken at another layer than the head expects."""
    import torch

    logits, features = outputs.logits, outputs.features
    if features is None:
        return
    if features.shape[1] != head.width:
        raise ConfigError(
            f"reference: features of {name} have {features.shape[1]} columns, the head takes "
            f"{head.width}; both must come from the same network"
        )
    if logits is None:
        return
    ours = head(torch.from_numpy(features[:_TRIED].copy())).numpy()
    theirs = logits[:_TRIED]
    if ours.shape != theirs.shape or np.abs(ours - theirs).max() > _TOLERANCE * max(
        1.0, float(np.abs(theirs).max())
    ):
        raise ConfigError(
            f"reference: the logits of {name} are not what the head makes of its features; take "
            "features before the last BatchNorm and activation, in evaluation mode"
        )


class Score(Plugin, ABC):
    """Subclasses set `name`, `needs`, `configuration` and implement `_score`, perhaps `_fit`.

    Ten lines are a score that works on every benchmark whose runs put out logits::

        class Margin(RowWise):
            name: ClassVar[str] = "margin"
            needs: ClassVar[frozenset[str]] = frozenset({"logits"})

            def _novelty(self, logits: torch.Tensor) -> torch.Tensor:
                best = logits.softmax(1).topk(2).values
                return best[:, 1] - best[:, 0]
    """

    needs: ClassVar[frozenset[str]]

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is None:
            settings = self.configuration()
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"score {self.name} takes {self.configuration.__module__}."
                f"{self.configuration.__name__}, not {type(settings).__name__}"
            )
        self.settings: Any = settings
        self._fitted = not self.needs & _OF_REFERENCE

    def fit(self, reference: Reference) -> None:
        """Take what the score needs of the reference; the same reference gives the same score."""
        for part in sorted(self.needs & _OF_REFERENCE):
            if getattr(reference, part) is None:
                raise ConfigError(f"score {self.name} needs {part}, which the reference lacks")
        self._fit(reference)
        self._fitted = True

    def score(self, outputs: Outputs) -> np.ndarray:
        """One float64 per sample, higher = more novel."""
        self._check(outputs)
        scores = self._score(outputs)
        if not isinstance(scores, np.ndarray):
            raise TypeError(
                f"score {self.name} gave a {type(scores).__name__}, expected an array of float64"
            )
        if scores.shape != (len(outputs),) or scores.dtype != np.float64:
            raise TypeError(
                f"score {self.name} gave {scores.dtype} {scores.shape}, expected float64 "
                f"({len(outputs)},)"
            )
        bad = np.flatnonzero(~np.isfinite(scores))
        if not bad.size:
            return scores
        if outputs.novelty is not None and not np.isfinite(outputs.novelty[bad]).all():
            row = int(np.flatnonzero(~np.isfinite(outputs.novelty))[0])
            raise NoveltyError(
                f"novelty of row {row} is {outputs.novelty[row]}; the network diverged, train it "
                "again with a lower rate"
            )
        names = {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}
        raise NoveltyError(
            f"score {self.name} gave {names[str(scores[bad[0]])]} for {bad.size} of {len(scores)} "
            f"samples whose outputs are finite, first row {bad[0]}; mend the score, or look at "
            f"these outputs: the largest is {outputs.largest():.3g}"
        )

    def predicted(self, outputs: Outputs) -> np.ndarray:
        """The known class of each sample, int64: the largest logit unless the score says else."""
        return self.array(outputs, "logits").argmax(1).astype(np.int64)

    def labels_of(self, outputs: Outputs) -> np.ndarray | None:
        """`predicted`, or None where neither the outputs nor the score name a class."""
        if outputs.logits is None and type(self).predicted is Score.predicted:
            return None
        return self.predicted(outputs)

    def array(self, outputs: Outputs, part: str) -> np.ndarray:
        array = getattr(outputs, part)
        if array is None:
            raise ConfigError(f"score {self.name} needs {part}, which the outputs lack")
        return array

    def train_labels(self, reference: Reference, classes: int | None = None) -> np.ndarray:
        """The labels of the training rows; with `classes`, they must be columns of the logits."""
        labels = reference.train_labels
        if labels is None:
            raise ConfigError(f"score {self.name} needs train_labels, which the reference lacks")
        return self.columns(labels, classes)

    def columns(self, labels: np.ndarray, classes: int | None) -> np.ndarray:
        if classes is not None and not ((labels >= 0) & (labels < classes)).all():
            raise ConfigError(
                f"score {self.name}: labels from {labels.min()} to {labels.max()} are not columns "
                f"of logits of {classes} classes; number the classes as the network does"
            )
        return np.ascontiguousarray(labels)

    def _check(self, outputs: Outputs) -> None:
        if not self._fitted:
            raise ConfigError(f"score {self.name} is not fitted; call fit with a reference first")
        for part in sorted(self.needs & _OF_OUTPUTS):
            self.array(outputs, part)

    def _fit(self, reference: Reference) -> None:
        """See `fit`; what is needed is there."""

    @abstractmethod
    def _score(self, outputs: Outputs) -> np.ndarray:
        """See `score`; what is needed is there."""


class RowWise(Score):
    """A score of each row by itself, computed in float64, some rows at a time."""

    held: int = 0
    """Numbers that `_novelty` makes of a row, where they are more than its inputs."""

    def _score(self, outputs: Outputs) -> np.ndarray:
        import torch

        parts = ("logits", "features", "novelty")
        arrays = [self.array(outputs, part) for part in parts if part in self.needs]
        step = max(1, _BLOCK // max(self.held, 1, *(a.shape[1] for a in arrays if a.ndim > 1)))
        scores = np.empty(len(outputs))
        for start in range(0, len(outputs), step):
            rows = slice(start, start + step)
            blocks = [torch.from_numpy(array[rows].astype(np.float64)) for array in arrays]
            scores[rows] = self._novelty(*blocks).numpy()
        return scores

    @abstractmethod
    def _novelty(self, *blocks: Any) -> torch.Tensor:
        """Novelty (rows,) of float64 logits, features and the model's own novelty, in this order,
        as needed."""
