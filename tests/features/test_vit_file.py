"""Transformers of DINO and DINOv2 by file: the published sizes, and the arithmetic by hand."""

import pytest
import torch
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.backbones import made, read_network
from tasks.features.vit_file import DinoTransformer

SMALL = {"image_size": 48, "patch": 16, "width": 128, "depth": 2, "heads": 2}


def random_state(scaled: bool) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    shapes = DinoTransformer(**SMALL, scaled=scaled).state_dict()
    return {
        name: torch.randn(value.shape, generator=draws) * 0.1 + name.endswith("norm.weight")
        for name, value in shapes.items()
    }


def by_hand(state: dict, pictures: torch.Tensor) -> torch.Tensor:
    def norm(tokens, name):
        spread = tokens.var(-1, keepdim=True, unbiased=False) + 1e-6
        scaled = (tokens - tokens.mean(-1, keepdim=True)) / spread.sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(tokens, name):
        return tokens @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patches = functional.unfold(pictures, 16, stride=16).transpose(1, 2)
    weight = state["patch_embed.proj.weight"].flatten(1)
    tokens = patches @ weight.T + state["patch_embed.proj.bias"]
    first = state["cls_token"].expand(len(pictures), -1, -1)
    tokens = torch.cat([first, tokens], 1) + state["pos_embed"]
    for number in range(2):
        at = f"blocks.{number}"
        query, key, value = linear(norm(tokens, f"{at}.norm1"), f"{at}.attn.qkv").chunk(3, -1)
        heads = []
        for part in (slice(0, 64), slice(64, 128)):
            odds = query[..., part] @ key[..., part].transpose(1, 2) / 8
            heads.append(odds.softmax(-1) @ value[..., part])
        mixed = linear(torch.cat(heads, -1), f"{at}.attn.proj")
        tokens = tokens + mixed * state.get(f"{at}.ls1.gamma", torch.ones(1))
        wide = linear(norm(tokens, f"{at}.norm2"), f"{at}.mlp.fc1")
        wide = wide * (1 + torch.erf(wide / 2**0.5)) / 2
        tokens = tokens + linear(wide, f"{at}.mlp.fc2") * state.get(
            f"{at}.ls2.gamma", torch.ones(1)
        )
    return norm(tokens, "norm")[:, 0]


@pytest.mark.parametrize("scaled", [False, True], ids=["dino", "dinov2"])
def test_the_file_tells_the_transformer_and_it_computes_what_the_formula_says(scaled, tmp_path):
    state = random_state(scaled)
    theirs = state | ({"mask_token": torch.zeros(1, 128)} if scaled else {})
    torch.save({f"backbone.{name}": value for name, value in theirs.items()}, tmp_path / "v.pth")
    network, record = read_network(tmp_path / "v.pth")
    pictures = torch.randn((2, 3, 48, 48), generator=torch.Generator().manual_seed(1))
    features = network.embed(pictures)
    torch.testing.assert_close(features, by_hand(state, pictures), rtol=1e-4, atol=1e-4)
    assert (record["kind"], record["shape"]["scaled"], network.last) == ("vit", scaled, None)
    assert torch.equal(made(record, network.state_dict()).embed(pictures), features)
    assert network.embed(torch.zeros((1, 3, 64, 32))).shape == (1, 128)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ({"width": 384, "heads": 6}, 21_665_664),
        ({"width": 768, "heads": 12}, 85_798_656),
        ({"width": 384, "heads": 6, "patch": 14, "image_size": 518, "scaled": True}, 22_056_192),
    ],
    ids=["dino_vits16", "dino_vitb16", "dinov2_vits14"],
)
def test_parameters_of_the_published_ones(shape, parameters):
    with torch.device("meta"):
        network = DinoTransformer(**shape)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_what_does_not_fit_is_named(tmp_path):
    state = random_state(False)
    state.pop("blocks.1.norm2.bias")
    torch.save(state, tmp_path / "v.pth")
    with pytest.raises(SourceError, match=r"1 missing: blocks.1.norm2.bias"):
        read_network(tmp_path / "v.pth")
