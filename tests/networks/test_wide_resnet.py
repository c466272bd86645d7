"""The paper's networks: widths, strides, numbers of parameters, edges and norms of two tasks."""

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks import networks
from tasks.models.classifier import Classifier
from tasks.models.cpc import Cpc
from tasks.networks.cifar import Cifar
from tasks.networks.wide_resnet import AUXILIARY, WideResNet, mirrored

torch.set_num_threads(1)
TINY = {"width": 4, "blocks": 2}


def paper(name: str) -> WideResNet:
    kind = networks.find(name)
    with torch.device("meta"):
        return kind(kind.resolve("paper"))


def small(**shape: object) -> WideResNet:
    network = Cifar(Cifar.resolve(None, shape))
    network.initialise()
    return network


def counted(width: int, groups: int, stem: int, stem_bias: bool) -> int:
    """Parameters by the paper's words: BN-ReLU-conv-BN-ReLU-conv, 1 x 1 where the shape changes."""
    four = [width, width, width, 2 * width]
    outs = [four, [2 * w for w in four], *[[4 * width] * 4] * (groups - 2)]
    total, inside = 3 * width * stem**2 + width * stem_bias, width
    for group, row in enumerate(outs):
        for place, out in enumerate(row):
            total += 9 * inside * out + 9 * out * out + 2 * inside + 2 * out
            total += inside * out * (inside != out or (group > 0 and place == 0))
            inside = out
    return total + 2 * inside


def test_last_blocks_of_groups_one_and_two_double_the_width():
    assert paper("cifar").widths() == [
        [160, 160, 160, 320],
        [320, 320, 320, 640],
        [640, 640, 640, 640],
    ]
    assert paper("stl").widths()[2:] == [[256] * 4, [256] * 4]


@pytest.mark.parametrize(
    ("name", "number", "stem", "bias", "groups"),
    [
        ("cifar", 44_113_609 - 641 * 9, 3, True, 3),
        ("stl", 11_853_705 - 257 * 9, 3, True, 4),
        ("imagenet", 11_861_321 - 257 * 9, 7, False, 4),
    ],
)
def test_paper_networks_have_the_parameters_of_their_shape(name, number, stem, bias, groups):
    network = paper(name)
    width = network.settings.width
    assert width == (160 if name == "cifar" else 64)
    found = sum(p.numel() for p in network.layers.parameters())
    # The paper's number has the linear layer of nine classes too.
    assert found == counted(width, groups, stem, bias) == number


@pytest.mark.parametrize(
    ("name", "side", "sides"),
    [
        ("cifar", 32, [32, 16, 8]),
        ("stl", 96, [96, 48, 24, 12]),
        ("imagenet", 224, [112, 56, 28, 14]),
    ],
)
def test_groups_after_the_first_halve_the_picture(name, side, sides):
    network = paper(name)
    pictures = torch.empty(2, 3, side, side, device="meta")
    shapes = [
        network.trunk(pictures, 0, group).shape for group in range(1, network.settings.groups + 1)
    ]
    widths = [row[-1] for row in network.widths()]
    assert [tuple(s) for s in shapes] == [(2, w, s, s) for w, s in zip(widths, sides, strict=True)]
    assert network.encode(pictures).shape == (2, network.width)


def test_dropout_is_in_every_block_but_not_on_imagenet():
    for name, rate in (("cifar", 0.3), ("stl", 0.3), ("imagenet", 0.0)):
        rates = {m.p for m in paper(name).layers.modules() if isinstance(m, torch.nn.Dropout)}
        assert rates == {rate}


def test_pooling_is_named():
    assert paper("imagenet").settings.pooling == "average"
    hidden = torch.arange(36.0).view(1, 1, 6, 6)
    highest = small(**TINY, groups=1, pooling="max")._pooled_stem(hidden)
    assert highest[0, 0, 0].tolist() == [7, 9, 11]
    mean = small(**TINY, groups=1, pooling="average")._pooled_stem(hidden)
    # The corner has 4 pixels under the window, zeros beyond the edge are not counted.
    assert mean[0, 0, 0, 0] == (0 + 1 + 6 + 7) / 4


def test_blocks_are_pre_activated_with_a_raw_shortcut():
    network = small(width=2, blocks=1, groups=1, dropout=0.0)
    (block,) = network.layers.eval()["groups"][0]
    hidden = torch.randn(2, 2, 5, 5)
    inner = block["conv1"](block["norm1"][0](hidden).relu())
    wanted = block["shortcut"](hidden) + block["conv2"](block["norm2"][0](inner).relu())
    assert torch.equal(network._through(block, hidden, 0), wanted)
    assert block["shortcut"].kernel_size == (1, 1) and block["conv1"].bias is None


