"""What stands on a network: the embedding g, and what makes logits of it (3DOS rule 10).

g = Linear(in, hidden) - norm - act - dropout - Linear(hidden, features) is the `penultimate`
feature: it is taken BEFORE the last norm and activation, so it is signed. The CE head is
norm - act - dropout - Linear on g; hyperspherical heads compare g with prototypes by cosine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from schemas.config import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

INITIAL_DEVIATION = 0.02
SLOPE = 0.2
"""Below zero, of models whose activation does not follow the network's."""


class HeadSettings(Settings):
    """Sizes of the layers on a network."""

    hidden: int = Field(512, ge=1)
    """Units of the first layer."""
    features: int = Field(256, ge=1)
    """Length of the penultimate feature g."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Share of units dropped in training."""


SMALL = {"hidden": 256, "features": 256, "dropout": 0.2}


def embedding(
    inside: int, settings: HeadSettings, slope: float, *, bias: bool = False
) -> nn.Sequential:
    """Network features to g; hyperspherical heads have a bias in the last layer."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(inside, settings.hidden, bias=False),
        nn.BatchNorm1d(settings.hidden),
        nn.LeakyReLU(slope),
        nn.Dropout(settings.dropout),
        nn.Linear(settings.hidden, settings.features, bias=bias),
    )


def classifier(classes: int, settings: HeadSettings, slope: float) -> nn.Sequential:
    """g to logits."""
    from torch import nn

    return nn.Sequential(
        nn.BatchNorm1d(settings.features),
        nn.LeakyReLU(slope),
        nn.Dropout(settings.dropout),
        nn.Linear(settings.features, classes),
    )


def prototypes(count: int, settings: HeadSettings) -> nn.ParameterDict:
    """`weight`: directions that g is compared with, in its rows, xavier-uniform."""
    import torch
    from torch import nn

    return nn.ParameterDict(
        {"weight": nn.init.xavier_uniform_(torch.empty(count, settings.features))}
    )


def cosines(g: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """(N, D) and (M, D) to (N, M)."""
    from torch.nn import functional

    return functional.linear(functional.normalize(g), functional.normalize(directions))


def initialise(layers: nn.Module) -> None:
    """Weights N(0, .02), norm weights N(1, .02), biases 0."""
    from torch import nn

    for module in layers.modules():
        if isinstance(module, nn.Linear | nn.BatchNorm1d):
            mean = 1.0 if isinstance(module, nn.BatchNorm1d) else 0.0
            nn.init.normal_(module.weight, mean, INITIAL_DEVIATION)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
