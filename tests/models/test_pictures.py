"""Models: the transforms, patches and masks, and what their steps may touch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks import models, networks
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Optimizers, make_fabric
from tasks.models.pictures import (
    PictureClassifier,
    middle,
    normalised,
    pixel_statistics,
    random_crops,
)

torch.set_num_threads(1)
SQUARE = torch.arange(4.0).view(1, 1, 2, 2)  # 0 1 / 2 3
TURNS = {
    "rotation": [[0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [2, 0, 3, 1]],
    "rotation_released": [[0, 1, 2, 3], [2, 3, 0, 1], [0, 2, 1, 3], [2, 0, 3, 1]],
}
NETWORKS = ("cifar", "stl", "imagenet")
CLASSIFIERS = ("classifier", "centre_mask", "rotation", "rotation_released")
CLASSIFIERS += ("cpc", "light_classifier")
TINY = {"width": 4, "blocks": 1, "dropout": 0.0, "pooling": "none"}


def model_of(name: str, network: str = "cifar", preset: str = "small", **changes: Any) -> Any:
    """The model of a preset, not fitted."""
    kind = models.find(name)
    return kind(
        kind.resolve(preset, changes, network), network, kind.network_settings(network, preset)
    )


class Steps:
    """A tiny model with its layers, and the steps that it takes on random pictures."""

    def __init__(self, name: str, pixels: np.ndarray | None = None, **changes: Any) -> None:
        kind = models.find(name)
        shape = kind.network_settings("cifar", "small", TINY)
        self.model = kind(kind.resolve("small", changes, "cifar"), "cifar", shape)
        self.model.classes = 3
        self.model.record = {"mean": [127.5] * 3, "deviation": [74.0] * 3}
        torch.manual_seed(0)
        self.model._make_layers()
        self.layers = self.model.layers.train()
        if pixels is None:
            pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
        ids = [str(row) for row in range(len(pixels))]
        self.samples = Samples(ids, np.arange(len(pixels)) % 3, {"images": pixels})
        fabric = make_fabric("cpu", self.model.settings)
        self.optimizers = Optimizers(self.model.optimizers(), fabric)

    def batch(self, count: int) -> Batch:
        return Batch(self.samples, np.arange(count), torch.device("cpu"))

    def auxiliary(self, count: int = 4) -> float:
        return float(self.model.auxiliary_step(self.batch(count), self.optimizers))

    def classes(self, count: int = 8) -> None:
        PictureClassifier.step(self.model, [self.batch(count)], self.optimizers, "plain")

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.layers.named_parameters()}

    def moved(self, before: dict[str, torch.Tensor]) -> set[str]:
        after = self.layers.named_parameters()
        return {name for name, value in after if not torch.equal(value, before[name])}


def of_classifier(names: Any) -> set[str]:
    return {name for name in names if name.startswith(("network.", "classes."))}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_model_has_both_presets_on_every_network(name):
    kind = models.find(name)
    for network in NETWORKS:
        small, paper = (kind.network_settings(network, preset) for preset in ("small", "paper"))
        assert small.width < paper.width
        assert kind.resolve("small", {}, network).epochs == 7
        assert kind.resolve("paper", {}, network).epochs == 200


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(ConfigError, match=r"no model 'jigsaw'; there are: .*centre_mask"):
        models.find("jigsaw")


@pytest.mark.parametrize("name", sorted(TURNS))
def test_four_transforms_of_a_square(name):
    task = model_of(name)
    found = [task.turn(SQUARE, number).flatten().tolist() for number in range(4)]
    assert found == TURNS[name]


def test_released_transforms_have_two_rotations_among_them():
    true, released = ({tuple(row) for row in TURNS[n]} for n in ("rotation", "rotation_released"))
    assert len(true & released) == 2


def test_lambda_of_the_paper():
    def weight(name: str, network: str, **changes: object) -> float:
        return models.find(name).resolve("paper", changes, network).auxiliary_weight

    assert [weight("rotation", network) for network in NETWORKS] == [0.5, 1.0, 0.5]
    assert weight("rotation_released", "stl") == 1.0 and weight("cpc", "imagenet") == 10.0
    assert weight("rotation", "stl", auxiliary_weight=0.25) == 0.25
    assert weight("rotation", "stl", auxiliary_weight="none") == 1.0
    assert "auxiliary_weight" not in models.find("classifier").configuration.model_fields


@pytest.mark.parametrize("name", ["rotation", "cpc"])
def test_an_auxiliary_step_touches_only_its_layer_and_what_it_shares(name):
    run = Steps(name)
    before = run.parameters()
    run.auxiliary()
    spared = {n for n in before if n.startswith("classes.")}
    if name == "cpc":
        spared |= {n for n in before if n.startswith("network.norm.")}
        spared |= {n for n in before if ".norm1.0." in n or ".norm2.0." in n}
        # 5 steps down need 6 rows; with 6 x 6 patches every predictor learns.
        assert {n for n in before if n.startswith("predict.")} <= run.moved(before)
    assert run.moved(before) == set(before) - spared


@pytest.mark.parametrize("name", ["rotation", "cpc"])
def test_a_class_step_leaves_the_task_its_layers(name):
    run = Steps(name, weight_decay=0.1)
    before = run.parameters()
    run.classes()
    idle = {n for n in before if n.endswith((".norm1.1.bias", ".norm2.1.bias", ".norm.1.bias"))}
    # Zero offsets of the other task's norms have nothing to decay; their gains do.
    assert run.moved(before) == of_classifier(before) - (idle if name == "cpc" else set())


def test_momenta_are_separate():
    """Two steps of each kind in turn give each optimiser the momentum of its own gradients."""
    run = Steps("rotation", weight_decay=0.0, learning_rate=1e-3)
    weight = run.model.network.layers["stem"].weight
    sums: dict[str, torch.Tensor] = {}
    for _ in range(2):
        for name, step in (("auxiliary", run.auxiliary), ("classes", run.classes)):
            step(8)
            sums[name] = 0.9 * sums.get(name, torch.zeros(())) + weight.grad
    for name, wanted in sums.items():
        found = run.optimizers[name].state[weight]["momentum_buffer"]
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(sums["auxiliary"], sums["classes"], rtol=0.1)


def test_a_step_is_nesterov_on_half_the_sum_of_squares():
    """One step by hand: gradient of CE + decay / 2 * sum of squares over every variable."""
    run = Steps("classifier", weight_decay=0.1, learning_rate=0.05, flip=False, padding=0.0)
    twin = copy.deepcopy(run.model)
    batch = run.batch(6)
    logits, _ = twin.classify(twin.inputs(batch))
    loss = torch.nn.functional.cross_entropy(logits, batch.labels)
    loss = loss + 0.1 * sum((p**2).sum() / 2 for p in twin.layers.parameters())
    loss.backward()
    run.classes(6)
    for ours, p in zip(run.layers.parameters(), twin.layers.parameters(), strict=True):
        # Nesterov's first step: gradient + momentum * gradient.
        assert torch.allclose(ours, p - 0.05 * 1.9 * p.grad, rtol=1e-4, atol=1e-6)


def test_lambda_scales_the_loss_and_not_the_penalty():
    steps = {}
    for weight in (0.0, 1.0, 2.0):
        run = Steps("rotation", weight_decay=0.1, auxiliary_weight=weight)
        before = run.parameters()["turns.weight"]
        run.auxiliary()
        steps[weight] = run.layers["turns"].weight.detach() - before
    assert torch.allclose(steps[0.0], -0.1 * 1.9 * 0.1 * before, rtol=1e-4)
    difference = steps[1.0] - steps[0.0]
    assert torch.allclose(steps[2.0] - steps[0.0], 2 * difference, rtol=1e-3, atol=1e-6)


def test_auxiliary_batches_move_statistics_only_where_that_is_asked_for():
    for asked in (True, False):
        run = Steps("rotation", auxiliary_statistics=asked)
        norm = run.model.network.layers["norm"][0]
        run.auxiliary()
        assert bool(norm.running_mean.any()) is asked and norm.momentum == 0.1
    assert model_of("rotation", preset="paper").settings.auxiliary_statistics


def test_a_rotation_step_takes_a_quarter_of_the_batch():
    streams = model_of("rotation", preset="paper").streams()
    assert [(stream.batch_size, stream.order) for stream in streams] == [
        (512, "endless"), (128, "endless"),
    ]  # fmt: skip
    assert len(model_of("classifier").streams()) == 1


def test_the_last_layer_has_glorots_weights():
    layer = Steps("classifier").layers["classes"]
    assert 0.8 * (6 / (16 + 3)) ** 0.5 < layer.weight.abs().max() <= (6 / (16 + 3)) ** 0.5
    assert not layer.bias.any()


# ---------------------------------------------------------------- cpc


def test_patches_of_224_stand_six_by_six():
    task = model_of("cpc", "imagenet", "paper")
    places = torch.arange(224.0).expand(1, 3, 224, 224)
    across, down = task.patches(places), task.patches(places.transpose(2, 3))
    assert across.shape == (1, 6, 6, 3, 64, 64)
    assert across[0, 2, :, 0, 5, 0].tolist() == [0, 32, 64, 96, 128, 160]
    assert down[0, :, 3, 1, 0, 7].tolist() == [0, 32, 64, 96, 128, 160]
    assert [stream.batch_size for stream in task.streams()] == [64, 32]
    assert not task.auxiliary_decays


@pytest.mark.parametrize(("network", "side"), [("cifar", 32), ("stl", 32), ("imagenet", 56)])
def test_small_pictures_have_six_by_six_patches_too(network, side):
    task = model_of("cpc", network)
    assert task.patches(torch.zeros(1, 3, side, side)).shape[1:3] == (6, 6)


def test_a_picture_too_small_for_two_rows_is_refused():
    task = model_of("cpc", "imagenet", "paper")
    with pytest.raises(ConfigError, match="no two rows of patches of 64"):
        task.patches(torch.zeros(1, 3, 95, 95))


def test_a_changed_patch_keeps_one_channel_cut_and_reflected():
    torch.manual_seed(0)
    task = model_of("cpc", "imagenet", "paper")
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
    features = torch.randn(1, 16, 6, 6, requires_grad=True)
    Steps("cpc").model._context(features)[0, :, 2].sum().backward()
    seen = features.grad.abs().sum((0, 1, 3)) > 0
    assert seen.tolist() == [False, True, True, False, False, False]


def test_the_loss_of_cpc_falls_on_a_few_pictures():
    """Brighter from row to row: what is below follows from what is above."""
    ramp = np.linspace(0, 255, 32)[None, :, None, None]
    pixels = np.broadcast_to(ramp, (4, 32, 32, 3)).astype(np.uint8)
    run = Steps("cpc", pixels, learning_rate=0.1, auxiliary_weight=1.0)
    losses = [run.auxiliary() for _ in range(30)]
    # One true patch against one negative: chance is log 2.
    assert abs(losses[0] - np.log(2)) < 0.2
    assert np.mean(losses[-5:]) < 0.45


def test_the_partner_of_cpc_has_its_network_and_learns_the_classes_alone():
    cpc, light = (model_of(name, "imagenet", "paper") for name in ("cpc", "light_classifier"))
    assert light.network_shape == cpc.network_shape
    assert light.settings.epochs == cpc.settings.epochs
    counts = {}
    for model in (cpc, light):
        model.classes = 9
        with torch.device("meta"):
            model._make_layers()
        layers = [model.layers[name] for name in ("network", "classes")]
        counts[model.name] = sum(p.numel() for layer in layers for p in layer.parameters())
    # A second gain and offset for each of 3,776 channels of the shared groups' norms.
    assert counts == dict.fromkeys(("cpc", "light_classifier"), 11_861_321 + 2 * 3_776)
    assert set(light.layers) == {"network", "classes"}


@pytest.mark.parametrize(
    ("name", "network", "preset", "sides", "reason"),
    [
        ("cpc", "cifar", "paper", (32, 32), "32 pixels has no two rows of patches of 64"),
        ("cpc", "imagenet", "paper", (256, 256), None),
        ("cpc", "imagenet", "small", (256, 256), None),
        ("cpc", "stl", "paper", (96, 96), None),
        ("cpc", "stl", "paper", (95, 95), "95 pixels has no two rows"),
        ("classifier", "imagenet", "paper", (200, 256), "side of 200 is less than the crop of 224"),
        ("rotation", "cifar", "paper", (32, 48), "32 x 48 pixels cannot be turned"),
        ("rotation", "imagenet", "paper", (256, 300), None),
        ("rotation", "cifar", "paper", (32, 32), None),
    ],
)
def test_pictures_that_a_model_cannot_learn_from(name, network, preset, sides, reason):
    kind = models.find(name)
    found = kind.unfit(kind.resolve(preset, {}, network), *sides)
    assert (found is None) if reason is None else reason in found


def test_the_parts_of_a_rotation_step_are_mixed():
    """A norm over a part must not see one transform alone."""
    run = Steps("rotation", batch_size=32)
    seen = []
    run.model.network.encode = lambda pictures, task: (
        seen.append(pictures) or torch.zeros(len(pictures), run.model.network.width)
    )
    run.model.auxiliary_loss(run.batch(8))
    plain = run.model.inputs(run.batch(8))
    first = [bool((plain == row).flatten(1).all(1).any()) for row in seen[0]]
    assert sum(first) == 8 and first[:8] != [True] * 8


# ---------------------------------------------------------------- mask and views


def test_the_mask_is_16_inside_the_central_21():
    torch.manual_seed(0)
    task = model_of("centre_mask", preset="paper")
    hidden = (task.class_view(torch.ones(500, 3, 32, 32)) == 0).numpy()
    assert (hidden.sum((2, 3)) == 256).all() and (hidden == hidden[:, :1]).all()
    rows, columns = (hidden[:, 0].any(axis) for axis in (2, 1))
    for side in (rows, columns):
        assert (side.sum(1) == 16).all()
        assert set(side.argmax(1)) == {5, 6, 7, 8, 9, 10}
    union = hidden[:, 0].any(0)
    assert union.sum() == 21 * 21 and union[5:26, 5:26].all()


def test_the_mask_grows_with_the_picture():
    task = model_of("centre_mask", "stl", "paper")
    ends = task.covered(96, torch.tensor([0.0, 0.999999]))
    assert [row.nonzero().flatten()[[0, -1]].tolist() for row in ends] == [[15, 62], [30, 77]]


def test_augmented_pictures_are_reflected_cut_and_flipped():
    torch.manual_seed(0)
    settings = model_of("classifier", preset="paper").settings
    picture = torch.arange(32 * 32).view(32, 32, 1).expand(32, 32, 3) % 251
    batch = picture.to(torch.uint8).expand(400, 32, 32, 3)
    found = {view.tobytes() for view in random_crops(batch, settings)[..., 0].numpy()}
    padded = np.pad(batch[0, :, :, 0].numpy(), 4, mode="reflect")
    cuts = [padded[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    wanted = {cut.tobytes() for c in cuts for cut in (c, np.ascontiguousarray(c[:, ::-1]))}
    assert found <= wanted and len(found) > 100


def test_imagenet_is_cut_at_random_in_training_and_in_the_middle_elsewhere():
    torch.manual_seed(0)
    settings = model_of("classifier", "imagenet", "paper", flip=False).settings
    rows = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(300, 256, 256, 3)
    cut = random_crops(rows, settings)
    assert cut.shape[1:3] == (224, 224)
    assert {int(v) for v in cut[:, 0, 0, 0]} == set(range(33))
    plain = middle(rows[:1], settings)
    assert (int(plain[0, 0, 0, 0]), int(plain[0, -1, 0, 0])) == (16, 239)
    with pytest.raises(ConfigError, match="side of 96 is less than the crop of 224"):
        middle(torch.zeros(1, 96, 96, 3, dtype=torch.uint8), settings)


def test_pictures_are_normalised_by_the_training_pixels():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (50, 9, 6, 3), np.uint8)
    found = pixel_statistics(pixels)
    assert np.allclose(found[0], pixels.mean((0, 1, 2)))
    assert np.allclose(found[1], pixels.std((0, 1, 2)))
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in found)
    scaled = normalised(torch.from_numpy(pixels), mean, std)
    assert scaled.shape == (50, 3, 9, 6) and scaled.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(scaled.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    shrunk = normalised(torch.from_numpy(pixels), mean, std, shrink=3)
    assert torch.allclose(shrunk[0, 0, 1, 1], scaled[0, 0, 3:6, 3:6].mean())


def test_odins_step_is_in_the_units_of_the_code_for_each_network():
    kind = models.find("odin")
    found = {name: kind.resolve("paper", {}, name) for name in NETWORKS}
    assert [found[name].space for name in NETWORKS] == ["pixel255", "pixel255", "pixel1"]
    assert {(one.temperature, one.epsilon) for one in found.values()} == {(1000, 5e-5)}
    assert all(networks.find(name).training("small") for name in NETWORKS)
