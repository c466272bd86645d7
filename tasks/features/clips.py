"""What the clip networks share: reading a checkpoint, filling a network, preparing clips, `embed`.

uint8 clips (N, T, H, W, 3), RGB, enter; float32 features (N, dim) leave (KOWL-718 section 5.1).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from schemas.errors import ConfigError, SourceError
from tasks.features.efficientnet import UNREADABLE
from tasks.features.vit import LARGEST_FILE
from tasks.learning.devices import choose_device
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, compute_in_batches

Normalisation = Literal["release", "fair"]
# The release gives both networks the first pair, means over Kinetics. FAIR trained the weights of
# both networks with the second; take it for the accuracies that FAIR published.
NORMALISATIONS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "release": (
        (110.63666788 / 255, 103.16065604 / 255, 96.29023126 / 255),
        (38.7568578 / 255, 37.88248729 / 255, 40.02898126 / 255),
    ),
    "fair": ((0.45, 0.45, 0.45), (0.225, 0.225, 0.225)),
}
STATE_KEYS = ("model_state", "model_state_dict", "state_dict")
# Batches that a norm was trained on: not used, and older files lack it.
COUNTER = "num_batches_tracked"
NAMED_AT_MOST = 3


class ClipNetwork(nn.Module, ABC):
    """Clips (N, 3, frames, side, side) to `dim` features each; `record` names the weights."""

    dim: int
    frames: int
    side: int
    record: str = ""

    @abstractmethod
    def features(self, clips: torch.Tensor) -> torch.Tensor: ...

    def checked(self, clips: torch.Tensor) -> torch.Tensor:
        expected = (3, self.frames, self.side, self.side)
        if tuple(clips.shape[1:]) != expected or clips.ndim != 5:
            raise ConfigError(
                f"clips are {tuple(clips.shape)}, {type(self).__name__} expects (N, "
                f"{', '.join(map(str, expected))}); sample that many frames and crop to that side"
            )
        # On a CPU strided convolutions take 1.6 times as long on permuted memory.
        return clips.contiguous()


def prepare(frames: torch.Tensor, normalisation: Normalisation = "release") -> torch.Tensor:
    """uint8 (N, T, H, W, 3), RGB, to normalised float32 (N, 3, T, H, W)."""
    if frames.dtype != torch.uint8 or frames.ndim != 5 or frames.shape[4] != 3:
        raise ConfigError(
            f"frames are {frames.dtype} {tuple(frames.shape)}, expected uint8 (N, T, H, W, 3)"
        )
    mean, deviation = torch.tensor(NORMALISATIONS[normalisation], device=frames.device)
    return ((frames / 255 - mean) / deviation).permute(0, 4, 1, 2, 3).contiguous()


def embed(
    model: ClipNetwork,
    clips: np.ndarray,
    device: str = "auto",
    batch: int = 4,
    mixed_precision: bool = False,
    *,
    normalisation: Normalisation = "release",
) -> np.ndarray:
    """uint8 (N, T, H, W, 3) to float32 (N, dim). Mixed precision is bfloat16, on a GPU only."""
    if clips.dtype != np.uint8 or clips.shape[1:] != (model.frames, model.side, model.side, 3):
        raise ConfigError(
            f"clips are {clips.dtype} {clips.shape}, expected uint8 (N, {model.frames}, "
            f"{model.side}, {model.side}, 3)"
        )
    device = choose_device(device)
    model.eval().to(device)
    on_gpu = torch.device(device).type == "cuda"
    mixed = mixed_precision and on_gpu and torch.cuda.is_bf16_supported(False)

    def compute(some: Batch) -> dict[str, torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            frames = prepare(some.array("clips"), normalisation)
            return {"features": model.features(frames).float()}

    samples = Samples.unnamed(clips=clips)
    return compute_in_batches(compute, samples, device, batch)["features"]


def read_state(path: Path, wanted: str) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a checkpoint, without the optimiser's, and `name sha256 ...` for the record.

    Only tensors and plain values are unpickled; whatever would run code is refused.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise SourceError(f"weights file {path} not found; name {wanted}")
    if path.stat().st_size > LARGEST_FILE:
        raise SourceError(f"weights file {path} is larger than {LARGEST_FILE >> 30} GB; refused")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, SafetensorError) as error:
        raise SourceError(
            f"weights file {path} is not a plain torch state file ({_reason(error)}); download it "
            "again, or if you trust it, save its model state alone as .safetensors"
        ) from error
    inside = [loaded[key] for key in STATE_KEYS if isinstance(loaded, dict) and key in loaded]
    state = inside[0] if inside else loaded
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(value, torch.Tensor) for value in state.values())
    ):
        raise SourceError(f"weights file {path} holds no state of a network; name {wanted}")
    return state, f"{path.name} sha256 {digest}"


def _reason(error: Exception) -> str:
    """torch's reason alone, without its advice to let the file run code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [n for n, line in enumerate(lines) if line.startswith("Check the documentation")]
    return lines[advice[0] - 1 if advice else 0][:160] if lines else type(error).__name__


def fill(
    network: nn.Module, given: Mapping[str, torch.Tensor], names: Mapping[str, str], path: Path
) -> None:
    """Put every tensor of `given` into `network`, whose tensor `name` is `names[name]` there."""
    state = network.state_dict()
    own = {there: state[name] for name, there in names.items()}
    wrong = {
        "missing": sorted(own.keys() - given.keys()),
        "unexpected": sorted(given.keys() - own.keys()),
        "of another shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(own[name].shape)}"
            for name in sorted(own.keys() & given.keys())
            if own[name].shape != given[name].shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(
            f"{len(found)} {kind}: {', '.join(found[:NAMED_AT_MOST])}"
            f"{', ...' if len(found) > NAMED_AT_MOST else ''}"
            for kind, found in wrong.items()
            if found
        )
        raise SourceError(
            f"weights file {path} does not fit {type(network).__name__} ({said}); "
            "name an unchanged checkpoint of this network"
        )
    bad = [name for name in sorted(own) if not bool(torch.isfinite(given[name]).all())]
    if bad:
        raise SourceError(
            f"weights file {path} holds values that are not finite, first in {bad[0]}; "
            "download it again"
        )
    # Copies: a file's tensors may lie at odd addresses, which changes the last bits of sums.
    counters = {name: torch.tensor(0) for name in state if name.endswith(COUNTER)}
    weights = {name: given[there].float().clone() for name, there in names.items()}
    network.load_state_dict({**counters, **weights}, assign=True)


def require_random(network: str, wanted: str, allow_random: bool) -> None:
    if not allow_random:
        raise ConfigError(
            f"{network} needs a checkpoint: name {wanted}; random weights (allow_random) are for "
            "tests and timing only"
        )
