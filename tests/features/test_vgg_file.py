"""VGG by file: torchvision's numbering tells the layers, and the arithmetic is that by hand."""

import pytest
import torch
from torch.nn import functional

from schemas.errors import SourceError
from tasks.features.backbones import made, read_network
from tasks.features.vgg_file import TorchvisionVgg

# Numbers of the convolutions of torchvision's files, and after which of them a maximum stands.
PUBLISHED = {
    (False, 16): ((0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28), (2, 7, 14, 21, 28)),
    (True, 11): ((0, 4, 8, 11, 15, 18, 22, 25), (0, 4, 11, 18, 25)),
}


def state_of(places, normed: bool) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    state, inside = {}, 3
    for number, place in enumerate(places):
        outside = 4 + number
        state[f"features.{place}.weight"] = (
            torch.randn((outside, inside, 3, 3), generator=draws) / 4
        )
        state[f"features.{place}.bias"] = torch.randn(outside, generator=draws)
        if normed:
            for part in ("weight", "bias", "running_mean", "running_var"):
                values = torch.rand(outside, generator=draws) + 0.5
                state[f"features.{place + 1}.{part}"] = values
        inside = outside
    for place, (rows, columns) in {0: (6, inside * 4), 3: (6, 6), 6: (5, 6)}.items():
        state[f"classifier.{place}.weight"] = torch.randn((rows, columns), generator=draws)
        state[f"classifier.{place}.bias"] = torch.randn(rows, generator=draws)
    return state


@pytest.mark.parametrize("kind", PUBLISHED, ids=["vgg16", "vgg11_bn"])
def test_the_file_tells_the_layers_and_it_computes_what_the_formula_says(kind, tmp_path):
    (normed, _), (places, maxima) = kind, PUBLISHED[kind]
    state = state_of(places, normed)
    torch.save(state, tmp_path / "vgg.pth")
    network, record = read_network(tmp_path / "vgg.pth")
    pictures = torch.randn((2, 3, 64, 64), generator=torch.Generator().manual_seed(1))
    values = pictures
    for place in places:
        weight, bias = (state[f"features.{place}.{part}"] for part in ("weight", "bias"))
        values = functional.conv2d(values, weight, bias, padding=1)
        if normed:
            mean, var, scale, shift = (
                state[f"features.{place + 1}.{part}"][:, None, None]
                for part in ("running_mean", "running_var", "weight", "bias")
            )
            values = (values - mean) / (var + 1e-5).sqrt() * scale + shift
        values = values.clamp(min=0)
        if place in maxima:
            values = functional.max_pool2d(values, 2)
    rows = values.flatten(1)  # 64 / 32 = 2, which is the pool
    for place in (0, 3):
        rows = rows @ state[f"classifier.{place}.weight"].T + state[f"classifier.{place}.bias"]
        rows = rows.clamp(min=0)
    torch.testing.assert_close(network.embed(pictures), rows, rtol=1e-3, atol=1e-3)
    assert rows.std() > 0 and network.width == 6 and network.last.out_features == 5
    again = made(record, network.state_dict())
    assert torch.equal(again.embed(pictures), network.embed(pictures))


def test_vgg16_has_its_published_size():
    layers = [64, 64, "M", 128, 128, "M", *([256] * 3), "M", *([512] * 3), "M", *([512] * 3), "M"]
    with torch.device("meta"):
        network = TorchvisionVgg(classes=1000, layers=layers, hidden=4096, pool=7)
    assert sum(p.numel() for p in network.parameters()) == 138_357_544


def test_what_does_not_fit_is_named(tmp_path):
    state = state_of(PUBLISHED[False, 16][0], False)
    state.pop("classifier.6.weight")
    torch.save(state, tmp_path / "vgg.pth")
    with pytest.raises(SourceError, match=r"no whole vgg: classifier.6.weight is missing"):
        read_network(tmp_path / "vgg.pth")
