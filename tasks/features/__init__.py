"""Networks and preprocessing that turn raw arrays into features; one file per network."""

from typing import Literal

# Channels of VGG-16's convolutions; "M" is a 2 x 2 maximum. Here, so that settings need no torch.
VGG16: tuple[int | Literal["M"], ...] = (
    *(64, 64, "M", 128, 128, "M"),
    *(256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
)
