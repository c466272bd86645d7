"""Point networks: sizes, equality with the plain formulae, gradients, invariances."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks import networks
from tasks.models.cross_entropy import CrossEntropy
from tasks.networks import dgcnn, geometry, heads, pointnet2, pointnext
from tasks.networks.base import Network

torch.set_num_threads(1)

TINY: dict[str, Settings] = {
    "dgcnn": dgcnn.Configuration(k=5, widths=(8, 8, 12), fused=16),
    "pointnet2": pointnet2.Configuration(
        abstractions=(
            pointnet2.Abstraction(
                centers=16,
                scales=(
                    pointnet2.Scale(radius=0.5, members=4, widths=(8, 8)),
                    pointnet2.Scale(radius=1.0, members=8, widths=(8, 12)),
                ),
            ),
            pointnet2.Abstraction(
                centers=4, scales=(pointnet2.Scale(radius=1.5, members=6, widths=(16,)),)
            ),
        ),
        last=(16, 24),
    ),
    "pointnext": pointnext.Configuration(stem=8, stages=2, radius=0.8, members=6),
}


def cloud(batch: int = 4, points: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, points, 3, generator=torch.Generator().manual_seed(seed))


def tiny(name: str, seed: int = 0) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return networks.find(name)(TINY[name])


def parameters(layers: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layers.parameters())


def test_dgcnn_has_the_published_number_of_parameters() -> None:
    network = dgcnn.Dgcnn(dgcnn.Dgcnn.resolve("paper"))
    assert parameters(network.layers) == 617_856
    assert network.width == 2048
    model = CrossEntropy(network="dgcnn")
    model.classes = 18
    model._make_layers()
    assert parameters(model.layers) == 1_803_666


def test_pointnet2_has_the_layers_of_the_specification() -> None:
    def count(*widths: int) -> int:
        return sum(a * b + 2 * b for a, b in pairwise(widths))

    fine = count(3, 32, 32, 64) + count(3, 64, 64, 128) + count(3, 64, 96, 128)
    coarse = count(323, 64, 64, 128) + 2 * count(323, 128, 128, 256)
    network = pointnet2.PointNet2(pointnet2.PointNet2.resolve("paper"))
    assert parameters(network.layers) == fine + coarse + count(643, 256, 512, 1024)
    assert network.width == 1024


@pytest.mark.parametrize("name", networks.names_of("cloud"))
@pytest.mark.parametrize("preset", ["paper", "small"])
def test_width_is_what_leaves(name: str, preset: str) -> None:
    network = networks.find(name)(networks.find(name).resolve(preset))
    network.layers.eval()
    with torch.no_grad():
        found = network.encode(cloud(2, 160 if preset == "small" else 600))
    assert found.shape == (2, network.width) and torch.isfinite(found).all()


@pytest.mark.parametrize("name", networks.names_of("cloud"))
def test_gradients_reach_every_parameter(name: str) -> None:
    network = tiny(name)
    (network.encode(cloud()) ** 2).sum().backward()
    for label, parameter in network.layers.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, label


@pytest.mark.parametrize("name", networks.names_of("cloud"))
def test_a_cloud_does_not_depend_on_its_batch_at_evaluation(name: str) -> None:
    network = tiny(name)
    network.encode(cloud(8))
    network.layers.eval()
    with torch.no_grad():
        whole = network.encode(cloud(8))
        alone = torch.cat([network.encode(one[None]) for one in cloud(8)])
    assert torch.allclose(whole, alone, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1], atol=1e-2)


@pytest.mark.parametrize("training", [False, True])
def test_dgcnn_features_do_not_depend_on_the_order_of_the_points(training: bool) -> None:
    network = tiny("dgcnn")
    network.layers.train(training)
    points = cloud()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = [network.encode(given) for given in (points, points[:, order])]
    assert torch.allclose(*features, atol=1e-4)


def plain_edge_convolution(
    weight: torch.Tensor, norm: nn.BatchNorm1d, values: torch.Tensor, neighbours: torch.Tensor
) -> torch.Tensor:
    near = geometry.gather_rows(values, neighbours)
    own = values[:, :, None].expand_as(near)
    edges = functional.linear(torch.cat([near - own, own], 3), weight)
    normed = norm(edges.flatten(0, 2)).view_as(edges)
    return functional.leaky_relu(normed, 0.2).amax(2)


@pytest.mark.parametrize("k", [1, 6])
def test_the_best_neighbour_is_the_first_of_the_largest(k: int) -> None:
    values = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(3)).round()  # many ties
    neighbours = geometry.nearest(values, k)
    near = geometry.gather_rows(values, neighbours)
    ranked = near.sort(dim=2, descending=True, stable=True).indices[:, :, 0]
    best = dgcnn._best_neighbour(values, neighbours)
    assert torch.equal(best, neighbours.gather(2, ranked))


@pytest.mark.parametrize("training", [False, True])
def test_edge_convolution_equals_the_one_over_all_edges(training: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(3, 20, 4, generator=generator) + 5
    weight = torch.randn(6, 8, generator=generator)
    neighbours = geometry.nearest(values, 6)
    results = []
    for function in (dgcnn.edge_convolution, plain_edge_convolution):
        norm = nn.BatchNorm1d(6).train(training)
        with torch.no_grad():
            # Where the weight is negative the smallest neighbour counts.
            norm.weight.copy_(torch.tensor([1.0, -1.5, 0.5, -0.2, 0.01, 2.0]))
            norm.bias.copy_(torch.linspace(-1, 1, 6))
            norm.running_mean.fill_(0.3)
        x, w = values.clone().requires_grad_(), weight.clone().requires_grad_()
        out = function(w, norm, x, neighbours)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        grads = [x.grad, w.grad, norm.weight.grad, norm.bias.grad]
        results.append([out, *grads, norm.running_mean, norm.running_var])
    for ours, plain in zip(*results, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("training", [False, True])
def test_ball_features_equal_the_mlp_over_all_members(training: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(2, 30, 3, generator=generator)
    values = torch.randn(2, 30, 5, generator=generator)
    centers = points[:, :7]
    members = geometry.in_ball(points, centers, 1.2, 6)
    layers = pointnet2.mlp((8, 9, 10)).train(training)
    found = pointnet2.ball_features(layers, points, values, centers, members)
    near = geometry.gather_rows(points, members) - centers[:, :, None]
    joined = torch.cat([near, geometry.gather_rows(values, members)], 3)
    assert torch.allclose(found, pointnet2.through(layers, joined).amax(2), atol=1e-5)


def test_pointnet2_sees_the_cloud_moved_only_through_its_last_layer() -> None:
    points, values = cloud(2, 30), cloud(2, 30, seed=1)
    layers = pointnet2.mlp((6, 8)).eval()
    members = geometry.in_ball(points, points[:, :5], 1.0, 4)
    before = pointnet2.ball_features(layers, points, values, points[:, :5], members)
    after = pointnet2.ball_features(layers, points + 3, values, points[:, :5] + 3, members)
    assert torch.allclose(before, after, atol=1e-4)


def test_initial_weights_are_those_of_the_release() -> None:
    network = dgcnn.Dgcnn(dgcnn.Dgcnn.resolve("paper"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads.initialise(network.layers)
    linear, norm = network.layers["fuse"]["linear"], network.layers["fuse"]["norm"]
    assert abs(float(linear.weight.detach().std()) - 0.02) < 1e-4
    assert (
        abs(float(norm.weight.detach().mean()) - 1) < 0.003
        and abs(float(norm.weight.detach().std()) - 0.02) < 2e-3
    )
    assert not norm.bias.any()


def test_unknown_names_and_foreign_settings_are_refused() -> None:
    assert networks.names_of("cloud") == ("dgcnn", "pointnet2", "pointnext")
    with pytest.raises(ConfigError, match=r"there are: .*dgcnn, .*pointnet2"):
        networks.find("pointnet9")
    with pytest.raises(ConfigError, match=r"network dgcnn takes .*dgcnn\.Configuration"):
        dgcnn.Dgcnn(TINY["pointnext"])
