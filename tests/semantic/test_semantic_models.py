"""Models: the transforms, patches and masks, and what their steps may touch."""

import copy

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks.semantic import models, networks
from tasks.semantic.models import views
from tasks.semantic.models.updates import Updates
from tasks.semantic.presets import CpcSetup, MaskSetup, Setup, setup_of
from tasks.semantic.training import Trained, resolved

torch.set_num_threads(1)
SQUARE = torch.arange(4.0).view(1, 1, 2, 2)  # 0 1 / 2 3
TURNS = {
    "rotation": [[0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [2, 0, 3, 1]],
    "rotation_released": [[0, 1, 2, 3], [2, 3, 0, 1], [0, 2, 1, 3], [2, 0, 3, 1]],
}
TINY = {"width": 4, "blocks": 1, "dropout": 0.0, "pooling": "none"}


class Held:
    """Pixels in memory."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        return self.pixels[rows]


class Every(CpcSetup, MaskSetup):
    """The settings of all models at once."""


def tiny(**changes: object) -> Every:
    values = setup_of("cifar", "small", Every).model_dump() | changes
    return Every(**values | {"network": {**values["network"], **TINY}})


def updates(name: str, setup: Setup, side: int = 32, count: int = 8, seed: int = 0) -> Updates:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, side, side, 3), np.uint8)
    labels = np.arange(count) % 3
    kind = models.find(name)
    setup = resolved(setup, kind)
    torch.manual_seed(seed)
    task = kind(setup)
    layers = networks.build(setup.network, 3).train()
    own = torch.nn.ModuleDict(task.build()).train()
    mean, std = torch.full((3,), 127.5), torch.full((3,), 74.0)
    model = Trained(setup, name, 3, None, layers, mean, std, "cpu")
    return Updates(model, task, own, Held(pixels), labels, seed)


def moved(before: dict, module: torch.nn.Module) -> set[str]:
    return {n for n, value in module.named_parameters() if not torch.equal(value, before[n])}


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("name", models.names())
def test_a_model_is_found_by_its_file_name(name):
    assert models.find(name).name == name


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(ConfigError, match="no model of semantic 'jigsaw'; there are: centre_mask"):
        models.find("jigsaw")


@pytest.mark.parametrize("name", sorted(TURNS))
def test_four_transforms_of_a_square(name):
    task = models.find(name)(tiny())
    found = [task.turn(SQUARE, number).flatten().tolist() for number in range(4)]
    assert found == TURNS[name]


def test_released_transforms_have_two_rotations_among_them():
    true, released = ({tuple(row) for row in TURNS[n]} for n in ("rotation", "rotation_released"))
    assert len(true & released) == 2


def test_lambda_of_the_paper():
    weights = {
        (task, network): models.find(task).weight(network)
        for task in ("rotation", "rotation_released", "cpc", "classifier", "centre_mask")
        for network in ("cifar", "stl", "imagenet")
    }
    assert [weights["rotation", n] for n in ("cifar", "stl", "imagenet")] == [0.5, 1.0, 0.5]
    assert weights["rotation_released", "stl"] == 1.0 and weights["cpc", "imagenet"] == 10.0
    assert weights["classifier", "cifar"] == weights["centre_mask", "cifar"] == 0.0
    chosen = resolved(tiny(auxiliary_weight=0.25), models.find("rotation"))
    assert chosen.auxiliary_weight == 0.25


@pytest.mark.parametrize("name", ["rotation", "cpc"])
def test_an_auxiliary_step_touches_only_its_layer_and_what_it_shares(name):
    run = updates(name, tiny())
    layers, own = parameters(run.model.layers), parameters(run.own)
    run.auxiliary_step(np.arange(4), run.optimizers()["auxiliary"])
    changed = moved(layers, run.model.layers)
    spared = {n for n in layers if n.startswith("classes.")}
    if name == "cpc":
        spared = {n for n in layers if n.startswith(("classes.", "norm."))}
        spared |= {n for n in layers if ".norm1.0." in n or ".norm2.0." in n}
        # 5 steps down need 6 rows; with 6 x 6 patches every predictor learns.
        assert {n for n in own if n.startswith("predict.")} <= moved(own, run.own)
    assert changed == set(layers) - spared
    assert moved(own, run.own) == set(own)


@pytest.mark.parametrize("name", ["rotation", "cpc"])
def test_a_class_step_leaves_the_task_its_layers(name):
    run = updates(name, tiny(weight_decay=0.1))
    layers, own = parameters(run.model.layers), parameters(run.own)
    run.class_step(np.arange(8), run.optimizers()["classes"])
    assert not moved(own, run.own)
    idle = {
        n for n in layers if n.endswith((".norm1.1.bias", ".norm2.1.bias")) or n == "norm.1.bias"
    }
    # Zero offsets of the other task's norms have nothing to decay; their gains do.
    assert moved(layers, run.model.layers) == set(layers) - (idle if name == "cpc" else set())


def test_momenta_are_separate():
    """Two steps of each kind in turn give each optimiser the momentum of its own gradients."""
    run = updates("rotation", tiny(weight_decay=0.0, learning_rate=1e-3))
    optimizers = run.optimizers()
    weight = run.model.layers["stem"].weight
    sums = {}
    for _ in range(2):
        for name, step in (("auxiliary", run.auxiliary_step), ("classes", run.class_step)):
            step(np.arange(8), optimizers[name])
            sums[name] = 0.9 * sums.get(name, torch.zeros(())) + weight.grad
    for name, wanted in sums.items():
        found = optimizers[name].state[weight]["momentum_buffer"]
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(sums["auxiliary"], sums["classes"], rtol=0.1)


def test_a_step_is_nesterov_on_half_the_sum_of_squares():
    """One step by hand: gradient of CE + decay / 2 * sum of squares over every variable."""
    run = updates("classifier", tiny(weight_decay=0.1, learning_rate=0.05, flip=False, padding=0.0))
    twin = copy.deepcopy(run.model.layers)
    rows = np.arange(6)
    batch = run.model.normalised(torch.from_numpy(run.pictures.decode(rows)))
    features = networks.encode(twin, run.model.setup.network, batch)
    loss = torch.nn.functional.cross_entropy(
        twin["classes"](features), torch.from_numpy(run.labels[rows])
    )
    loss = loss + 0.1 * sum((p**2).sum() / 2 for p in twin.parameters())
    loss.backward()
    run.class_step(rows, run.optimizers()["classes"])
    for ours, p in zip(run.model.layers.parameters(), twin.parameters(), strict=True):
        # Nesterov's first step: gradient + momentum * gradient.
        assert torch.allclose(ours, p - 0.05 * 1.9 * p.grad, rtol=1e-4, atol=1e-6)


def test_lambda_scales_the_loss_and_not_the_penalty():
    steps = {}
    for weight in (0.0, 1.0, 2.0):
        run = updates("rotation", tiny(weight_decay=0.1, auxiliary_weight=weight))
        before = parameters(run.own)["turns.weight"]
        run.auxiliary_step(np.arange(4), run.optimizers()["auxiliary"])
        steps[weight] = run.own["turns"].weight.detach() - before
    assert torch.allclose(steps[0.0], -0.1 * 1.9 * 0.1 * before, rtol=1e-4)
    difference = steps[1.0] - steps[0.0]
    assert torch.allclose(steps[2.0] - steps[0.0], 2 * difference, rtol=1e-3, atol=1e-6)


def test_auxiliary_batches_move_statistics_only_where_that_is_asked_for():
    for asked in (True, False):
        run = updates("rotation", tiny(auxiliary_statistics=asked))
        norm = run.model.layers["norm"][0]
        run.auxiliary_step(np.arange(4), run.optimizers()["auxiliary"])
        assert bool(norm.running_mean.any()) is asked and norm.momentum == 0.1
    assert setup_of("cifar", "paper", Every).auxiliary_statistics


def test_a_rotation_step_takes_a_quarter_of_the_batch_plain():
    task = models.find("rotation")(setup_of("cifar", "paper", Every))
    assert task.pictures() == 128 and not task.augmented
    assert models.find("classifier")(tiny()).pictures() == 0


# ---------------------------------------------------------------- cpc


def test_patches_of_224_stand_six_by_six():
    task = models.find("cpc")(setup_of("imagenet", "paper", Every))
    places = torch.arange(224.0).expand(1, 3, 224, 224)
    across, down = task.patches(places), task.patches(places.transpose(2, 3))
    assert across.shape == (1, 6, 6, 3, 64, 64)
    assert across[0, 2, :, 0, 5, 0].tolist() == [0, 32, 64, 96, 128, 160]
    assert down[0, :, 3, 1, 0, 7].tolist() == [0, 32, 64, 96, 128, 160]
    assert task.pictures() == 32 and task.augmented and not task.decays


@pytest.mark.parametrize(("network", "side"), [("cifar", 32), ("stl", 32), ("imagenet", 56)])
def test_small_pictures_have_six_by_six_patches_too(network, side):
    task = models.find("cpc")(setup_of(network, "small", Every))
    assert task.patches(torch.zeros(1, 3, side, side)).shape[1:3] == (6, 6)


def test_a_picture_too_small_for_two_rows_is_refused():
    task = models.find("cpc")(setup_of("imagenet", "paper", Every))
    with pytest.raises(ConfigError, match="no two rows of patches of 64"):
        task.patches(torch.zeros(1, 3, 95, 95))


def test_a_changed_patch_keeps_one_channel_cut_and_reflected():
    torch.manual_seed(0)
    task = models.find("cpc")(setup_of("imagenet", "paper", Every))
    values = torch.arange(64 * 64.0).view(64, 64)
    patch = torch.stack([values, values + 10_000, values + 20_000])
    changed = task.changed(patch.expand(2, 6, 6, 3, 64, 64)).flatten(0, 2)
    assert changed.shape == (72, 3, 64, 64)
    assert (changed == changed[:, :1]).all()
    kept = changed[:, 0]
    assert {int(v) for v in kept[:, 32, 32] // 10_000} == {0, 1, 2}
    inner = kept[:, 4:60, 4:60] % 10_000
    step = inner[:, 0, 1] - inner[:, 0, 0]
    assert {int(v) for v in step} == {-1, 1}
    corner = torch.where(step > 0, inner[:, 0, 0], inner[:, 0, -1]).long()
    assert {int(v) for v in corner // 64} == set(range(9)) == {int(v) for v in corner % 64}
    # Reflection leaves the edge pixel out.
    assert torch.equal(kept[:, 3], kept[:, 5]) and torch.equal(kept[:, :, 60], kept[:, :, 58])


def test_the_context_of_a_row_does_not_see_rows_below():
    run = updates("cpc", tiny())
    features = torch.randn(1, 16, 6, 6, requires_grad=True)
    run.task._context(run.own, features)[0, :, 2].sum().backward()
    seen = features.grad.abs().sum((0, 1, 3)) > 0
    assert seen.tolist() == [False, True, True, False, False, False]


def test_the_loss_of_cpc_falls_on_a_few_pictures():
    """Brighter from row to row: what is below follows from what is above."""
    ramp = np.linspace(0, 255, 32)[None, :, None, None]
    pixels = np.broadcast_to(ramp, (4, 32, 32, 3)).astype(np.uint8)
    run = updates("cpc", tiny(learning_rate=0.1, auxiliary_weight=1.0))
    run = Updates(run.model, run.task, run.own, Held(pixels), run.labels[:4], 0)
    optimizer = run.optimizers()["auxiliary"]
    losses = [float(run.auxiliary_step(np.arange(4), optimizer)) for _ in range(30)]
    # One true patch against one negative: chance is log 2.
    assert abs(losses[0] - np.log(2)) < 0.2
    assert np.mean(losses[-5:]) < 0.45


# ---------------------------------------------------------------- mask and views


def test_the_mask_is_16_inside_the_central_21():
    torch.manual_seed(0)
    task = models.find("centre_mask")(setup_of("cifar", "paper", Every))
    hidden = (task.class_view(torch.ones(500, 3, 32, 32)) == 0).numpy()
    assert (hidden.sum((2, 3)) == 256).all() and (hidden == hidden[:, :1]).all()
    rows, columns = (hidden[:, 0].any(axis) for axis in (2, 1))
    for side in (rows, columns):
        assert (side.sum(1) == 16).all()
        assert set(side.argmax(1)) == {5, 6, 7, 8, 9, 10}
    union = hidden[:, 0].any(0)
    assert union.sum() == 21 * 21 and union[5:26, 5:26].all()


def test_the_mask_grows_with_the_picture():
    task = models.find("centre_mask")(setup_of("stl", "paper", Every))
    ends = task.covered(96, torch.tensor([0.0, 0.999999]))
    assert [row.nonzero().flatten()[[0, -1]].tolist() for row in ends] == [[15, 62], [30, 77]]


def test_augmented_pictures_are_reflected_cut_and_flipped():
    torch.manual_seed(0)
    setup = setup_of("cifar", "paper")
    picture = torch.arange(32 * 32).view(32, 32, 1).expand(32, 32, 3) % 251
    batch = picture.to(torch.uint8).expand(400, 32, 32, 3)
    found = {view.tobytes() for view in views.augmented(batch, setup)[..., 0].numpy()}
    padded = np.pad(batch[0, :, :, 0].numpy(), 4, mode="reflect")
    cuts = [padded[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    wanted = {cut.tobytes() for c in cuts for cut in (c, np.ascontiguousarray(c[:, ::-1]))}
    assert found <= wanted and len(found) > 100


def test_imagenet_is_cut_at_random_in_training_and_in_the_middle_elsewhere():
    torch.manual_seed(0)
    setup = setup_of("imagenet", "paper").model_copy(update={"flip": False})
    rows = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(300, 256, 256, 3)
    cut = views.augmented(rows, setup)
    assert cut.shape[1:3] == (224, 224)
    assert {int(v) for v in cut[:, 0, 0, 0]} == set(range(33))
    plain = views.plain(rows[:1], setup)
    assert (int(plain[0, 0, 0, 0]), int(plain[0, -1, 0, 0])) == (16, 239)
    with pytest.raises(ConfigError, match="side of 96 is less than the crop of 224"):
        views.plain(torch.zeros(1, 96, 96, 3, dtype=torch.uint8), setup)


def test_pictures_are_normalised_by_the_training_pixels():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (50, 9, 6, 3), np.uint8)
    found = views.survey(Held(pixels))
    assert np.allclose(found.mean, pixels.mean((0, 1, 2)))
    assert np.allclose(found.std, pixels.std((0, 1, 2)))
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in (found.mean, found.std))
    scaled = views.normalised(torch.from_numpy(pixels), mean, std)
    assert scaled.shape == (50, 3, 9, 6) and scaled.is_contiguous()
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(scaled.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    shrunk = views.normalised(torch.from_numpy(pixels), mean, std, shrink=3)
    assert torch.allclose(shrunk[0, 0, 1, 1], scaled[0, 0, 3:6, 3:6].mean())
