"""Control without a second loss: a square of the picture's middle is hidden from the class step.

Rule 12 of docs/semantic.md: 16 x 16 inside the central 21 x 21 of a 32 x 32 picture; the
released code does not have it. The region begins at pixel 5 (5.5 would be the middle); the mask has
the mean colour, which is 0 after normalising, and is laid on the cropped picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from schemas.config import Settings
from tasks.models.pictures import PictureClassifier, PictureTraining

if TYPE_CHECKING:
    import torch


class MaskSettings(Settings):
    """The control's mask, in shares of the picture's side; defaults are the paper's on CIFAR-10."""

    side: float = Field(16 / 32, gt=0, lt=1)
    """Side of the mask."""
    region: float = Field(21 / 32, gt=0, le=1)
    """Side of the region that the mask stays in."""
    offset: float = Field(5 / 32, ge=0, lt=1)
    """Where the region begins; the middle would be 5.5 pixels."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.side > self.region or self.offset + self.region > 1:
            raise ValueError("the mask must lie in its region and the region in the picture")
        return self


class Configuration(PictureTraining):
    """With a square hidden from the class step."""

    mask: MaskSettings = MaskSettings()
    """The mask and where it may lie."""


class CentreMask(PictureClassifier):
    name: ClassVar[str] = "centre_mask"
    configuration: ClassVar[type[Settings]] = Configuration

    def class_view(self, pictures: torch.Tensor) -> torch.Tensor:
        import torch

        count, height, width = len(pictures), *pictures.shape[2:]
        device = pictures.device
        rows, columns = (
            self.covered(side, torch.rand(count, device=device)) for side in (height, width)
        )
        hidden = rows[:, None, :, None] & columns[:, None, None, :]
        return pictures.masked_fill(hidden, 0.0)

    def covered(self, side: int, draws: torch.Tensor) -> torch.Tensor:
        """(B, side) places under the mask along one side; `draws` (B,) are uniform in 0..1."""
        import torch

        mask = self.settings.mask
        length, region, offset = (
            round(share * side) for share in (mask.side, mask.region, mask.offset)
        )
        starts = offset + (draws * (region - length + 1)).long().clamp(max=region - length)
        places = torch.arange(side, device=draws.device)
        return (places >= starts[:, None]) & (places < starts[:, None] + length)
