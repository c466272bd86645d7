"""Rotation as the paper tells it: 0, 90, 180 or 270 degrees, counter-clockwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.models.pictures import Turned

if TYPE_CHECKING:
    import torch


class Rotation(Turned):
    name: ClassVar[str] = "rotation"

    def turn(self, pictures: torch.Tensor, number: int) -> torch.Tensor:
        return pictures.rot90(number, (2, 3))
