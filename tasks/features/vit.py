"""Vision transformer with the parameter names of the official DINO checkpoints (GCD's backbone).

Normalised images (N, 3, h, w) enter, the class token after the last norm leaves. The defaults are
ViT-B/16 at 224 with 768 features; dino_vitbase16_pretrain.pth loads as it is. Images of other sizes
get the position embeddings by bicubic interpolation. `DinoHead` is DINO's projection.
"""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from schemas.errors import ConfigError, SourceError

LARGEST_FILE = 4 << 30


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count, length, width = tokens.shape
        parts = self.qkv(tokens).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(count, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(tokens)))


class Scale(nn.Module):
    """Each channel times a number of its own, as DINOv2 has after both halves of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int, scaled: bool = False) -> None:
        super().__init__()
        self.ls1, self.ls2 = (Scale(width) if scaled else nn.Identity() for _ in range(2))
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        return tokens + self.ls2(self.mlp(self.norm2(tokens)))


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images)


class VisionTransformer(nn.Module):
    def __init__(
        self,
        *,
        image_size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        if image_size % patch or width % heads:
            raise ConfigError(
                f"image size {image_size} must be a multiple of the patch size {patch}, and width "
                f"{width} of {heads} heads"
            )
        self.patch, self.grid, self.width = patch, image_size // patch, width
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid**2, width))
        self.patch_embed = PatchEmbed(patch, width)
        self.norm_before: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, scaled) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=0.02)
        _initialise(self, width)

    def positions(self, rows: int, columns: int) -> torch.Tensor:
        """Position embeddings for a grid of patches, interpolated if it is not the own one."""
        if (rows, columns) == (self.grid, self.grid):
            return self.pos_embed
        embeddings = self.pos_embed[:, 1:].unflatten(1, (self.grid, self.grid)).permute(0, 3, 1, 2)
        resized = functional.interpolate(
            embeddings, size=(rows, columns), mode="bicubic", align_corners=False
        )
        return torch.cat([self.pos_embed[:, :1], resized.flatten(2).transpose(1, 2)], 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"images are {height} x {width}, expected multiples of the patch size {self.patch}"
            )
        patches = self.patch_embed(images)
        tokens = patches.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], 1)
        tokens = self.norm_before(tokens + self.positions(*patches.shape[2:]))
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)[:, 0]

    def train_last(self, blocks: int | None) -> None:
        """Freeze all but the last `blocks` blocks and the norm (None: train everything)."""
        self.requires_grad_(blocks is None)
        if blocks is not None:
            self.norm.requires_grad_(True)
            for block in self.blocks[len(self.blocks) - blocks :]:
                block.requires_grad_(True)


class DinoHead(nn.Module):
    """Three layers to a bottleneck on the unit sphere, then unit vectors to compare it with: the
    weight norm of DINO's last layer with its gain fixed at 1."""

    def __init__(
        self,
        width: int = 768,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        out: int = 65536,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside in (width, hidden):
            norm = [nn.BatchNorm1d(hidden)] if batch_norm else []
            layers += [nn.Linear(inside, hidden), *norm, nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        self.last_layer = nn.Linear(bottleneck, out, bias=False)
        _initialise(self.mlp, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        narrow = functional.normalize(self.mlp(features), dim=1)
        return functional.linear(narrow, functional.normalize(self.last_layer.weight, dim=1))


def _initialise(network: nn.Module, width: int) -> None:
    """DINO's deviation 0.02 at its width 768; narrower networks need more to pass anything on."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02 * (768 / width) ** 0.5)
            nn.init.zeros_(module.bias)


def load_weights(network: VisionTransformer, path: Path) -> str:
    """Fill `network` from a DINO backbone file. Returns what was loaded, for the record."""
    if not path.is_file():
        raise SourceError(
            f"weights file {path} not found; name a DINO backbone (dino_vitbase16_pretrain.pth)"
        )
    if path.stat().st_size > LARGEST_FILE:
        raise SourceError(f"weights file {path} is larger than {LARGEST_FILE >> 30} GB; refused")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        theirs = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise SourceError(
            f"weights file {path} is not a plain torch state file: {str(error)[:200]}"
        ) from error
    if not isinstance(theirs, dict) or not all(
        isinstance(v, torch.Tensor) for v in theirs.values()
    ):
        raise SourceError(
            f"weights file {path} is not a plain state of one network; name the backbone-only "
            "file (dino_vitbase16_pretrain.pth), not the full checkpoint of a training run"
        )
    ours = network.state_dict()
    wrong = sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    )
    if wrong:
        name = wrong[0]
        shape = tuple(theirs[name].shape) if name in theirs else "nothing"
        expected = tuple(ours[name].shape) if name in ours else "nothing"
        raise ConfigError(
            f"weights file {path} does not fit the network: {len(wrong)} parameters differ, first "
            f"{name}: found {shape}, expected {expected}; use image_size, patch, width, depth and "
            "heads of the network that the file was made for"
        )
    network.load_state_dict(theirs)
    return f"{path.name} sha256 {digest}"
