"""The network for pictures of 96 pixels: four groups, the paper's for STL-10."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks.networks.wide_resnet import SMALL, SMALL_CPC, WideResNet


class Stl(WideResNet):
    name: ClassVar[str] = "stl"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"width": 64, "groups": 4, "norm_batch": 64},
        "small": {**SMALL, "groups": 4},
    }
    trained: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"epoch_samples": 10_000, "batch_size": 256},
        "small": {
            "epoch_samples": 10_000,
            "shrink": 3,  # to 32 pixels
            "cpc": {**SMALL_CPC, "patch": 12, "stride": 4},
        },
    }
