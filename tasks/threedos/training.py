"""Training of point networks: clouds (N, P, 3) and labels in, a model saved as safetensors out.

Everything random in an epoch (order, drawn points, augmentation, dropout) comes from (seed, epoch),
so a checkpoint is the weights, the optimisers' tensors and the history, and a training that was
killed and started again ends with the same weights. A trained model in `work` is not trained again.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from schemas.errors import ConfigError, SourceError, TrainingError
from schemas.threedos import Normalisation
from storage.tensors import read_header, read_tensors, write_tensors
from tasks.learning.devices import choose_device, seeded
from tasks.learning.samples import Samples
from tasks.learning.training import Progress
from tasks.threedos import methods, networks
from tasks.threedos.methods.base import Method, TrainingSettings
from tasks.threedos.methods.setups import Setup, check_network, setup_of
from tasks.threedos.networks.augment import augment, draw_points, normalised
from tasks.threedos.networks.heads import initialise

if TYPE_CHECKING:
    import torch

MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
SCORING_BATCH = 16
TRAINER_VERSION = 1
"""Raise it when the loop gives other weights for the same settings and shapes."""


@dataclass(frozen=True, eq=False)
class Model:
    """A fitted method on its device, in evaluation mode; `history` has a row per epoch."""

    method: Method
    setup: Setup
    device: str
    history: pl.DataFrame


def train(
    method: str,
    network: str | None,
    preset: str | Setup,
    clouds: np.ndarray,
    labels: np.ndarray,
    *,
    seed: int,
    work: Path,
    device: str = "auto",
    base: Model | None = None,
    progress: Progress | None = None,
) -> Model:
    """Fit on float32 clouds (N, P, 3) and int64 labels 0..C-1; `work` is this training's folder.

    `base` is the fitted model that the method starts from, where it requires one.
    """
    setup = setup_of(method, network, preset) if isinstance(preset, str) else preset
    classes = _check(clouds, labels)
    kind = methods.find(method)
    chosen = choose_device(device)
    with seeded([seed], chosen):
        fitted = _build(kind, network, setup, classes)
        if setup.model.initial_weights == "normal":
            initialise(fitted.layers)
    start = _take_over(fitted, base)
    fitted.layers.to(chosen)
    header = {
        "method": method,
        "network": network,
        "classes": classes,
        "seed": seed,
        "setup": setup.model_dump(mode="json"),
        "data": Samples([""] * len(labels), labels, {"clouds": clouds}).fingerprint(),
        "base": start,
    }
    if (work / MODEL).is_file():
        _same_run(work / MODEL, header)
        return load(work / MODEL, device=device)
    history = _run(fitted, setup.model, clouds, labels, seed, chosen, header, work, progress)
    state = dict(fitted.layers.state_dict())
    write_tensors(work / MODEL, state, {**header, "history": history})
    (work / CHECKPOINT).unlink(missing_ok=True)
    fitted.layers.eval()
    return Model(fitted, setup, chosen, _history(history))


def load(path: Path, *, device: str = "auto") -> Model:
    """The model that `train` saved."""
    header = read_header(path)
    if "setup" not in header:
        raise SourceError(f"{path} holds no point network; name a {MODEL} of a 3DOS training")
    kind, network = methods.find(header["method"]), header["network"]
    given = header["setup"]
    setup = setup_of(header["method"], network, None, given["model"], given["network"])
    chosen = choose_device(device)
    with seeded([0], chosen):
        fitted = _build(kind, network, setup, header["classes"])
    fitted.layers.load_state_dict(read_tensors(path))
    fitted.layers.to(chosen).eval()
    return Model(fitted, setup, chosen, _history(header["history"]))


def outputs(
    model: Model,
    clouds: np.ndarray,
    *,
    points: int | None = None,
    batch_size: int = SCORING_BATCH,
    normalisation: Normalisation = "unit_sphere",
) -> dict[str, np.ndarray]:
    """`features`, `logits`, `novelty` of clouds (N, P, 3), as far as the method has them.

    `points` places are taken of every cloud (default: as many as in training) and normalised again,
    in the way in which the clouds were;
    with `votes`, several times, and features and novelty are means. The places are the same in all
    clouds, so a shape's row does not depend on the other shapes.
    """
    import torch

    if clouds.ndim != 3 or clouds.shape[2] != 3 or not len(clouds):
        raise ConfigError(f"clouds are {clouds.shape}, expected (shapes, points, 3)")
    training, method = model.setup.model, model.method
    drawn = vote_places(clouds.shape[1], points or training.points, training.votes)
    parts: list[dict[str, np.ndarray]] = []
    with torch.no_grad(), seeded([0], model.device, training.cpu_threads):
        for first in range(0, len(clouds), batch_size):
            batch = _tensor(clouds[first : first + batch_size], model.device)
            with _precision(training, model.device):
                votes = [
                    method.outputs(normalised(batch[:, places], normalisation)) for places in drawn
                ]
            mean = {
                name: torch.stack([v[name].float() for v in votes]).mean(0) for name in votes[0]
            }
            logits = method.logits(mean["features"])
            values = mean if logits is None else {"logits": logits, **mean}
            parts.append({name: value.cpu().numpy() for name, value in values.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def vote_places(points: int, count: int, votes: int) -> list[np.ndarray]:
    """Places of each vote, random ones (a stored cloud begins with its farthest points, which
    training does not prefer); no place serves twice before all have served."""
    count = min(count, points)
    apart = points // count
    rounds = [
        np.random.default_rng([0, number]).permutation(points)
        for number in range(math.ceil(votes / apart))
    ]
    starts = [(vote // apart, vote % apart * count) for vote in range(votes)]
    return [np.sort(rounds[number][start : start + count]) for number, start in starts]


def rate_at(training: TrainingSettings, epoch: int) -> float:
    """Rate of an epoch, counted from 1: linear warm-up, then the cosine from the first epoch on."""
    passed, length = epoch - 1, training.schedule_epochs or training.epochs
    if passed < training.warmup_epochs:
        share = passed / training.warmup_epochs
        return training.warmup_rate + share * (training.learning_rate - training.warmup_rate)
    wave = (1 + math.cos(math.pi * min(1.0, passed / length))) / 2
    return training.final_rate + (training.learning_rate - training.final_rate) * wave


def _run(
    method: Method,
    training: TrainingSettings,
    clouds: np.ndarray,
    labels: np.ndarray,
    seed: int,
    device: str,
    header: dict[str, Any],
    work: Path,
    progress: Progress | None,
) -> list[dict[str, float]]:
    """Train in place, from the checkpoint if there is one; a row per epoch."""
    checkpoint = work / CHECKPOINT
    optimizers = method.optimizers(training)
    history: list[dict[str, float]] = []
    if checkpoint.is_file():
        history = _same_run(checkpoint, header)["history"]
        _restore(read_tensors(checkpoint), method, optimizers)
    for epoch in range(len(history) + 1, training.epochs + 1):
        rate = rate_at(training, epoch)
        for group in optimizers["main"].param_groups:
            group["lr"] = rate
        order = np.random.default_rng([seed, epoch]).permutation(len(labels))
        with seeded([seed, epoch], device, training.cpu_threads):
            method.layers.train()
            row = {"rate": rate}
            for name in method.passes:
                row |= _epoch(method, training, clouds, labels, order, device, optimizers, name)
        if not all(math.isfinite(value) for value in row.values()):
            raise TrainingError(
                f"training of {method.name} diverged in epoch {epoch}: {row}; lower learning_rate "
                f"(now {training.learning_rate})"
            )
        history.append(row)
        if epoch % training.checkpoint_every == 0 and epoch < training.epochs:
            state = _training_state(method, optimizers)
            write_tensors(checkpoint, state, {**header, "history": history})
        if progress is not None:
            progress(epoch, training.epochs, row)
    return history


def _epoch(
    method: Method,
    training: TrainingSettings,
    clouds: np.ndarray,
    labels: np.ndarray,
    order: np.ndarray,
    device: str,
    optimizers: dict[str, torch.optim.Optimizer],
    name: str,
) -> dict[str, float]:
    """One pass over the shapes; means of what the steps report."""
    import torch

    totals: dict[str, torch.Tensor] = {}
    # Equal parts, so that no batch of one shape is left over: batch statistics need two.
    for rows in np.array_split(order, math.ceil(len(order) / training.batch_size)):
        raw = _tensor(clouds[rows], device)
        views = [
            augment(draw_points(raw, training.points), training.augmentation, up=training.up)
            for _ in range(method.views)
        ]
        targets = torch.from_numpy(labels[rows]).to(device).repeat(method.views)
        with _precision(training, device):
            values = method.step(torch.cat(views), targets, optimizers, name)
        for key, value in values.items():
            part = value.detach().double() * len(rows)
            totals[key] = totals[key] + part if key in totals else part
    return {key: float(total) / len(order) for key, total in totals.items()}


def _precision(training: TrainingSettings, device: str) -> contextlib.AbstractContextManager:
    import torch

    mixed = precision_on(training, device) == "bfloat16"
    return torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext()


def precision_on(training: TrainingSettings, device: str) -> str:
    """The arithmetic of a training: bfloat16 where it is asked for and a GPU has it."""
    if device == "cpu" or not training.mixed_precision:
        return "float32"
    import torch

    on_gpu = torch.device(choose_device(device)).type == "cuda"
    return "bfloat16" if on_gpu and torch.cuda.is_bf16_supported(False) else "float32"


def _tensor(clouds: np.ndarray, device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(clouds, np.float32)).to(device)


def _check(clouds: np.ndarray, labels: np.ndarray) -> int:
    """The number of classes."""
    if clouds.ndim != 3 or clouds.shape[2] != 3 or clouds.dtype != np.float32:
        raise ConfigError(
            f"clouds are {clouds.dtype} {clouds.shape}, expected float32 (shapes, points, 3)"
        )
    if labels.shape != (len(clouds),) or labels.dtype != np.int64 or len(labels) < 2:
        raise ConfigError(
            f"labels are {labels.dtype} {labels.shape} of {len(clouds)} shapes, expected one int64 "
            "for each of at least two shapes"
        )
    present = np.unique(labels)
    if present[0] != 0 or present[-1] != len(present) - 1:
        raise ConfigError(
            f"labels are {present.tolist()}, expected 0 to {len(present) - 1} without gaps; train "
            "on known classes only and number them"
        )
    return len(present)


def _build(kind: type[Method], network: str | None, setup: Setup, classes: int) -> Method:
    if type(setup.model) is not kind.configuration:
        raise ConfigError(
            f"method {kind.name} takes {kind.configuration.__module__}.Configuration, "
            f"not {type(setup.model).__module__}.{type(setup.model).__name__}"
        )
    check_network(kind, network)
    built = networks.find(network)(setup.network) if network and setup.network else None
    return kind(setup.model, built, classes)


def _take_over(method: Method, base: Model | None) -> str:
    """Start from the base's layers; returns what they were."""
    if method.requires is None:
        return ""
    if base is None or base.method.name != method.requires:
        found = "none" if base is None else base.method.name
        raise ConfigError(
            f"method {method.name} starts from a fitted {method.requires}, found {found}; pass it "
            "as base"
        )
    state = base.method.layers.state_dict()
    try:
        method.layers.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(
            f"method {method.name}: the base has other layers; use its network, preset and classes"
        ) from error
    arrays = {name: value.cpu().numpy().reshape(-1) for name, value in state.items()}
    digests = [Samples([""] * len(a), None, {n: a}).fingerprint() for n, a in arrays.items()]
    return json.dumps(digests)


