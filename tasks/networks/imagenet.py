"""The network for photographs of 256 pixels: a strided stem, the paper's for ImageNet."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks.networks.wide_resnet import SMALL_CPC, WideResNet

SHAPE: dict[str, Any] = {
    "groups": 4,
    "dropout": 0.0,
    "stem": 7,
    "stem_bias": False,
    "pooling": "average",
    "norm_batch": None,
}
VIEWS: dict[str, Any] = {
    "epoch_samples": None,
    "padding": 0.0,
    "crop": 224,
    "scoring_batch": 32,
    "odin": {"space": "pixel1"},
}


class Imagenet(WideResNet):
    name: ClassVar[str] = "imagenet"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**SHAPE, "width": 64},
        "small": {**SHAPE, "width": 16, "blocks": 1},
    }
    trained: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**VIEWS, "batch_size": 64},
        "small": {
            **VIEWS,
            "shrink": 4,  # to 56 pixels
            "cpc": {**SMALL_CPC, "patch": 16, "stride": 8},
        },
    }
