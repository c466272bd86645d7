"""CLIP's vision transformer by file: the picture's embedding, after the projection.

A file has the names of the release (`visual.`, also without it) or of Hugging Face
(`vision_model.`); what it holds for texts is left out. No file tells the activation and the number
of heads: those of OpenAI's weights are taken, x sigmoid(1.702 x) and heads of 64 channels. Weights
that others trained with a plain GELU would give other features here than in their own code.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from schemas.errors import SourceError
from tasks.features.vit import Mlp, VisionTransformer
from tasks.features.vit_file import HEAD_WIDTH

WIDEST = 1024
# Our names of what stands outside the blocks and inside them, by those of each layout.
RELEASED = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1": "patch_embed.proj",
    "ln_pre": "norm_before",
    "ln_post": "norm",
    "proj": "projection.weight",
}
RELEASED_BLOCK = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.in_proj_weight": "attn.qkv.weight",
    "attn.in_proj_bias": "attn.qkv.bias",
    "attn.out_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
HUGGING_FACE = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding.weight": "pos_embed",
    "embeddings.patch_embedding": "patch_embed.proj",
    "pre_layrnorm": "norm_before",
    "post_layernorm": "norm",
}
HUGGING_FACE_BLOCK = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.out_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
}


class ClipTransformer(VisionTransformer):
    mean = (0.48145466, 0.4578275, 0.40821073)
    deviation = (0.26862954, 0.26130258, 0.27577711)
    shown = 1.0
    last: nn.Linear | None = None

    def __init__(self, *, embedding: int, **shape: Any) -> None:
        super().__init__(**shape)
        self.side, inside = shape["image_size"], self.width
        self.norm_before = nn.LayerNorm(inside)
        self.projection = nn.Linear(inside, embedding, bias=False)
        self.width = embedding
        for layer in self.modules():
            if isinstance(layer, Mlp):
                layer.activation = _quick_gelu
            if isinstance(layer, nn.LayerNorm):
                layer.eps = 1e-5

    def embed(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.projection(self(pictures))

    @staticmethod
    def is_of(state: Mapping[str, torch.Tensor]) -> bool:
        return "norm_before.weight" in state and "pos_embed" in state

    @staticmethod
    def shape_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the constructor takes, as JSON, by the sizes of the tensors."""
        if "projection.weight" not in state:
            raise SourceError("it lacks the projection to the embedding")
        embedding, width = state["projection.weight"].shape
        patch = state["patch_embed.proj.weight"].shape[-1]
        if width % HEAD_WIDTH or width > WIDEST:
            raise SourceError(
                f"its width {width} is not one of OpenAI's (768, 1024), whose heads are "
                f"{HEAD_WIDTH} wide"
            )
        numbers = {name.split(".")[1] for name in state if name.startswith("blocks.")}
        return {
            "embedding": embedding,
            "image_size": round((state["pos_embed"].shape[1] - 1) ** 0.5) * patch,
            "patch": patch,
            "width": width,
            "depth": len(numbers),
            "heads": width // HEAD_WIDTH,
        }

    @staticmethod
    def name_in(ours: str, state: Mapping[str, torch.Tensor]) -> str:
        return ours


def _quick_gelu(values: torch.Tensor) -> torch.Tensor:
    return values * (1.702 * values).sigmoid()


def clip_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The vision tensors of a CLIP file under our names, or None where it is no such file."""
    start = "visual." if any(name.startswith("visual.") for name in state) else ""
    if f"{start}ln_pre.weight" in state:
        tensors = _renamed(state, start, RELEASED, "transformer.resblocks.", RELEASED_BLOCK)
        if "projection.weight" in tensors:
            tensors["projection.weight"] = tensors["projection.weight"].T.contiguous()
    else:
        start = "vision_model." if any(name.startswith("vision_model.") for name in state) else ""
        if f"{start}pre_layrnorm.weight" not in state:
            return None
        tensors = _renamed(state, start, HUGGING_FACE, "encoder.layers.", HUGGING_FACE_BLOCK)
        if "visual_projection.weight" in state:
            tensors["projection.weight"] = state["visual_projection.weight"].float()
        for name in [name for name in tensors if ".attn.q." in name]:
            three = [name.replace(".q.", f".{part}.") for part in "qkv"]
            if tensors.keys() >= set(three):
                joined = torch.cat([tensors.pop(part) for part in three])
                tensors[name.replace(".q.", ".qkv.")] = joined
    if "cls_token" in tensors and "pos_embed" in tensors:
        tensors["cls_token"] = tensors["cls_token"].reshape(1, 1, -1)
        tensors["pos_embed"] = tensors["pos_embed"][None]
    if "patch_embed.proj.weight" in tensors:  # CLIP's has no offset
        tensors["patch_embed.proj.bias"] = torch.zeros(len(tensors["patch_embed.proj.weight"]))
    return tensors


def _renamed(
    state: Mapping[str, torch.Tensor],
    start: str,
    outside: Mapping[str, str],
    blocks: str,
    inside: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Tensors that begin with `start` and have a name in either table, in float32."""
    tensors = {}
    for name, value in state.items():
        place = name.removeprefix(start)
        table, before = outside, ""
        if place.startswith(blocks):
            number, _, place = place.removeprefix(blocks).partition(".")
            table, before = inside, f"blocks.{number}."
        for theirs, ours in table.items():
            if name.startswith(start) and (place == theirs or place.startswith(f"{theirs}.")):
                tensors[before + ours + place[len(theirs) :]] = value.float()
    return tensors
