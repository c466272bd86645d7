"""What stands for a class: the mean of the training rows that the network gets right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch


def typical_rows(
    logits: torch.Tensor, labels: np.ndarray, name: str, only_right: bool = True
) -> list[torch.Tensor]:
    """For each column of the logits the numbers of its rows that are predicted right.

    A class of which none is right has all of its rows; one without rows is refused.
    """
    import torch

    found = []
    given = torch.from_numpy(labels)
    right = (logits.argmax(1) == given) | (not only_right)
    for column in range(logits.shape[1]):
        own = given == column
        if not own.any():
            raise ConfigError(
                f"score {name}: class {column} of the logits has no training rows; give some"
            )
        both = own & right
        found.append((both if both.any() else own).nonzero().squeeze(1))
    return found
