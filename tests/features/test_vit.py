"""ViT-B/16 is DINO's network, and reads DINO's backbone files and nothing else."""

import pickle

import pytest
import torch
from torch import nn

from schemas.errors import ConfigError, SourceError
from tasks.features.vit import DinoHead, VisionTransformer, load_weights

TINY = {"image_size": 32, "patch": 8, "width": 12, "depth": 2, "heads": 3}
LAYER = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def full() -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer()


def tiny(seed: int = 0, **changes) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(**{**TINY, **changes}).eval()


def official(width: int, patch: int, depth: int, positions: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of DINO's published backbone files."""
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, positions, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    outside = {"attn.qkv": 3 * width, "mlp.fc1": 4 * width}
    for block in range(depth):
        for layer in LAYER:
            rows = outside.get(layer, width)
            inside = 4 * width if layer == "mlp.fc2" else width
            weight = (width,) if layer.startswith("norm") else (rows, inside)
            shapes[f"blocks.{block}.{layer}.weight"] = weight
            shapes[f"blocks.{block}.{layer}.bias"] = (rows,)
    return shapes


def test_parameters_of_vit_base(full):
    assert sum(parameter.numel() for parameter in full.parameters()) == 85_798_656
    assert full(torch.empty((2, 3, 224, 224), device="meta")).shape == (2, 768)


def test_names_and_shapes_are_dinos(full):
    shapes = {name: tuple(value.shape) for name, value in full.state_dict().items()}
    assert shapes == official(768, 16, 12, 197)
    assert len(shapes) == 150


def test_parameters_of_the_head():
    with torch.device("meta"):
        head = DinoHead()
        assert head(torch.empty(2, 768)).shape == (2, 65536)
    expected = 769 * 2048 + 2049 * 2048 + 2049 * 256 + 256 * 65536
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


def test_batch_norm_in_the_head_is_dinos_option():
    names = DinoHead(12, hidden=16, bottleneck=8, out=20, batch_norm=True).state_dict().keys()
    assert {"mlp.1.running_mean", "mlp.4.running_mean", "mlp.6.weight"} <= names


def test_the_head_compares_directions():
    torch.manual_seed(0)
    head = DinoHead(12, hidden=16, bottleneck=8, out=20)
    found = head(torch.randn(5, 12))
    assert found.abs().max() <= 1 + 1e-6
    with torch.no_grad():
        head.last_layer.weight *= torch.linspace(0.1, 9, 20)[:, None]
    torch.manual_seed(0)
    again = DinoHead(12, hidden=16, bottleneck=8, out=20)
    again.last_layer.weight = head.last_layer.weight
    torch.testing.assert_close(again(torch.randn(5, 12)), found)


def test_a_block_is_a_pre_norm_encoder_layer_of_torch():
    block = tiny().blocks[0]
    layer = nn.TransformerEncoderLayer(
        12, 3, 48, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).eval()
    layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias = block.attn.qkv.parameters()
    layer.self_attn.out_proj = block.attn.proj
    layer.norm1, layer.norm2 = block.norm1, block.norm2
    layer.linear1, layer.linear2 = block.mlp.fc1, block.mlp.fc2
    tokens = torch.randn(2, 7, 12)
    torch.testing.assert_close(block(tokens), layer(tokens))


def test_tokens_are_class_then_patches_row_by_row():
    network = tiny(depth=1)
    images = torch.randn(1, 3, 32, 32)
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    features = network(images)
    assert seen[0].shape == (1, 17, 12)
    torch.testing.assert_close(seen[0][0, 0], (network.cls_token + network.pos_embed[:, :1])[0, 0])
    patch = network.patch_embed.proj(images[:, :, 8:16, 16:24])[0, :, 0, 0]
    torch.testing.assert_close(seen[0][0, 1 + 4 + 2], patch + network.pos_embed[0, 1 + 4 + 2])
    torch.testing.assert_close(features, network.norm(network.blocks[0](seen[0]))[:, 0])


def test_positions_are_interpolated():
    network = tiny()
    assert network.positions(4, 4) is network.pos_embed
    rows = torch.arange(4.0).repeat_interleave(4)
    with torch.no_grad():
        network.pos_embed[0, 1:, 0] = rows
        network.pos_embed[0, 1:, 1] = 7
    found = network.positions(8, 6)
    assert found.shape == (1, 1 + 48, 12)
    torch.testing.assert_close(found[:, 0], network.pos_embed[:, 0])
    grid = found[0, 1:].view(8, 6, 12)
    assert (grid[..., 0].diff(dim=0) > 0).all()
    torch.testing.assert_close(grid[:, 0, 0], grid[:, 5, 0])
    torch.testing.assert_close(grid[..., 1], torch.full((8, 6), 7.0))
    assert network(torch.randn(2, 3, 64, 48)).shape == (2, 12)


def test_only_the_last_blocks_and_the_norm_are_trained():
    network = tiny()
    network.train_last(1)
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    blocks = {f"blocks.1.{layer}.{part}" for layer in LAYER for part in ("weight", "bias")}
    assert trained == {"norm.weight", "norm.bias"} | blocks
    network.train_last(None)
    assert all(value.requires_grad for value in network.parameters())


def test_a_dino_file_is_taken_whole(tmp_path):
    torch.manual_seed(3)
    state = {name: torch.randn(shape) for name, shape in official(12, 8, 2, 17).items()}
    torch.save(state, tmp_path / "dino.pth")
    network = tiny()
    assert load_weights(network, tmp_path / "dino.pth").startswith("dino.pth sha256 ")
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 48}, r"pos_embed: found \(1, 37, 12\), expected \(1, 17, 12\)"),
        ({"depth": 3}, r"12 parameters differ, first blocks\.2.*expected nothing"),
        ({"depth": 1}, r"blocks\.1.*found nothing"),
    ],
)
def test_a_file_of_another_network_is_refused(tmp_path, change, message):
    torch.save(tiny(**change).state_dict(), tmp_path / "dino.pth")
    network = tiny()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        load_weights(network, tmp_path / "dino.pth")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


class Harmful:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"no torch file at all" * 9])
def test_only_plain_tensors_are_read(tmp_path, capsys, content):
    (tmp_path / "dino.pth").write_bytes(content)
    with pytest.raises(SourceError, match=r"dino\.pth"):
        load_weights(tiny(), tmp_path / "dino.pth")
    torch.save({"cls_token": Harmful()}, tmp_path / "dino.pth")
    with pytest.raises(SourceError, match="not a plain torch state file"):
        load_weights(tiny(), tmp_path / "dino.pth")
    assert capsys.readouterr().out == ""


def test_a_full_training_checkpoint_is_named_as_such(tmp_path):
    torch.save({"student": tiny().state_dict(), "epoch": 3}, tmp_path / "full.pth")
    with pytest.raises(SourceError, match="backbone-only"):
        load_weights(tiny(), tmp_path / "full.pth")
    with pytest.raises(SourceError, match=r"none\.pth not found"):
        load_weights(tiny(), tmp_path / "none.pth")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="multiple of the patch size"):
        tiny(image_size=33)
    with pytest.raises(ConfigError, match="33 x 32, expected multiples"):
        tiny()(torch.zeros(1, 3, 33, 32))
