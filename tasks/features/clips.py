"""What the clip networks share: their form, and preparing clips.

uint8 clips (N, T, H, W, 3), RGB, enter; float32 features (N, dim) leave (KOWL-718 section 5.1), and
logits of the classes that the network was trained on; tasks/models/clips.py passes them through.
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import nn

from schemas.errors import ConfigError
from tasks.learning.devices import to_device

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


class ClipNetwork(nn.Module, ABC):
    """Clips (N, 3, frames, side, side) to `dim` features each; `record` names the weights."""

    dim: int
    frames: int
    side: int
    record: str = ""

    @abstractmethod
    def features(self, clips: torch.Tensor) -> torch.Tensor: ...

    @property
    @abstractmethod
    def classifier(self) -> nn.Linear | None:
        """From features to logits; None where the file had none."""

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
    mean, deviation = to_device(np.array(NORMALISATIONS[normalisation], np.float32), frames.device)
    return ((frames / 255 - mean) / deviation).permute(0, 4, 1, 2, 3).contiguous()


def require_random(network: str, file: str, allow_random: bool) -> None:
    if not allow_random:
        raise ConfigError(
            f"{network} needs a checkpoint: name {file}; random weights (allow_random) are for "
            "tests and timing only"
        )
