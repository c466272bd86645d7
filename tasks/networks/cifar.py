"""The network for pictures of 32 pixels: three groups, by default the paper's for CIFAR-10."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks.networks.wide_resnet import SMALL, SMALL_CPC, WideResNet


class Cifar(WideResNet):
    name: ClassVar[str] = "cifar"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "small": SMALL}
    trained: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "small": {"epoch_samples": None, "cpc": {**SMALL_CPC, "patch": 12, "stride": 4}},
    }
