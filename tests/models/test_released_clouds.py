"""Models of clouds in the preset `paper`: sizes, and outputs on weights made by a formula.

The numbers were put out once by the released modules on the same weights and inputs: those of 3D_OS
and, for the autoencoder, of its reference.
"""

import pytest
import torch
from torch import nn

from tasks import models
from tasks.models import flow

torch.set_num_threads(1)

COUPLING = 256 * 2048 + 2 * 2048 * 2048 + 2048 * 512 + 3 * 2048 + 512


def waves(*shape: int, first: float = 0.0, size: float = 1.0, step: float = 1.0) -> torch.Tensor:
    """size * sin(first + step * place)."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return size * torch.sin(first + step * places).view(shape)


def fill(layers: nn.Module) -> None:
    """Weights by the formula, each with another phase."""
    for number, value in enumerate(layers.state_dict().values()):
        value.copy_(waves(*value.shape, first=number, size=0.3, step=0.7))


def paper(name: str, network: str | None = "dgcnn", classes: int = 18) -> nn.ModuleDict:
    """Its layers without memory for them."""
    model = models.find(name)("paper", network)
    model.classes = classes
    with torch.device("meta"):
        model._make_layers()
    return model.layers  # type: ignore[no-any-return]


def size(layers: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layers.parameters())


def test_the_flow_has_two_networks_of_four_layers_in_each_of_eight_blocks() -> None:
    layers = paper("flow")
    # The release counts 8,192 more: norms that it never calls.
    assert size(layers["flow"]) == 16 * COUPLING == 159_490_048
    assert [layer.p for layer in layers.modules() if isinstance(layer, nn.Dropout)] == [0.0, 0.5]


def test_the_flow_is_the_released_one() -> None:
    sizes = flow.Configuration(hidden=8, blocks=2, inner=6)
    blocks = nn.ModuleList(flow._coupling(sizes) for _ in range(2)).double()
    fill(blocks)
    z, logdet = flow.transform(blocks, waves(2, 8, size=3.0), 3.0)
    first = [-1.076519855, 2.405755228, 2.675473941, -1.697787246]
    assert z[0, :4].tolist() == pytest.approx(first, abs=1e-8)
    assert logdet.tolist() == pytest.approx([0.406555268, 0.383831428], abs=1e-8)
    novelty = z.square().sum(1) / 2 - logdet
    assert novelty.tolist() == pytest.approx([11.647751536, 26.287553206], abs=1e-8)
