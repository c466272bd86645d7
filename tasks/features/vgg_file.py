"""VGG by file: torchvision's vgg11 to vgg19, with batch norm or without, as the names tell.

The activation before the last layer leaves (4,096 features); `last` is the layer to the classes.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from schemas.errors import SourceError
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN
from tasks.features.vgg import Vgg


class TorchvisionVgg(Vgg):
    mean, deviation = IMAGENET_MEAN, IMAGENET_DEVIATION
    side, shown = 224, 224 / 256

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.width = shape["hidden"]

    @property
    def last(self) -> nn.Linear:
        return cast(nn.Linear, self.classifier[6])

    @staticmethod
    def is_of(state: Mapping[str, torch.Tensor]) -> bool:
        return all(f"{name}.weight" in state for name in ("features.0", "classifier.0"))

    @staticmethod
    def shape_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A maximum stands where the numbers of two convolutions are one more apart."""
        needed = [f"classifier.{number}.weight" for number in (0, 6)]
        if missing := [name for name in needed if name not in state]:
            raise SourceError(f"{missing[0]} is missing")
        normed = "features.1.running_mean" in state
        places = sorted(
            int(name.split(".")[1])
            for name, value in state.items()
            if name.startswith("features.") and name.endswith(".weight") and value.ndim == 4
        )
        layers: list[int | str] = []
        for place, following in zip(places, [*places[1:], None], strict=True):
            layers.append(state[f"features.{place}.weight"].shape[0])
            if following is None or following - place > 2 + normed:
                layers.append("M")
        hidden, inside = state["classifier.0.weight"].shape
        channels = state[f"features.{places[-1]}.weight"].shape[0]
        return {
            "classes": state["classifier.6.weight"].shape[0],
            "layers": layers,
            "hidden": hidden,
            "pool": round((inside / channels) ** 0.5),
            "batch_norm": normed,
        }

    @staticmethod
    def name_in(ours: str, state: Mapping[str, torch.Tensor]) -> str:
        return ours
