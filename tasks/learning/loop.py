"""A training loop: pictures or features and labels in, trained weights and a row per epoch out.

Everything random in an epoch (order, dropout, noise) is drawn from (seed, epoch), so a checkpoint
is the weights, the optimiser's tensors and the epoch number, and a run that was killed and started
again ends with the same bits as an undisturbed one on the same kind of processor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, TrainingError
from storage.tensors import read_header, read_tensors, write_tensors
from tasks.learning.devices import seeded
from tasks.learning.samples import Samples
from tasks.learning.training import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

# uint8 images (N, H, W, 3), labels -> values of the batch; the one called "loss" is minimised
BatchLoss = Callable[["torch.Tensor", "torch.Tensor | None"], Mapping[str, "torch.Tensor"]]

SCORING_BATCH = 32
TRAINER_VERSION = 1
"""Raised when the same settings and samples train to other weights."""


class TrainingSettings(Settings):
    epochs: int = Field(ge=1, description="Passes over the training samples.")
    batch_size: int = Field(ge=1, description="Samples per step.")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="Rule of the steps.")
    learning_rate: float = Field(gt=0, description="Size of the steps.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty of the optimiser.")
    milestones: tuple[int, ...] = Field((), description="Epochs after which the rate drops.")
    decay: float = Field(0.1, gt=0, description="Factor of the rate at each milestone.")
    balanced: bool = Field(
        True, description="Draw samples with replacement, weight 1 / size of their class."
    )
    mixed_precision: bool = Field(True, description="bfloat16 where a GPU has it; never on a CPU.")
    cpu_threads: int = Field(
        1, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )
    checkpoint_every: int = Field(10, ge=1, exclude=True, description="Epochs between checkpoints.")


def train(
    network: nn.Module,
    batch_loss: BatchLoss,
    data: Samples,
    settings: TrainingSettings,
    *,
    seed: int,
    device: str,
    groups: Sequence[Mapping[str, object]] | None = None,
    valid: Samples | None = None,
    train_mode: bool = True,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Train `network` in place. `groups` are torch's parameter groups; default all parameters.

    `checkpoint` is a file: written every `checkpoint_every` epochs and at the end, and taken up
    from if it is there. Known samples of `valid` are measured after each epoch, never learned from.
    """
    import torch

    network.to(device)
    groups = groups or [{"params": list(network.parameters())}]
    groups = [{"lr": settings.learning_rate, **group} for group in groups]
    rates = [float(group["lr"]) for group in groups]
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam(groups, weight_decay=settings.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    history: list[dict[str, float]] = []
    identity = ""
    if checkpoint is not None:
        identity = _identity(network, data, settings, seed)
        if checkpoint.is_file():
            history = _resume(checkpoint, identity, network, optimizer, device)
    known = valid.known() if valid is not None else None
    probabilities = _sampling(data) if settings.balanced else None

    for epoch in range(len(history) + 1, settings.epochs + 1):
        factor = settings.decay ** sum(epoch > milestone for milestone in settings.milestones)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        draws = np.random.default_rng([seed, epoch])
        order = (
            draws.permutation(len(data))
            if probabilities is None
            else draws.choice(len(data), len(data), p=probabilities)
        )
        with seeded([seed, epoch], device, settings.cpu_threads):
            network.train(train_mode)
            row = _epoch(batch_loss, data, order, settings, device, optimizer)
            network.eval()
            if known is not None and len(known):
                with torch.no_grad():
                    measured = _epoch(batch_loss, known, np.arange(len(known)), settings, device)
                row |= {f"valid_{name}": value for name, value in measured.items()}
        if not math.isfinite(row["loss"]):
            raise TrainingError(
                f"training diverged: loss {row['loss']} in epoch {epoch}; lower learning_rate "
                f"(now {settings.learning_rate})"
            )
        history.append(row)
        if checkpoint is not None and (
            epoch % settings.checkpoint_every == 0 or epoch == settings.epochs
        ):
            header = {"identity": identity, "history": history}
            write_tensors(checkpoint, _training_state(network, optimizer), header)
        if progress is not None:
            progress(epoch, settings.epochs, row)
    network.eval()
    frame = pl.DataFrame(history).cast(pl.Float64)
    return frame.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).alias("epoch"), pl.all())


def in_batches(
    compute: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    images: np.ndarray,
    device: str,
    batch_size: int = SCORING_BATCH,
) -> dict[str, np.ndarray]:
    """`compute` on every batch of images, without gradients; its tensors joined as arrays."""
    import torch

    parts: list[dict[str, np.ndarray]] = []
    with torch.no_grad(), seeded([0], device):
        for start in range(0, max(len(images), 1), batch_size):
            batch = torch.from_numpy(np.ascontiguousarray(images[start : start + batch_size]))
            values = compute(batch.to(device))
            parts.append({name: value.cpu().numpy() for name, value in values.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _epoch(
    batch_loss: BatchLoss,
    data: Samples,
    order: np.ndarray,
    settings: TrainingSettings,
    device: str,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, float]:
    """Means over the samples; steps only with an optimiser."""
    import torch

    images = data.images()
    totals: dict[str, torch.Tensor] = {}
    on_gpu = torch.device(device).type == "cuda"
    mixed = settings.mixed_precision and on_gpu and torch.cuda.is_bf16_supported(False)
    # Equal parts, so that no batch of one sample is left over: batch statistics need two.
    for rows in np.array_split(order, math.ceil(len(order) / settings.batch_size)):
        batch = torch.from_numpy(images[rows]).to(device)
        labels = None if data.labels is None else torch.from_numpy(data.labels[rows]).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            values = batch_loss(batch, labels)
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
            values["loss"].backward()
            optimizer.step()
        for name, value in values.items():
            part = value.detach().double() * len(rows)
            totals[name] = totals[name] + part if name in totals else part
    return {name: float(total) / len(order) for name, total in totals.items()}


def _sampling(data: Samples) -> np.ndarray:
    if data.labels is None:
        raise ConfigError("balanced training needs labels; give them or set balanced to false")
    weights = 1 / np.bincount(data.labels)[data.labels]
    return weights / weights.sum()


def _identity(network: nn.Module, data: Samples, settings: TrainingSettings, seed: int) -> str:
    """What must agree for a checkpoint to be taken up."""
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    chosen = settings.model_dump(mode="json")
    return json.dumps([chosen, seed, shapes, data.fingerprint()], sort_keys=True)


def _training_state(
    network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {
            f"optimizer.{index}.{name}": value
            for name, value in values.items()
            if value is not None
        }
    return state


def _resume(
    checkpoint: Path,
    identity: str,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
) -> list[dict[str, float]]:
    header = read_header(checkpoint)
    if header.get("identity") != identity:
        raise ConfigError(
            f"checkpoint {checkpoint} belongs to another run (other settings, seed or samples); "
            "delete it or choose another folder"
        )
    tensors = read_tensors(checkpoint)
    network.load_state_dict(
        {
            name.removeprefix("network."): value
            for name, value in tensors.items()
            if name.startswith("network.")
        }
    )
    network.to(device)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return header["history"]
