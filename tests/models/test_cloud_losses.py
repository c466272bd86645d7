"""Losses of models of clouds against explicit formulae."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tasks.models import arpl, flow, outlier_exposure, vae
from tasks.models.clouds import CloudModel, CloudSettings
from tasks.models.cross_entropy import smoothed_cross_entropy
from tasks.models.subcenter_arcface import Configuration, SubcenterArcFace, with_margin
from tasks.models.supcon import contrastive
from tasks.networks import dgcnn, geometry
from tasks.networks.heads import cosines

torch.set_num_threads(1)

LABELS = torch.tensor([0, 2, 1, 2, 0, 1])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def built(kind: type[CloudModel], sizes: CloudSettings, classes: int) -> CloudModel:
    """A model as it is before its first step, on a tiny network."""
    model = kind(sizes, "dgcnn", dgcnn.Configuration(k=4, widths=(6, 8), fused=8))
    model.classes = classes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model._make_layers()
    return model


@given(st.floats(0, 0.9), st.integers(2, 6))
@settings(deadline=None, max_examples=30)
def test_smoothing_is_spread_over_the_other_classes(share: float, classes: int) -> None:
    logits, labels = normal(5, classes), torch.arange(5) % classes
    targets = torch.full((5, classes), share / (classes - 1), dtype=torch.float64)
    targets[torch.arange(5), labels] = 1 - share
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    assert math.isclose(smoothed_cross_entropy(logits, labels, share), expected, rel_tol=1e-9)


def test_cosines_lie_on_the_sphere() -> None:
    g, directions = normal(4, 7), normal(3, 7, seed=1)
    found = cosines(5 * g, directions / 9)
    expected = (g @ directions.T) / (g.norm(dim=1)[:, None] * directions.norm(dim=1)[None])
    assert torch.allclose(found, expected)


def test_margin_is_added_to_the_own_angle_only() -> None:
    angles = torch.linspace(0.1, 2.5, 6, dtype=torch.float64)
    found = angles.cos()[:, None].repeat(1, 3)
    pushed = with_margin(found, LABELS, 0.5)
    own = pushed.gather(1, LABELS[:, None])[:, 0]
    assert torch.allclose(own, (angles + 0.5).cos())
    others = torch.ones_like(found, dtype=torch.bool).scatter(1, LABELS[:, None], False)
    assert torch.equal(pushed[others], found[others])


def test_margin_beyond_its_turning_point_is_the_linear_one() -> None:
    cosine = torch.tensor([[math.cos(3.0)], [-1.0]], dtype=torch.float64)
    pushed = with_margin(cosine, torch.zeros(2, dtype=torch.int64), 0.5)
    assert torch.allclose(pushed, cosine - 0.5 * math.sin(0.5))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=2))
def test_margin_keeps_the_order_of_cosines(values: list[float]) -> None:
    low, high = sorted(values)
    found = torch.tensor([[low], [high]], dtype=torch.float64)
    pushed = with_margin(found, torch.zeros(2, dtype=torch.int64), 0.5).flatten()
    assert pushed[0] <= pushed[1] + 1e-6


def test_subcenter_logits_are_the_largest_cosine_of_a_class() -> None:
    model = built(SubcenterArcFace, Configuration(hidden=8, features=5), 4)
    model.layers.eval()
    with torch.no_grad():
        g = model.cloud_outputs(normal(3, 16, 3).float())["features"]
        logits = model.logits(g)
    weight = model.layers["prototypes"]["weight"].detach().view(4, 3, 5)
    for row in range(3):
        near = functional.cosine_similarity(g[row].expand(4, 3, 5), weight, dim=2)
        assert torch.allclose(logits[row], near.amax(1), atol=1e-6)


def test_contrastive_loss_has_the_sum_inside_the_logarithm() -> None:
    g, tau = normal(6, 4), 0.1
    unit = (g / g.norm(dim=1, keepdim=True)).numpy()
    expected = []
    for i in range(6):
        near = np.exp(unit @ unit[i] / tau)
        same = [j for j in range(6) if j != i and LABELS[j] == LABELS[i]]
        other = [j for j in range(6) if LABELS[j] != LABELS[i]]
        positive, negative = near[same].sum(), near[other].sum()
        expected.append(-math.log(positive / (positive + negative)))
    assert math.isclose(contrastive(g, LABELS, tau), np.mean(expected), rel_tol=1e-9)


def test_contrastive_loss_is_least_for_separate_classes() -> None:
    apart = torch.eye(3, dtype=torch.float64)[LABELS] * 4 - 1
    assert contrastive(apart, LABELS, 0.1) < 1e-4 < contrastive(normal(6, 3), LABELS, 0.1)


def test_reciprocal_logits_and_confusion() -> None:
    g, points = normal(5, 8), normal(3, 8, seed=1)
    logits = arpl.reciprocal_logits(g.float(), points.float())
    for n in range(5):
        for c in range(3):
            expected = ((g[n] - points[c]) ** 2).sum() / 8 - g[n] @ points[c]
            assert math.isclose(logits[n, c], expected, rel_tol=1e-4, abs_tol=1e-5)
    p = normal(4, 3).softmax(1)
    expected = (p * p.log()).sum(1).mean().exp()
    assert math.isclose(arpl.confusion(p.log()), expected, rel_tol=1e-9)
    assert math.isclose(arpl.confusion(torch.zeros(4, 3)), 1 / 3, rel_tol=1e-6)


def tiny_arpl() -> CloudModel:
    sizes = arpl.Configuration(
        hidden=8, features=6, noise=4, generator=(8,), discriminator=(8,), generated_points=16
    )
    return built(arpl.Arpl, sizes, 3)


def test_arpl_loss_is_cross_entropy_and_the_margin() -> None:
    model = tiny_arpl()
    model.layers.eval()
    with torch.no_grad():
        model.layers["reciprocal"]["radius"].fill_(0.3)
        clouds = normal(6, 16, 3).float()
        g = model.cloud_outputs(clouds)["features"]
        points = model.layers["reciprocal"]["points"]
        own = (g - points[LABELS]).square().mean(1)
        ranking = nn.MarginRankingLoss(margin=1.0)
        radius = torch.full_like(own, 0.3)
        expected = functional.cross_entropy(model.logits(g), LABELS)
        expected = expected + 0.1 * ranking(radius, own, torch.ones_like(own))
        loss = model.cloud_losses(clouds, LABELS)["loss"]
    assert torch.allclose(loss, expected, atol=1e-6)


def test_generated_clouds_leave_the_norms_of_real_ones_alone() -> None:
    model = tiny_arpl()
    model.layers.train()
    real = {n: v.clone() for n, v in model.layers["network"].state_dict().items()}
    names = list(model.layers.state_dict())
    fakes = model.layers["fake_norms"][0].running_mean.clone()
    model.confusion(normal(6, 16, 3).float())
    after = model.layers["network"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in real.items())
    assert not torch.equal(model.layers["fake_norms"][0].running_mean, fakes)
    assert list(model.layers.state_dict()) == names


def test_exposure_is_the_cross_entropy_to_equal_shares() -> None:
    logits = normal(5, 4)
    expected = -(logits.log_softmax(1) / 4).sum(1).mean()
    assert math.isclose(outlier_exposure.undecided(logits), expected, rel_tol=1e-9)
    assert math.isclose(outlier_exposure.undecided(torch.ones(2, 4)), math.log(4), rel_tol=1e-6)


@pytest.mark.parametrize("radius", [0.0, 0.4, 0.9, 9.0])
@pytest.mark.parametrize("most", [3, 512])
def test_mixed_clouds_are_two_rigid_parts(radius: float, most: int) -> None:
    # Coordinates tell the cloud: cloud c lies near (10 c, 0, 0).
    base = torch.arange(8.0)[:, None, None] * torch.tensor([10.0, 0, 0])
    clouds = (base + torch.rand(8, 40, 3, generator=torch.Generator().manual_seed(0))).double()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        mixed = outlier_exposure.mix(clouds, radius, most)
        torch.manual_seed(1)
        partners = torch.randperm(8)
        place, other_place = torch.randint(40, (2, 8))
    for row, (cloud, new) in enumerate(zip(clouds, mixed, strict=True)):
        partner = clouds[partners[row]]
        center, other = cloud[place[row]], partner[other_place[row]]
        inside = torch.where((cloud - center).norm(dim=1) <= radius)[0][:most]
        offered = torch.where((partner - other).norm(dim=1) <= radius)[0][:most]
        kept = torch.ones(40, dtype=torch.bool)
        kept[inside] = False
        assert torch.equal(new[kept], cloud[kept])
        gaps = torch.cdist(new[inside] - center + other, partner[offered])
        assert gaps.amin(1).max() < 1e-4
        # As different ones as there are, before any comes twice.
        assert len(gaps.argmin(1).unique()) == min(len(inside), len(offered))


def test_flow_knows_its_determinant() -> None:
    sizes = flow.Configuration(hidden=5, blocks=3, inner=7)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = nn.ModuleList(flow._coupling(sizes) for _ in range(3)).double()
        for parameter in blocks.parameters():
            nn.init.normal_(parameter, 0, 0.7)
    values = normal(4, 5)
    z, logdet = flow.transform(blocks, values, 3.0)
    for row in range(4):
        matrix = torch.autograd.functional.jacobian(
            lambda x: flow.transform(blocks, x[None], 3.0)[0][0], values[row]
        )
        assert math.isclose(
            torch.linalg.slogdet(matrix).logabsdet, float(logdet[row].detach()), rel_tol=1e-8
        )
    assert z.shape == values.shape and not torch.allclose(z, values)


def test_flow_of_nothing_is_the_normal_density() -> None:
    sizes = flow.Configuration(hidden=6, features=4, blocks=2, inner=5)
    model = built(flow.Flow, sizes, 3)
    for parameter in model.layers["flow"].parameters():
        nn.init.zeros_(parameter)
    shared = normal(4, 6).float()
    assert torch.allclose(model.novelty(shared), shared.square().sum(1) / 2, atol=1e-5)


def test_chamfer_distance_is_the_sum_of_squares_both_ways() -> None:
    left, right = normal(2, 9, 3), normal(2, 12, 3, seed=1)
    squares = torch.cdist(left, right).square()
    expected = squares.amin(2).sum(1) + squares.amin(1).sum(1)
    assert torch.allclose(vae.chamfer(left, right), expected)
    assert torch.allclose(vae.chamfer(left, left[:, torch.randperm(9)]), torch.zeros(2).double())


def test_points_are_multiplied_with_their_nearest_neighbours() -> None:
    clouds = normal(2, 9, 3)
    found = vae.products(clouds, geometry.nearest(clouds, 4, ordered=True)).view(2, 9, 3, 3)
    gaps = torch.cdist(clouds, clouds) + 9 * torch.eye(9)
    for cloud, point in ((0, 0), (1, 5)):
        other = clouds[cloud, gaps[cloud, point].argmin()]
        assert torch.allclose(found[cloud, point], torch.outer(clouds[cloud, point], other))


@given(st.floats(-3, 3), st.floats(0.1, 3))
@settings(deadline=None, max_examples=20)
def test_divergence_is_that_of_normal_distributions(mean: float, spread: float) -> None:
    rows = torch.tensor([[mean, 0.0], [mean, 0.0]], dtype=torch.float64)
    spreads = torch.tensor([[spread, -1.0], [-spread, 1.0]], dtype=torch.float64)
    normals = torch.distributions.Normal(rows[0, 0], spreads[0, 0].abs())
    expected = torch.distributions.kl_divergence(normals, torch.distributions.Normal(0.0, 1.0))
    assert math.isclose(vae.divergence(rows, spreads), expected, rel_tol=1e-6, abs_tol=1e-9)


def test_the_grid_is_on_the_sphere_and_even() -> None:
    grid = vae.sphere(200)
    assert torch.allclose(grid.norm(dim=1), torch.ones(200), atol=1e-6)
    gaps = (torch.cdist(grid, grid) + 9 * torch.eye(200)).amin(1)
    assert gaps.min() > 0.6 * gaps.max() and grid.mean(0).norm() < 0.01
