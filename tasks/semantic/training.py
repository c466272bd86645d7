"""Training of classifiers with an auxiliary task: pictures and labels in, a safetensors model out.

Rules 6 to 12 of docs/semantic.md. Every iteration has first one auxiliary step (lambda * loss + L2
on the task's own layers and what it shares), then one class step (cross entropy + L2 on the
classifier), each with an optimiser and momentum of its own. Everything random in an epoch (order,
crops, dropout) comes from (seed, epoch), so a checkpoint is the weights, the momenta and the
history; a training that was killed and started again ends with the same weights. A trained model in
`work` is not trained again. Threads order the sums on a CPU, so the result depends on the caller's
torch.set_num_threads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from schemas.config import make_config
from schemas.errors import ConfigError, SourceError, TrainingError
from storage.tensors import read_header, read_tensors, write_tensors
from tasks.evaluation.conventions import SEMANTIC
from tasks.evaluation.metrics import evaluate
from tasks.learning.devices import choose_device, seeded
from tasks.learning.samples import NOVEL
from tasks.learning.training import Progress
from tasks.semantic import models, networks
from tasks.semantic.models import views
from tasks.semantic.models.base import NetworkModel
from tasks.semantic.models.updates import LEARNED, Updates, under
from tasks.semantic.models.views import Pictures
from tasks.semantic.odin import odin
from tasks.semantic.presets import AuxiliarySetup, Setup, setup_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.scores.base import Head

__all__ = ["Evaluation", "Pictures", "Setup", "Trained", "load", "outputs", "setup_of", "train"]

MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
TRAINER_VERSION = 1
"""Raise it when the same pictures and settings give another network or another history."""
COLUMNS = ("rate", *LEARNED, "test_accuracy", "ap_msp", "ap_odin")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Pictures that are never learned from; a label of -1 is an anomaly."""

    pictures: Pictures
    labels: np.ndarray

    def __post_init__(self) -> None:
        _check_labels(self.pictures, self.labels)
        novel = self.labels == NOVEL
        if not novel.any() or novel.all():
            raise ConfigError(
                f"evaluation: {int(novel.sum())} of {len(novel)} pictures are anomalies (label "
                "-1), expected some and not all"
            )


@dataclass(frozen=True, eq=False)
class Trained:
    """A classifier on its device, in evaluation mode; `history` has a row per epoch.

    `setup` has the network that the model asked for and the weight of its loss; `mean` and `std`
    (3,) are those of the training pixels 0-255.
    """

    setup: Setup
    model: str
    classes: int
    history: pl.DataFrame
    layers: nn.ModuleDict
    mean: torch.Tensor
    std: torch.Tensor
    device: str

    def normalised(self, pictures: torch.Tensor) -> torch.Tensor:
        """What the network takes of uint8 pictures (B, H, W, 3)."""
        return views.normalised(pictures, self.mean, self.std, self.setup.shrink)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of normalised pictures."""
        features = networks.encode(self.layers, self.setup.network, pictures)
        return self.layers["classes"](features), features

    def head(self) -> Head:
        """The linear layer on the features, which stand after the last norm and ReLU."""
        from tasks.scores.base import Head

        return Head.of(self.layers["classes"])


def train(
    setup: Setup,
    model: str,
    pictures: Pictures,
    labels: np.ndarray,
    *,
    seed: int,
    work: Path,
    device: str = "auto",
    test: Evaluation | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Fit on pictures with int64 labels 0..K-1; `work` is this training's folder.

    After each of the last `setup.evaluations` evaluations of `test`, the history has test_accuracy
    (known classes), ap_msp and ap_odin as fractions; they are null in other epochs.
    """
    import torch

    kind = network_model(model)
    setup = resolved(setup, kind)
    classes = _check_training(pictures, labels)
    if test is not None and test.labels.max() >= classes:
        raise ConfigError(
            f"evaluation: a label is {test.labels.max()}, but the classes are 0 to {classes - 1}"
        )
    seen, chosen = views.survey(pictures), choose_device(device)
    header = {
        "model": model,
        "classes": classes,
        "seed": seed,
        "setup": setup.model_dump(mode="json"),
        "data": _digest(seen.digest, labels),
        "test": _digest(views.survey(test.pictures).digest, test.labels) if test else None,
    }
    if (work / MODEL).is_file():
        _same_run(work / MODEL, header)
        (work / CHECKPOINT).unlink(missing_ok=True)
        return load(work / MODEL, device=device)
    task = kind(setup)
    with seeded([seed], chosen):
        layers = networks.build(setup.network, classes).to(chosen)
        own = torch.nn.ModuleDict(task.build()).to(chosen)
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (seen.mean, seen.std))
    fitted = Trained(
        setup, model, classes, pl.DataFrame(), layers, mean.to(chosen), std.to(chosen), chosen
    )
    updates = Updates(fitted, task, own, pictures, labels, seed)
    history = _learn(updates, header, work / CHECKPOINT, test, progress)
    state = {f"layers.{name}": value for name, value in layers.state_dict().items()}
    write_tensors(work / MODEL, {**state, "mean": mean, "std": std}, {**header, "history": history})
    (work / CHECKPOINT).unlink(missing_ok=True)
    return load(work / MODEL, device=device)


