"""The autoencoder of LSA for CIFAR-10 without its density estimator (NovelCraft 5.1).

Channels are 32, 64, 128, 256, the code has 100 values in (0, 1). Images (N, 3, h, w) in [0, 1]
enter and leave. The first convolution has no padding, so its border is two pixels less wide; each
halving rounds up, so that the deepest map still has an eighth of the sides.
"""

import torch
from torch import nn

from schemas.errors import ConfigError

CHANNELS = (32, 64, 128, 256)
SHRINK = 8


class Residual(nn.Module):
    """Two convolutions and a short cut; `stride` 2 halves the sides, `grow` doubles them."""

    def __init__(self, inside: int, outside: int, *, stride: int = 1, grow: bool = False) -> None:
        super().__init__()
        if grow:
            first: nn.Module = nn.ConvTranspose2d(inside, outside, 5, 2, 2, 1, bias=False)
            short: nn.Module = nn.ConvTranspose2d(inside, outside, 1, 2, 0, 1, bias=False)
        else:
            first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            short = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.main = nn.Sequential(
            first,
            nn.BatchNorm2d(outside),
            nn.LeakyReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        plain = inside == outside and stride == 1 and not grow
        self.short = nn.Identity() if plain else nn.Sequential(short, nn.BatchNorm2d(outside))
        self.activation = nn.LeakyReLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.activation(self.main(images) + self.short(images))


class Autoencoder(nn.Module):
    def __init__(
        self, height: int, width: int, *, code: int = 100, hidden: int = 256, factor: float = 1.0
    ) -> None:
        super().__init__()
        if height % SHRINK or width % SHRINK:
            raise ConfigError(
                f"the autoencoder gets images of {height} x {width}, expected multiples of "
                f"{SHRINK}; choose another scale"
            )
        a, b, c, d = (max(1, round(channels * factor)) for channels in CHANNELS)
        deepest = (d, height // SHRINK, width // SHRINK)
        flat = d * deepest[1] * deepest[2]
        self.encoder = nn.Sequential(
            nn.Conv2d(3, a, 3, bias=False),
            nn.LeakyReLU(),
            Residual(a, a),
            Residual(a, b, stride=2),
            Residual(b, c, stride=2),
            Residual(c, d, stride=2),
            nn.Flatten(),
            nn.Linear(flat, hidden),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(),
            nn.Linear(hidden, code),
            nn.Sigmoid(),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(),
            nn.Linear(hidden, flat),
            nn.BatchNorm1d(flat),
            nn.LeakyReLU(),
            nn.Unflatten(1, deepest),
            Residual(d, c, grow=True),
            Residual(c, b, grow=True),
            Residual(b, a, grow=True),
            Residual(a, a),
            nn.Conv2d(a, 3, 1, bias=False),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(images))
