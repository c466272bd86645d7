"""Rotation as the released code does it: identity, vertical flip, transpose, transpose of the flip.

Only the first and the last are rotations (by 0 and by 90 degrees clockwise); numbers that are to be
compared with the paper's tables come from these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tasks.models.pictures import Turned

if TYPE_CHECKING:
    import torch


class RotationReleased(Turned):
    name: ClassVar[str] = "rotation_released"

    def turn(self, pictures: torch.Tensor, number: int) -> torch.Tensor:
        flipped = pictures.flip(2) if number % 2 else pictures
        return flipped.transpose(2, 3) if number >= 2 else flipped