def test_initial_weights_are_he_in_blocks_and_glorot_elsewhere():
    torch.manual_seed(0)
    layers = small(width=32, blocks=1, groups=1).layers
    block = layers["groups"][0][0]
    for weight, limit in (
        (block["conv1"].weight, (6 / (32 * 9)) ** 0.5),
        (block["conv2"].weight, (6 / (64 * 9)) ** 0.5),
        (block["shortcut"].weight, (6 / (32 + 64)) ** 0.5),
        (layers["stem"].weight, (6 / (9 * (3 + 32))) ** 0.5),
    ):
        assert 0.95 * limit < weight.abs().max() <= limit
    assert not layers["stem"].bias.any()


def test_symmetric_edges_repeat_the_edge_pixel():
    picture = torch.arange(20.0).view(1, 1, 5, 4)
    padded = mirrored(picture, 3)
    assert padded[0, 0, 3].tolist() == [2, 1, 0, 0, 1, 2, 3, 3, 2, 1]
    assert padded[0, 0].numpy().tolist() == np.pad(picture[0, 0], 3, mode="symmetric").tolist()
    assert mirrored(picture, 0) is picture


def test_cpc_network_has_a_norm_per_task_in_the_shared_groups_only():
    settings = Cpc.network_settings("imagenet", "paper")
    assert (settings.stem_stride, settings.padding) == (2, "symmetric")
    with torch.device("meta"):
        network = networks.find("imagenet")(settings)
    layers = network.layers
    held = [{len(block["norm1"]) for block in group} for group in layers["groups"]]
    assert held == [{2}, {2}, {2}, {1}] and len(layers["norm"]) == 1
    pictures = torch.empty(1, 3, 224, 224, device="meta")
    assert network.trunk(pictures, 0, 3).shape[2:] == (14, 14)
    patches = torch.empty(1, 3, 64, 64, device="meta")
    assert network.trunk(patches, 1, 3).shape == (1, 256, 4, 4)


def test_norms_of_the_tasks_are_separate():
    torch.manual_seed(0)
    network = small(**TINY, tasks=2, padding="symmetric")
    layers = network.layers.train()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    network.encode(torch.randn(4, 3, 16, 16), AUXILIARY)
    moved = {n for n, value in layers.state_dict().items() if not torch.equal(value, before[n])}
    assert moved and all(".1.running" in n or ".1.num" in n for n in moved)


def test_a_norm_takes_parts_of_a_batch_in_training():
    torch.manual_seed(0)
    pictures = torch.randn(6, 3, 4, 4) * 3 + 1
    network = small(**TINY, norm_batch=2)
    norms, plain = network.norms(3, 1), torch.nn.BatchNorm2d(3)
    expected = torch.cat([plain(part) for part in pictures.split(2)])
    assert torch.equal(network.normed(norms, pictures, 0), expected)
    assert torch.equal(norms[0].running_mean, plain.running_mean)
    assert torch.equal(norms[0].running_var, plain.running_var)
    assert torch.equal(network.normed(norms.eval(), pictures, 0), plain.eval()(pictures))
    whole = torch.nn.BatchNorm2d(3)
    for size in (None, 6, 4):  # six pictures are not two parts of four
        network = small(**TINY, norm_batch=size)
        assert torch.equal(network.normed(network.norms(3, 1), pictures, 0), whole(pictures))


@pytest.mark.parametrize(
    ("name", "batch", "size"), [("cifar", 512, 128), ("stl", 256, 64), ("imagenet", 64, None)]
)
def test_paper_norms_take_what_a_gpu_had(name, batch, size):
    kind = networks.find(name)
    assert kind.resolve("paper").norm_batch == size
    assert Classifier.resolve("paper", {}, name).batch_size == batch
    assert kind.resolve("small").norm_batch is None
    light = Cpc.network_settings(name, "paper")
    assert (light.norm_batch, light.norm_momentum) == (None, 0.9)


def test_wrong_names_are_one_sentence():
    with pytest.raises(ConfigError, match=r"no network 'resnet'; there are: .*cifar"):
        networks.find("resnet")
    with pytest.raises(ConfigError, match="cifar has no preset 'big'; there are: paper, small"):
        Cifar.resolve("big")
    with pytest.raises(ConfigError, match="stem"):
        Cifar.resolve(None, {"stem": 4})
