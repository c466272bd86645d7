"""CLIP's vision half by file: values of the released code on the same weights, both layouts."""

import pytest
import torch

from schemas.errors import SourceError
from tasks.features.backbones import made, read_network
from tasks.features.clip_file import ClipTransformer

WIDTH, SIDE, PATCH, DEPTH, OUT = 128, 32, 16, 2, 8
BLOCK = {
    "attn.in_proj_weight": (3 * WIDTH, WIDTH),
    "attn.in_proj_bias": (3 * WIDTH,),
    "attn.out_proj.weight": (WIDTH, WIDTH),
    "attn.out_proj.bias": (WIDTH,),
    "ln_1.weight": (WIDTH,),
    "ln_1.bias": (WIDTH,),
    "mlp.c_fc.weight": (4 * WIDTH, WIDTH),
    "mlp.c_fc.bias": (4 * WIDTH,),
    "mlp.c_proj.weight": (WIDTH, 4 * WIDTH),
    "mlp.c_proj.bias": (WIDTH,),
    "ln_2.weight": (WIDTH,),
    "ln_2.bias": (WIDTH,),
}
SHAPES = {
    "class_embedding": (WIDTH,),
    "positional_embedding": ((SIDE // PATCH) ** 2 + 1, WIDTH),
    "proj": (WIDTH, OUT),
    "conv1.weight": (WIDTH, 3, PATCH, PATCH),
    "ln_pre.weight": (WIDTH,),
    "ln_pre.bias": (WIDTH,),
    **{
        f"transformer.resblocks.{number}.{name}": shape
        for number in range(DEPTH)
        for name, shape in BLOCK.items()
    },
    "ln_post.weight": (WIDTH,),
    "ln_post.bias": (WIDTH,),
}
# What the released code makes of these weights and pictures, in float64.
RELEASED = [
    [
        3.20122142,
        1.57363483,
        -0.7940568,
        -2.78829111,
        -3.47114855,
        -2.52147058,
        -0.3859056,
        1.93115681,
    ],
    [
        3.1996115,
        1.57314649,
        -0.7931939,
        -2.78648281,
        -3.46924531,
        -2.52036753,
        -0.38612152,
        1.92972347,
    ],
]


def waves(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 0.7 + start).sin().reshape(shape) * 0.1


def released() -> dict[str, torch.Tensor]:
    """The state of the released vision network, by a formula; norms are near one."""
    return {
        name: waves(shape, place) + (1.0 if ".weight" in name and "ln_" in name else 0.0)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def hugging_face() -> dict[str, torch.Tensor]:
    state, found = released(), {}
    names = {
        "class_embedding": "embeddings.class_embedding",
        "positional_embedding": "embeddings.position_embedding.weight",
        "conv1.weight": "embeddings.patch_embedding.weight",
    }
    parts = {"ln_pre": "pre_layrnorm", "ln_post": "post_layernorm", "ln_1": "layer_norm1"}
    parts |= {"ln_2": "layer_norm2", "c_fc": "fc1", "c_proj": "fc2", "attn": "self_attn"}
    for name, value in state.items():
        name = names.get(name, name).replace("transformer.resblocks", "encoder.layers")
        name = ".".join(parts.get(part, part) for part in name.split("."))
        if "in_proj" in name:
            before, _, kind = name.partition("in_proj_")
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                found[f"vision_model.{before}{letter}_proj.{kind}"] = part
        elif name == "proj":
            found["visual_projection.weight"] = value.T
        else:
            found[f"vision_model.{name}"] = value
    position = torch.arange(5)[None]
    return {**found, "vision_model.embeddings.position_ids": position}


def pictures() -> torch.Tensor:
    return waves((2, 3, SIDE, SIDE), 3) * 10


def text() -> dict[str, torch.Tensor]:
    return {"logit_scale": torch.ones(()), "token_embedding.weight": torch.zeros(4, 8)}


@pytest.mark.parametrize("layout", ["visual", "bare", "hugging_face"])
def test_the_embedding_is_that_of_the_released_code(layout, tmp_path):
    state = hugging_face() if layout == "hugging_face" else released()
    if layout == "visual":
        state = {f"visual.{name}": value for name, value in state.items()} | text()
    torch.save({name: value.contiguous() for name, value in state.items()}, tmp_path / "clip.pt")
    network, record = read_network(tmp_path / "clip.pt")
    assert record["kind"] == "clip" and record["shape"]["heads"] == 2
    assert (network.width, network.side, network.last) == (OUT, SIDE, None)
    found = network.embed(pictures().float())
    torch.testing.assert_close(found, torch.tensor(RELEASED), rtol=1e-4, atol=1e-4)
    assert torch.equal(made(record, network.state_dict()).embed(pictures().float()), found)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ({"patch": 32, "width": 768, "heads": 12, "embedding": 512}, 87_849_216),
        ({"patch": 14, "width": 1024, "heads": 16, "depth": 24, "embedding": 768}, 303_966_208),
    ],
    ids=["B/32", "L/14"],
)
def test_parameters_of_the_published_ones(shape, parameters):
    with torch.device("meta"):
        network = ClipTransformer(image_size=224, **shape)
    no_offset = network.patch_embed.proj.bias.numel()  # ours has one, of zeros
    assert sum(p.numel() for p in network.parameters()) - no_offset == parameters


def test_what_does_not_fit_is_named(tmp_path):
    def said(state: dict) -> str:
        torch.save(state, tmp_path / "clip.pt")
        with pytest.raises(SourceError) as error:
            read_network(tmp_path / "clip.pt")
        return str(error.value)

    whole = {f"visual.{name}": value for name, value in released().items()}
    lacking = {n: v for n, v in whole.items() if not n.endswith("1.ln_2.bias")}
    assert "1 missing: blocks.1.norm2.bias" in said(lacking)
    without = {n: v for n, v in whole.items() if n != "visual.proj"}
    assert "it lacks the projection" in said(without)
    wide = {**whole, "visual.proj": torch.zeros(1280, OUT)}
    assert "width 1280 is not one of OpenAI's" in said(wide)
