"""Models of clouds in the preset `paper`: sizes, and outputs on weights made by a formula.

The numbers were put out once by the released modules on the same weights and inputs: those of 3D_OS
and, for the autoencoder, of its reference.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tasks import models
from tasks.learning.samples import Samples
from tasks.models import flow
from tasks.models.base import Fitting
from tasks.models.clouds import CloudModel

torch.set_num_threads(1)


def waves(*shape: int, first: int = 0) -> torch.Tensor:
    """sin(first + place^2 mod 9973)."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(first + places.square() % 9973).view(shape)


def fill(layers: nn.Module) -> None:
    """Weights and statistics by the formula, each with another phase."""
    for number, (name, value) in enumerate(layers.state_dict().items()):
        wave = waves(*value.shape, first=number)
        if value.ndim > 1:
            value.copy_(wave * math.sqrt(2 / value.shape[1]))
        elif name.endswith(("weight", "running_var")):
            value.copy_(1 + wave / 2)
        elif value.is_floating_point():
            value.copy_(wave / 10)


def paper(name: str, network: str | None = "dgcnn", device: str = "meta") -> CloudModel:
    """With layers for 18 classes; on `meta` they take no memory."""
    model: CloudModel = models.find(name)("paper", network)
    model.classes = 18
    with torch.device(device):
        model._make_layers()
    return model


def filled(name: str, network: str | None = "dgcnn") -> CloudModel:
    model = paper(name, network, "cpu")
    fill(model.layers)
    model.layers.eval()
    return model


def clouds(points: int = 64) -> torch.Tensor:
    """Two, the largest norm 1."""
    values = waves(2, points, 3).float()
    return values / values.norm(dim=2).amax(1)[:, None, None]


def size(*layers: nn.Module) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