def _same_run(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    found = read_header(path)
    kept = {name: found.get(name) for name in header}
    if json.dumps(kept, sort_keys=True) != json.dumps(header, sort_keys=True):
        raise ConfigError(
            f"{path} belongs to another training (other settings, seed or shapes); delete it or "
            "choose another folder"
        )
    return found


def _training_state(
    method: Method, optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, np.ndarray | torch.Tensor]:
    state = {f"layers.{name}": value for name, value in method.layers.state_dict().items()}
    for name, optimizer in optimizers.items():
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if value is not None:
                    state[f"optimizer.{name}.{index}.{key}"] = value
    return state


def _restore(
    state: dict[str, torch.Tensor], method: Method, optimizers: dict[str, torch.optim.Optimizer]
) -> None:
    layers = {n[len("layers.") :]: v for n, v in state.items() if n.startswith("layers.")}
    method.layers.load_state_dict(layers)
    kept: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in optimizers}
    for name, value in state.items():
        if name.startswith("optimizer."):
            _, owner, index, key = name.split(".")
            kept[owner].setdefault(int(index), {})[key] = value
    for owner, optimizer in optimizers.items():
        optimizer.load_state_dict({**optimizer.state_dict(), "state": kept[owner]})


def _history(rows: list[dict[str, float]]) -> pl.DataFrame:
    """Columns epoch, rate, loss, then the others by name."""
    names = sorted(rows[0], key=lambda name: (name != "rate", name != "loss", name))
    frame = pl.DataFrame(rows).cast(pl.Float64)
    return frame.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).alias("epoch"), *names)
