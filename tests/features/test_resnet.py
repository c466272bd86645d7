"""Residual networks by file: the published shapes, the arithmetic by hand, wrong files refused."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.backbones import made, read_network
from tasks.features.resnet import ResNet


def cifar_shape(depth: int, width: int = 16, classes: int = 10) -> dict:
    blocks = (depth - 2) // 6
    groups = [(blocks, width * factor, None, 1, False) for factor in (1, 2, 4)]
    return {"stem": (width, 3), "groups": groups, "last": classes}


def imagenet_shape(depths, outer: int | None, width: int = 64, classes: int = 1000) -> dict:
    groups = [
        (depth, width << n, outer and outer * width << n, 1, bool(n or outer))
        for n, depth in enumerate(depths)
    ]
    return {"stem": (width, 7), "groups": groups, "last": classes}


def count(shape: dict) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ResNet(**shape).parameters())


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_parameters_of_the_cifar_kind(depth, parameters):
    assert count(cifar_shape(depth)) == parameters


@pytest.mark.parametrize(
    ("depths", "outer", "parameters"),
    [
        ((2, 2, 2, 2), None, 11_689_512),
        ((3, 4, 6, 3), None, 21_797_672),
        ((3, 4, 6, 3), 4, 25_557_032),
    ],
)
def test_parameters_of_resnet18_34_and_50(depths, outer, parameters):
    assert count(imagenet_shape(depths, outer)) == parameters


def random_state(shape: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that no layer may leave out or take twice."""
    draws = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in ResNet(**shape).state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        spread = value.shape[1:].numel() ** -0.5 if value.ndim > 1 else 0.2
        state[name] = torch.randn(value.shape, generator=draws) * spread
        if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
            state[name] = state[name].abs() + 0.7
    return state


