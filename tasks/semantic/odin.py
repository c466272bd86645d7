"""ODIN with its input step: pictures and a network in, logits, features and one novelty each out.

x' = x - eps * sign(gradient) / std with sign(0) = +1 (docs/semantic.md, 13), where the gradient is
that of the cross entropy of the predicted class at temperature T; the largest softmax probability
of x' at T is the KNOWN score, novelty is minus it. At T = 1000 these numbers lie within a few
thousandths of each other, so the softmax is taken in float64.

x is normalised, (pixel - mean) / std, and `std` is in the units of a SPACE that must be named:
`pixel255` (CIFAR and STL code; a step of some 8e-7 of a normalised unit, so that little but the
temperature is left), `pixel1` (CPC code; some 1.9e-4), `normalised` (no division: eps itself).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from schemas.config import Settings

if TYPE_CHECKING:
    import torch

Space = Literal["pixel255", "pixel1", "normalised"]
# Normalised pictures -> logits, features
Forward = Callable[["torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]


class OdinSettings(Settings):
    """The score; defaults are the CIFAR and STL code's."""

    temperature: float = Field(1000.0, gt=0)
    """Divisor of the logits."""
    epsilon: float = Field(5e-5, ge=0)
    """Size of the input step, in the units of `space`."""
    space: Space = "pixel255"
    """Where epsilon is measured: pixels 0-255, pixels 0-1, or normalised pixels."""
    whole_picture: bool = False
    """Score the picture before it is cut to its middle (CPC code)."""


def step_size(settings: OdinSettings, std: torch.Tensor) -> torch.Tensor:
    """Length of the step in normalised units, by channel; `std` (3,) is that of pixels 0-255."""
    import torch

    if settings.space == "normalised":
        return torch.full_like(std, settings.epsilon)
    return settings.epsilon / (std if settings.space == "pixel255" else std / 255)


def perturbed(pictures: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """A step of `step` (3,) against the gradient's sign; zero counts as positive."""
    import torch

    sign = torch.where(gradient >= 0, 1.0, -1.0).to(pictures)
    return pictures - sign * step.to(pictures)[None, :, None, None]


def odin(
    forward: Forward, pictures: torch.Tensor, std: torch.Tensor, settings: OdinSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, features and novelty (float64) of normalised pictures (B, 3, H, W)."""
    import torch
    from torch.nn import functional

    with torch.enable_grad():
        leaf = pictures.detach().requires_grad_()
        logits, features = forward(leaf)
        scaled = logits.float() / settings.temperature
        loss = functional.cross_entropy(scaled, scaled.argmax(1), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf)
    with torch.no_grad():
        moved, _ = forward(perturbed(pictures, gradient, step_size(settings, std)))
        novelty = -(moved.double() / settings.temperature).softmax(1).amax(1)
    return logits.detach(), features.detach(), novelty