def load(path: Path, device: str = "auto") -> Trained:
    """The classifier that `train` saved."""
    header = read_header(path)
    if not {"model", "setup"} <= header.keys():
        raise SourceError(f"{path} holds no picture classifier; name a {MODEL} of such a training")
    setup = make_config(network_model(header["model"]).configuration, header["setup"])
    chosen = choose_device(device)
    tensors = read_tensors(path)
    with seeded([0], chosen):
        layers = networks.build(setup.network, header["classes"])
    layers.load_state_dict(under("layers.", tensors))
    layers.to(chosen).eval()
    return Trained(
        setup,
        header["model"],
        header["classes"],
        _history(header["history"]),
        layers,
        tensors["mean"].to(chosen),
        tensors["std"].to(chosen),
        chosen,
    )


def outputs(
    trained: Trained, pictures: Pictures, *, with_odin: bool = True
) -> dict[str, np.ndarray]:
    """`logits` (N, K) and `features` (N, D) float32, `odin` (N,) float64, higher = more novel.

    ODIN's gradient and second pass cost three times the rest: leave it out where nothing is scored.
    """
    import torch

    setup, size = trained.setup, trained.setup.scoring_batch
    parts: list[tuple[np.ndarray, ...]] = []
    trained.layers.eval()
    # Not in mixed precision: at T = 1000 rounded logits would tie most of the scores.
    with seeded([0], trained.device):
        for first in range(0, len(pictures), size):
            raw = views.decoded(pictures, np.arange(first, min(first + size, len(pictures))))
            whole = torch.from_numpy(raw).to(trained.device)
            batch = trained.normalised(views.plain(whole, setup))
            if not with_odin:
                with torch.no_grad():
                    logits, features = trained.forward(batch)
                parts.append((logits.float().cpu().numpy(), features.float().cpu().numpy()))
                continue
            logits, features, novelty = odin(trained.forward, batch, trained.std, setup.odin)
            if setup.odin.whole_picture:
                *_, novelty = odin(
                    trained.forward, trained.normalised(whole), trained.std, setup.odin
                )
            parts.append(
                (
                    logits.float().cpu().numpy(),
                    features.float().cpu().numpy(),
                    novelty.cpu().numpy(),
                )
            )
    if not parts:
        raise ConfigError("there are no pictures to score; name some")
    arrays = (np.concatenate(part) for part in zip(*parts, strict=True))
    return dict(zip(("logits", "features", "odin"), arrays, strict=False))


def network_model(name: str) -> type[NetworkModel]:
    """The model of that name, which trains a network."""
    kind = models.find(name)
    if not issubclass(kind, NetworkModel):
        raise ConfigError(f"model {name} trains no network")
    return kind