def by_hand(state: dict, pictures: torch.Tensor) -> torch.Tensor:
    """The features, written with functions and the names of the file alone."""

    def norm(values, name):
        mean, var, weight, bias = (
            state[f"{name}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (values - mean) / torch.sqrt(var + 1e-5) * weight + bias

    def conv(values, name, stride=1):
        weight = state[f"{name}.weight"]
        return functional.conv2d(values, weight, None, stride, weight.shape[2] // 2)

    stem = state["conv1.weight"].shape[2]
    values = norm(conv(pictures, "conv1", 2 if stem == 7 else 1), "bn1").clamp(min=0)
    if stem == 7:
        values = functional.max_pool2d(values, 3, stride=2, padding=1)
    blocks = sorted({tuple(n.split(".")[:2]) for n in state if n.startswith("layer")})
    for layer, number in sorted(blocks, key=lambda b: (b[0], int(b[1]))):
        at = f"{layer}.{number}"
        stride = 2 if number == "0" and layer != "layer1" else 1
        three = f"{at}.conv3.weight" in state
        inner = norm(conv(values, f"{at}.conv1", 1 if three else stride), f"{at}.bn1").clamp(min=0)
        inner = norm(conv(inner, f"{at}.conv2", stride if three else 1), f"{at}.bn2")
        if three:
            inner = norm(conv(inner.clamp(min=0), f"{at}.conv3"), f"{at}.bn3")
        if f"{at}.downsample.0.weight" in state:
            values = norm(conv(values, f"{at}.downsample.0", stride), f"{at}.downsample.1")
        elif stride == 2:
            zeros = torch.zeros_like(inner)
            quarter = inner.shape[1] // 4
            zeros[:, quarter:-quarter] = values[:, :, ::2, ::2]
            values = zeros
        values = (inner + values).clamp(min=0)
    return values.mean((2, 3))


@pytest.mark.parametrize(
    ("shape", "side"),
    [
        (cifar_shape(20, width=4), 32),
        (cifar_shape(32, width=4, classes=3), 16),
        (imagenet_shape((2, 1, 2, 1), None, width=4, classes=5), 64),
        (imagenet_shape((1, 2, 1, 1), 4, width=4, classes=5), 64),
    ],
    ids=["resnet20", "resnet32", "basic", "bottleneck"],
)
def test_the_file_tells_the_network_and_it_computes_what_the_formula_says(shape, side, tmp_path):
    state = random_state(shape)
    torch.save({"state_dict": {f"module.{n}": v for n, v in state.items()}}, tmp_path / "a.th")
    network, record = read_network(tmp_path / "a.th")
    pictures = torch.randn((3, 3, side, side), generator=torch.Generator().manual_seed(1))
    features = network.embed(pictures)
    torch.testing.assert_close(features, by_hand(state, pictures), rtol=1e-4, atol=1e-4)
    assert features.std() > 0.01
    expected = features @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(network.last(features), expected)
    again = made(record, network.state_dict())
    assert torch.equal(again.embed(pictures), features)


@pytest.mark.parametrize("suffix", [".th", ".pth", ".pt", ".safetensors"])
def test_names_of_the_cifar_release_and_every_kind_of_file(suffix, tmp_path):
    state = random_state(cifar_shape(20, width=4))
    theirs = {f"module.{n.replace('fc.', 'linear.')}": v for n, v in state.items()}
    path = tmp_path / f"a{suffix}"
    if suffix == ".safetensors":
        save_file(theirs, path)
    else:
        torch.save(theirs, path)
    network, record = read_network(path)
    assert record["weights"].startswith(f"a{suffix} sha256 ") and network.width == 16
    assert torch.equal(network.fc.weight, state["fc.weight"])


def test_short_cuts_of_another_name_and_a_file_without_a_last_layer(tmp_path):
    state = random_state(imagenet_shape((1, 1), None, width=4))
    torch.save({n.replace("downsample", "shortcut"): v for n, v in state.items()}, tmp_path / "a")
    network, _ = read_network(tmp_path / "a")
    assert torch.equal(
        network.layer2[0].downsample[0].weight, state["layer2.0.downsample.0.weight"]
    )
    torch.save({n: v for n, v in state.items() if not n.startswith("fc.")}, tmp_path / "b")
    assert read_network(tmp_path / "b")[0].last is None


def without(name: str):
    return lambda state: state.pop(name)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("layer2.1.conv2.weight"), "1 missing: layer2.1.conv2.weight"),
        (without("layer2.0.conv2.weight"), "no whole resnet: layer2.0.conv2.weight is missing"),
        (without("conv1.weight"), "holds bn1.bias, bn1.running_mean, bn1.running_var, ..., which"),
        (
            lambda state: state.update({"extra.weight": torch.zeros(2)}),
            "1 unexpected: extra.weight",
        ),
        (
            lambda state: state.update({"layer3.1.bn1.bias": torch.zeros(3)}),
            r"layer3.1.bn1.bias \(3,\) instead of \(16,\)",
        ),
        (
            lambda state: state["fc.bias"].fill_(torch.nan),
            "values that are not finite, first in fc.bias",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_the_first_names_that_do_not_fit(spoil, said, tmp_path):
    state = random_state(cifar_shape(20, width=4))
    spoil(state)
    torch.save(state, tmp_path / "wrong.th")
    with pytest.raises(SourceError, match=said):
        read_network(tmp_path / "wrong.th")


class Harm:
    def __reduce__(self):
        return (print, ("harm",))


def test_a_file_that_would_run_code_is_refused(tmp_path, capsys):
    (tmp_path / "harm.th").write_bytes(pickle.dumps({"state_dict": Harm()}))
    with pytest.raises(SourceError, match="not a plain torch state file"):
        read_network(tmp_path / "harm.th")
    assert "harm" not in capsys.readouterr().out
    with pytest.raises(SourceError, match="not found; name a checkpoint of a ResNet"):
        read_network(tmp_path / "none.th")
