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

    class_rows = []
    targets = torch.from_numpy(labels)
    right = (logits.argmax(1) == targets) | (not only_right)
    for column in range(logits.shape[1]):
        in_class = targets == column
        if not in_class.any():
            raise ConfigError(
                f"score {name}: class {column} of the logits has no training rows; give some"
            )
        both = in_class & right
        class_rows.append((both if both.any() else in_class).nonzero().squeeze(1))
    return class_rows