def resolved(setup: Setup, kind: type[NetworkModel]) -> Setup:
    """With the network that the model asks for, and lambda where it was left open."""
    changes: dict[str, Any] = {"network": kind.network(setup.network)}
    if isinstance(setup, AuxiliarySetup) and setup.auxiliary_weight is None:
        changes["auxiliary_weight"] = kind.weight(setup.network_name)
    return setup.model_copy(update=changes)


def precision_of(setup: Setup, device: str) -> str:
    """Arithmetic of training on that device."""
    if not setup.mixed_precision or device == "cpu" or choose_device(device) == "cpu":
        return "float32"
    import torch

    return "bfloat16" if torch.cuda.is_bf16_supported(False) else "float32"


def _learn(
    updates: Updates,
    header: dict[str, Any],
    checkpoint: Path,
    test: Evaluation | None,
    progress: Progress | None,
) -> list[dict[str, float | None]]:
    """A row per epoch; goes on from the checkpoint if there is one."""
    setup, optimizers = updates.model.setup, updates.optimizers()
    history: list[dict[str, float | None]] = []
    if checkpoint.is_file():
        history = _same_run(checkpoint, header)["history"]
        updates.restore(read_tensors(checkpoint), optimizers)
    for epoch in range(len(history) + 1, setup.epochs + 1):
        with seeded([updates.seed, epoch], updates.model.device):
            row = updates.epoch(epoch, optimizers)
        if not all(math.isfinite(value) for value in row.values()):
            raise TrainingError(
                f"training of {header['model']} diverged in epoch {epoch}: {row}; lower "
                f"learning_rate (now {setup.learning_rate})"
            )
        if test is not None and setup.evaluated(epoch):
            row |= _measured(updates.model, test)
        history.append({name: row.get(name) for name in COLUMNS})
        write_tensors(checkpoint, updates.state(optimizers), {**header, "history": history})
        if progress is not None:
            progress(epoch, setup.epochs, row)
    return history


def _measured(model: Trained, test: Evaluation) -> dict[str, float]:
    found = outputs(model, test.pictures)
    logits, novel = found["logits"].astype(np.float64), test.labels == NOVEL
    odds = np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    scores = {"ap_msp": -1 / odds, "ap_odin": found["odin"]}
    measured = {"test_accuracy": float((logits.argmax(1) == test.labels)[~novel].mean())}
    for name, score in scores.items():
        values = evaluate(score, novel, SEMANTIC)
        measured[name] = values.filter(pl.col("metric") == "average_precision")["value"][0]
    return measured


def _digest(pixels: str, labels: np.ndarray) -> str:
    return hashlib.sha256(pixels.encode() + labels.tobytes()).hexdigest()


def _check_labels(pictures: Pictures, labels: np.ndarray) -> None:
    if labels.shape != (len(pictures),) or labels.dtype != np.int64 or len(labels) < 2:
        raise ConfigError(
            f"labels are {labels.dtype} {labels.shape} of {len(pictures)} pictures, expected one "
            "int64 for each of at least two pictures"
        )


def _check_training(pictures: Pictures, labels: np.ndarray) -> int:
    """The number of classes."""
    _check_labels(pictures, labels)
    present = np.unique(labels)
    if len(present) < 2 or present[0] != 0 or present[-1] != len(present) - 1:
        raise ConfigError(
            f"labels are {present.tolist()}, expected 0 to K-1 without gaps and at least two; "
            "train on known classes only and number them"
        )
    return len(present)


def _same_run(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    found = read_header(path)
    kept = {name: found.get(name) for name in header}
    if json.dumps(kept, sort_keys=True) != json.dumps(header, sort_keys=True):
        raise ConfigError(
            f"{path} belongs to another training (other settings, seed or pictures); delete it or "
            "choose another folder"
        )
    return found


def _history(rows: list[dict[str, float | None]]) -> pl.DataFrame:
    """epoch, rate, loss, accuracy, auxiliary_loss, and what was measured on test."""
    frame = pl.DataFrame(rows, schema=dict.fromkeys(COLUMNS, pl.Float64))
    return frame.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).alias("epoch"), pl.all())