NETWORKS = {
    "cross_entropy": (1_803_666, [-0.02553949, 0.23240215, -0.23324452, 0.70480007]),
    "cosine_proto": (1_803_392, [-0.00888207, 0.01599739, -0.04186696, -0.10504376]),
    "subcenter_arcface": (1_812_608, [0.01599739, 0.04550296, 0.09239707, 0.10819195]),
    "supcon": (1_798_784, [0.90471292, 0.08879828, 0.05152972, -1.20876336]),
    "arpl": (1_807_489, [0.69797307, 0.39546275, 1.10560799, 1.86202645]),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_networks_are_the_released_ones(name: str) -> None:
    count, first = NETWORKS[name]
    model = filled(name)
    own = [layers for part, layers in model.layers.items() if part not in model.torch_weights]
    assert size(*own) == count
    g = model.cloud_outputs(clouds())["features"]
    values = model.logits(g) if "logits" in model.gives else g
    assert values[0, :4].tolist() == pytest.approx(first, abs=1e-5)


POINTNET = {
    "cross_entropy": 1_737_202,
    "cosine_proto": 1_736_928,
    "subcenter_arcface": 1_746_144,
    "supcon": 1_732_320,
    "arpl": 1_745_441,
}


@pytest.mark.parametrize("name", POINTNET)
def test_on_pointnet_they_have_the_released_sizes(name: str) -> None:
    model = paper(name, "pointnet2")
    own = [layers for part, layers in model.layers.items() if part not in model.torch_weights]
    assert size(*own) == POINTNET[name]


@torch.no_grad()
def test_the_adversaries_of_arpl_are_the_released_ones() -> None:
    model = filled("arpl")
    assert size(model.layers["generator"]) == 3_830_528
    assert size(model.layers["discriminator"]) == 2_536_065
    assert model.realness(clouds()).tolist() == pytest.approx([0.95452708, 0.94530147], abs=1e-5)
    fakes = model.layers["generator"](waves(2, 96).float())
    assert fakes[0, :3].tolist() == pytest.approx([0.70226371, 0.17728227, -0.27264073], abs=1e-5)
    assert fakes[1, -3:].tolist() == pytest.approx([-0.00922343, 0.21216646, -0.02350394], abs=1e-5)


def test_the_adversaries_of_arpl_start_with_weights_of_torch() -> None:
    model = paper("arpl", device="cpu")
    before = {name: value.clone() for name, value in model.layers.state_dict().items()}
    model.initialise()
    after = model.layers.state_dict()
    same = {name.split(".")[0] for name in after if torch.equal(before[name], after[name])}
    moved = {name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}
    assert moved == {"network", "embedding", "fake_norms"}
    assert same >= {"generator", "discriminator", "reciprocal"}
    assert float(after["embedding.0.weight"].std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name, rows", [("cosine_proto", 18), ("subcenter_arcface", 54)])
def test_prototypes_start_xavier_uniform(name: str, rows: int) -> None:
    model = paper(name, device="cpu")
    model.initialise()
    model.layers.requires_grad_(False)
    weight = model.layers["prototypes"]["weight"]
    bound = math.sqrt(6 / (rows + 256))
    assert weight.shape == (rows, 256) and 0.99 * bound < float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert float(model.layers["embedding"][4].weight.std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", ["supcon", "arpl"])
def test_projections_are_leaky_and_drop_half_on_every_network(name: str) -> None:
    for network in ("dgcnn", "pointnet2"):
        layers = paper(name, network).layers["embedding"]
        assert (layers[2].negative_slope, layers[3].p) == (0.2, 0.5)


def test_generated_clouds_have_as_many_points_as_real_ones() -> None:
    kind = models.find("arpl")
    for preset, changes in (("paper", {}), ("paper", {"points": 2048}), ("small", {})):
        model = kind(kind.resolve(preset, changes, "dgcnn"), "dgcnn", paper("arpl").network_shape)
        model.classes = 2
        with torch.device("meta"):
            model._make_layers()
            fakes = model.fakes(torch.empty(2, 4, 3))
        assert fakes.shape == (2, model.settings.points, 3)


@pytest.mark.parametrize("name", ["cosine_proto", "supcon", "arpl"])
def test_a_step_in_the_released_size_moves_all_that_it_should(name: str) -> None:
    kind = models.find(name)
    changes = {"epochs": 1, "batch_size": 4, "points": 32, "learning_rate": 0.1, "warmup_epochs": 0}
    model = kind(kind.resolve("paper", changes, "dgcnn"), "dgcnn", paper(name).network_shape)
    labels = np.arange(4) % 2
    samples = Samples(list("abcd"), labels, {"clouds": clouds(64).repeat(2, 1, 1).numpy()})
    before: dict[str, torch.Tensor] = {}

    def start(seed: int) -> None:
        before.update({name: value.clone() for name, value in model.layers.named_parameters()})

    model.start = start  # type: ignore[method-assign]
    history = model.fit(samples, None, Fitting(0, "cpu"))
    assert history.height == 1 and history["loss"].is_finite().all()
    after = dict(model.layers.named_parameters())
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert len(before) > 15 and still == set()


def test_the_flow_has_two_networks_of_four_layers_in_each_of_eight_blocks() -> None:
    layers = paper("flow").layers
    # The release counts 8,192 more: norms that it never calls.
    assert size(layers["flow"]) == 159_490_048
    assert [layer.p for layer in layers.modules() if isinstance(layer, nn.Dropout)] == [0.0, 0.5]


@torch.no_grad()
def test_the_flow_is_the_released_one() -> None:
    sizes = flow.Configuration(hidden=8, blocks=2, inner=6)
    blocks = nn.ModuleList(flow._coupling(sizes) for _ in range(2)).double()
    fill(blocks)
    z, logdet = flow.transform(blocks, 3 * waves(2, 8), 3.0)
    first = [-0.033127544, 1.128712710, -2.091069259, -0.049431050]
    assert z[0, :4].tolist() == pytest.approx(first, abs=1e-8)
    assert logdet.tolist() == pytest.approx([-0.602615404, -1.653760943], abs=1e-8)


@torch.no_grad()
def test_the_autoencoder_is_that_of_its_reference() -> None:
    model = filled("vae", None)
    assert size(model.layers) == 2_342_150 and model.settings.initial_weights == "torch"
    model.layers["code"].bias[512:] -= 40  # So small a variance that no noise is seen.
    mean, spread = model.code(clouds(256))
    assert mean[0, :3].tolist() == pytest.approx([-0.08916803, -0.23077950, 0.19859934], abs=1e-5)
    assert spread[0, :2].tolist() == pytest.approx([-40.1112556, -40.4436760], abs=1e-4)
    # The grid is ours in both: theirs is a file of points drawn once.
    first, second = model.decode(mean)
    assert first[0, 0].tolist() == pytest.approx([0.42183802, -0.03105301, -0.01764351], abs=1e-5)
    assert second[0, 0].tolist() == pytest.approx([0.39938980, -0.07025841, 0.07079549], abs=1e-5)
    novelty = model.cloud_outputs(clouds(256))["novelty"]
    assert novelty.tolist() == pytest.approx([269.071625, 224.084763], rel=1e-5)
    losses = model.cloud_losses(clouds(256), torch.zeros(2))
    assert float(losses["divergence"]) == pytest.approx(406_956.125, rel=1e-6)
    assert float(losses["loss"]) == pytest.approx(815_377.328, rel=1e-6)
