"""Vision transformers by file: DINO's and DINOv2's backbones, in the shape that the names tell.

The class token after the last norm leaves. Heads are 64 channels wide, as in every published one;
no file tells it. DINOv2's files have scales (`ls1.gamma`) and a `mask_token`, which is not used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from schemas.errors import SourceError
from tasks.features.images import IMAGENET_DEVIATION, IMAGENET_MEAN
from tasks.features.vit import VisionTransformer

HEAD_WIDTH = 64
NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight")


class DinoTransformer(VisionTransformer):
    mean, deviation = IMAGENET_MEAN, IMAGENET_DEVIATION
    shown = 224 / 256
    last: nn.Linear | None = None

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        # A multiple of 8, 14 and 16, whatever side the positions of the file are of.
        self.side = 224

    def embed(self, pictures: torch.Tensor) -> torch.Tensor:
        return self(pictures)

    @staticmethod
    def is_of(state: Mapping[str, torch.Tensor]) -> bool:
        return all(name in state for name in NEEDED) and "register_tokens" not in state

    @staticmethod
    def shape_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the constructor takes, as JSON, by the names and sizes of the tensors."""
        width, _, patch, _ = state["patch_embed.proj.weight"].shape
        grid = round((state["pos_embed"].shape[1] - 1) ** 0.5)
        if width % HEAD_WIDTH:
            raise SourceError(f"its width {width} is no multiple of {HEAD_WIDTH}")
        numbers = {name.split(".")[1] for name in state if name.startswith("blocks.")}
        return {
            "image_size": grid * patch,
            "patch": patch,
            "width": width,
            "depth": len(numbers),
            "heads": width // HEAD_WIDTH,
            "scaled": "blocks.0.ls1.gamma" in state,
        }

    @staticmethod
    def name_in(ours: str, state: Mapping[str, torch.Tensor]) -> str:
        return ours
