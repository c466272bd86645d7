"""Clusters and their accuracy against plain definitions; fine-tuning on tiny frames."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.learning.samples import NOVEL, Samples
from tasks.novelcraft import discovery
from tasks.novelcraft.discovery import (
    PRESETS,
    Configuration,
    class_contrast,
    discovery_accuracy,
    embed,
    fine_tune,
    new_backbone,
    random_views,
    semi_supervised_kmeans,
    view_contrast,
)

TINY = Configuration.model_validate(
    {
        **PRESETS["small"].model_dump(),
        "image_size": 16,
        "width": 24,
        "depth": 2,
        "head_hidden": 32,
        "head_bottleneck": 16,
        "head_out": 32,
        "epochs": 4,
        "batch_size": 16,
        "unlabelled_batch": 16,
    }
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blobs(counts: list[int], seed: int, spread: float = 0.5, offset: float = 0.0):
    """Points about corners of a cube, class by class."""
    draws = np.random.default_rng(seed)
    classes = np.repeat(np.arange(len(counts)), counts)
    corners = 5 * ((np.arange(len(counts))[:, None] >> np.arange(3)) & 1)
    points = corners[classes] + draws.normal(0, spread, (len(classes), 3)) + offset
    return points.astype(np.float32), classes


# --- k-means


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 1000), st.floats(0.1, 6))
def test_kmeans_properties(known, new, seed, spread):
    labelled, classes = blobs([7] * known, seed, spread)
    unlabelled, _ = blobs([6] * (known + new), seed + 1, spread)
    arguments = (labelled, classes + 10, unlabelled, known + new)
    found = semi_supervised_kmeans(*arguments, seed=seed, runs=3)
    assert found.classes.tolist() == list(range(10, 10 + known))
    np.testing.assert_array_equal(found.labelled, classes)
    assert found.centers.shape == (known + new, 3)
    assert (np.diff(found.inertias) <= 1e-9 * found.inertias[0]).all()
    rows = np.concatenate([labelled, unlabelled]).astype(np.float64)
    own = np.concatenate([found.labelled, found.unlabelled])
    assert found.inertia == pytest.approx(((rows - found.centers[own]) ** 2).sum(), rel=1e-6)
    distances = np.linalg.norm(unlabelled[:, None] - found.centers, axis=2)
    chosen = distances[np.arange(len(unlabelled)), found.unlabelled]
    np.testing.assert_allclose(chosen, distances.min(1), rtol=1e-6)
    np.testing.assert_array_equal(found.predict(unlabelled), found.unlabelled)
    again = semi_supervised_kmeans(*arguments, seed=seed, runs=3)
    np.testing.assert_array_equal(again.centers, found.centers)
    more = semi_supervised_kmeans(*arguments, seed=seed, runs=6)
    assert more.inertia <= found.inertia


def test_labelled_points_keep_their_cluster_even_where_another_is_nearer():
    labelled = np.array([[0.0], [1.0], [9.9], [10.0], [11.0]])
    found = semi_supervised_kmeans(
        labelled, np.array([0, 0, 0, 1, 1]), np.array([[0.5], [10.5]]), 2
    )
    assert found.labelled.tolist() == [0, 0, 0, 1, 1]
    assert found.unlabelled.tolist() == [0, 1]
    np.testing.assert_allclose(found.centers[:, 0], [(0 + 1 + 9.9 + 0.5) / 4, 31.5 / 3])


def test_known_and_new_groups_are_found():
    labelled, classes = blobs([30] * 5, 0)
    unlabelled, true = blobs([20] * 8, 1)
    found = semi_supervised_kmeans(labelled, classes, unlabelled, 8)
    accuracy = discovery_accuracy(true, found.unlabelled, range(5))
    assert (accuracy.all, accuracy.labelled, accuracy.new) == (1.0, 1.0, 1.0)
    assert found.unlabelled[true < 5].tolist() == true[true < 5].tolist()


def test_far_from_the_origin_the_result_is_the_same():
    one, other = (
        semi_supervised_kmeans(
            *blobs([30] * 2, 0, offset=offset), blobs([20] * 4, 1, offset=offset)[0], 4
        )
        for offset in (0.0, 4096.0)
    )
    np.testing.assert_array_equal(one.unlabelled, other.unlabelled)
    assert other.inertia == pytest.approx(one.inertia, rel=1e-2)


def test_equal_points_do_not_break_the_start():
    found = semi_supervised_kmeans(np.zeros((3, 2)), np.zeros(3), np.zeros((4, 2)), 3)
    assert found.inertia == 0


def test_impossible_requests_are_refused():
    labelled, classes = blobs([3] * 3, 0)
    unlabelled, _ = blobs([2], 1)
    with pytest.raises(ConfigError, match=r"2 clusters asked for, expected 3 .* to 5"):
        semi_supervised_kmeans(labelled, classes, unlabelled, 2)
    with pytest.raises(ConfigError, match="6 clusters asked for"):
        semi_supervised_kmeans(labelled, classes, unlabelled, 6)
    with pytest.raises(ConfigError, match="rows of equal width"):
        semi_supervised_kmeans(labelled, classes, unlabelled[:, :2], 4)
    with pytest.raises(ConfigError, match="not all finite"):
        semi_supervised_kmeans(labelled, classes, unlabelled * np.nan, 4)


# --- accuracy


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accuracy_is_that_of_the_best_match(data):
    size = data.draw(st.integers(1, 5))
    labels = st.lists(st.integers(0, size - 1), min_size=12, max_size=12).map(np.array)
    true, clusters = data.draw(labels), data.draw(labels)
    known = data.draw(st.sets(st.integers(0, size - 1)))
    found = discovery_accuracy(true, clusters, known)
    best = max((np.array(p)[clusters] == true).mean() for p in permutations(range(size)))
    assert found.all == pytest.approx(best)
    right = found.matched[clusters] == true
    assert right.mean() == pytest.approx(best)
    is_known = np.isin(true, list(known))
    for value, rows in ((found.labelled, is_known), (found.new, ~is_known)):
        assert value == (pytest.approx(right[rows].mean()) if rows.any() else None)
    assert found.confusion.sum() == 12


def test_more_clusters_than_classes():
    found = discovery_accuracy(np.array([0, 0, 0, 1]), np.array([3, 3, 2, 1]), [0])
    assert (found.all, found.labelled, found.new) == (0.75, 2 / 3, 1.0)
    with pytest.raises(ConfigError, match="1 true classes and 2 clusters"):
        discovery_accuracy(np.array([0]), np.array([0, 1]), [0])


# --- losses and views


def test_losses_follow_their_definitions():
    torch.manual_seed(0)
    first, second = torch.nn.functional.normalize(torch.randn(2, 6, 4), dim=2)
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    views, classes = [], []
    for i in range(6):
        others = [float(first[i] @ first[j]) / 0.1 for j in range(6) if j != i]
        base = np.log(np.exp(others).sum())
        views.append(base - float(first[i] @ second[i]) / 0.1)
        alike = [
            float(first[i] @ first[j]) / 0.1 for j in range(6) if j != i and labels[i] == labels[j]
        ]
        if alike:
            classes.append(base - np.mean(alike))
    assert float(view_contrast(first, second, 0.1)) == pytest.approx(np.mean(views), rel=1e-4)
    assert len(classes) == 5
    assert float(class_contrast(first, labels, 0.1)) == pytest.approx(np.mean(classes), rel=1e-4)


def test_classes_without_a_pair_give_no_loss_and_no_gradient():
    embeddings = torch.randn(3, 4, requires_grad=True)
    loss = class_contrast(embeddings, torch.arange(3), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(embeddings.grad, torch.zeros(3, 4))


def test_views_are_seeded_different_and_in_range():
    images = torch.rand(8, 3, 16, 16)
    torch.manual_seed(1)
    one = random_views(images, 0.4)
    two = random_views(images, 0.4)
    torch.manual_seed(1)
    assert torch.equal(random_views(images, 0.4), one)
    assert not torch.equal(one, two)
    assert one.shape == (8, 3, 16, 16)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (discovery.MEAN, discovery.DEVIATION))
    unit = one * deviation + mean
    assert unit.min() > -1e-5
    assert unit.max() < 1 + 1e-5


def test_colours():
    images = torch.rand(2, 3, 5, 5) * 0.5
    same = torch.ones(2)
    plain = discovery._recoloured(images, same, same, same, 0 * same)
    torch.testing.assert_close(plain, images)
    grey = discovery._recoloured(images, same, same, 0 * same, 0.1 * same)
    torch.testing.assert_close(grey[:, 0], grey[:, 1])
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    brighter = discovery._recoloured(images, 1.5 * same, same, same, 0 * same)
    torch.testing.assert_close(brighter, 1.5 * images)
    red = torch.zeros(1, 3, 2, 2)
    red[:, 0] = 0.5
    third = discovery._recoloured(red, same[:1], same[:1], same[:1], same[:1] / 3)
    torch.testing.assert_close(third, red.roll(1, 1))


def test_blur_spreads_a_point_and_keeps_its_sum():
    images = torch.zeros(2, 3, 15, 15)
    images[:, :, 7, 7] = 1
    found = discovery._blurred(images, torch.tensor([1e-3, 1.5]))
    torch.testing.assert_close(found[0], images[0])
    torch.testing.assert_close(found[1].sum((1, 2)), torch.ones(3))
    assert found[1, 0, 7, 7] < 0.2
    torch.testing.assert_close(found[1], found[1].transpose(1, 2))
    even = torch.full((1, 3, 9, 9), 0.3)
    torch.testing.assert_close(discovery._blurred(even, torch.tensor([2.0])), even)


# --- fine-tuning


def pictures(classes: np.ndarray, seed: int) -> Samples:
    """A bright bar whose height in the picture is the class, on a noisy ground."""
    draws = np.random.default_rng(seed)
    images = draws.integers(0, 90, (len(classes), 20, 20, 3))
    for image, number in zip(images, classes, strict=True):
        image[4 * number : 4 * number + 4] += 150
    ids = [f"{seed}/{row}" for row in range(len(classes))]
    return Samples(ids, classes.astype(np.int64), {"images": images.astype(np.uint8)})


def trained(settings: Configuration, **options):
    backbone, _ = new_backbone(settings, seed=0)
    known, every = pictures(np.arange(40) % 3, 0), pictures(np.arange(40) % 5, 1)
    history = fine_tune(backbone, known, every, settings, seed=2, device="cpu", **options)
    return backbone, history


def test_the_paper_preset_is_the_papers():
    paper = PRESETS["paper"]
    assert (paper.epochs, paper.batch_size, paper.unlabelled_batch) == (200, 64, 64)
    assert (paper.supervised_weight, paper.temperature) == (0.35, 0.1)
    assert paper.learning_rate * paper.final_factor == pytest.approx(0.001)
    assert (paper.trained_blocks, paper.order) == (1, "balanced")
    with pytest.raises(ValueError, match="without momentum"):
        Configuration(momentum=0.9)


def test_contrast_lowers_the_loss_and_groups_the_classes():
    settings = TINY.model_copy(update={"epochs": 25})
    test = pictures(np.arange(60) % 3, 5)

    def separation(backbone) -> float:
        features = embed(backbone, test.images(), settings, device="cpu")
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        centred = features - features.mean(0)
        means = np.stack([centred[test.labels == c].mean(0) for c in range(3)])
        return (means[test.labels] ** 2).sum() / (centred**2).sum()

    before = separation(new_backbone(settings, seed=0)[0])
    backbone, history = trained(settings)
    assert history.columns == ["epoch", "loss", "unsupervised", "supervised"]
    assert history["loss"][-1] < history["loss"][0] - 0.2
    assert separation(backbone) > before


def test_the_labels_of_unlabelled_frames_are_not_used():
    known, every = pictures(np.arange(20) % 3, 0), pictures(np.arange(20) % 5, 1)
    hidden = Samples(every.ids, None, every.arrays)
    short = TINY.model_copy(update={"epochs": 1})
    weights = []
    for unlabelled in (every, hidden):
        backbone, _ = new_backbone(short, seed=0)
        fine_tune(backbone, known, unlabelled, short, device="cpu")
        weights.append(backbone.norm.weight)
    assert torch.equal(*weights)


def test_labels_decide_who_is_alike():
    """Each frame a class of its own, none drawn twice: nothing is alike."""
    settings = TINY.model_copy(update={"epochs": 1, "order": "shuffled"})
    frames = pictures(np.arange(20) % 5, 0)
    for labels, nothing in ((np.arange(20), True), (frames.labels, False)):
        backbone, _ = new_backbone(settings, seed=0)
        known = Samples(frames.ids, labels, frames.arrays)
        history = fine_tune(backbone, known, frames, settings, device="cpu")
        assert (history["supervised"][0] == 0) is nothing


def test_frozen_blocks_stay_and_trained_ones_move():
    settings = TINY.model_copy(update={"trained_blocks": 1, "epochs": 1})
    before, _ = new_backbone(settings, seed=0)
    after, _ = trained(settings)
    moved = {
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert moved
    assert all(name.startswith(("blocks.1.", "norm.")) for name in moved)


class Killed(Exception):
    pass


def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path):
    settings = TINY.model_copy(update={"checkpoint_every": 1})
    whole, history = trained(settings)

    def kill(epoch: int, epochs: int, row: object) -> None:
        if epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        trained(settings, checkpoints=tmp_path, progress=kill)
    seen = []
    again, resumed = trained(
        settings, checkpoints=tmp_path, progress=lambda epoch, n, row: seen.append(epoch)
    )
    assert seen == [3, 4]
    assert resumed.equals(history)
    pairs = zip(whole.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_rate_falls_by_a_cosine():
    """With one batch an epoch, loss times rate was minimised: the ratio is the schedule."""
    settings = TINY.model_copy(update={"batch_size": 40, "epochs": 3})
    rows = []
    trained(settings, progress=lambda epoch, n, row: rows.append(row["loss"] / row["contrast"]))
    cosine = (1 + np.cos(np.pi * np.arange(3) / 3)) / 2
    assert rows == pytest.approx(0.01 + 0.99 * cosine, rel=1e-5)


def test_embedding_is_the_backbone_on_plain_frames():
    backbone, origin = new_backbone(TINY, seed=4)
    assert origin == "random, seed 4"
    images = pictures(np.arange(3), 0).images()
    found = embed(backbone, images, TINY, device="cpu")
    assert (found.shape, found.dtype) == ((3, 24), np.float32)
    plain = discovery.normalised(discovery.resized(torch.from_numpy(images), 16))
    torch.testing.assert_close(torch.from_numpy(found), backbone(plain).detach())


def test_a_dino_file_is_where_it_starts(tmp_path):
    state = new_backbone(TINY, seed=9)[0].state_dict()
    torch.save(state, tmp_path / "dino.pth")
    settings = TINY.model_copy(update={"weights": tmp_path / "dino.pth"})
    backbone, origin = new_backbone(settings, seed=0)
    assert origin.startswith("dino.pth sha256 ")
    assert torch.equal(backbone.cls_token, state["cls_token"])


def test_labels_are_needed():
    backbone, _ = new_backbone(TINY, seed=0)
    every = pictures(np.arange(4) % 2, 1)
    for labels in (None, np.array([0, 1, NOVEL, 0])):
        with pytest.raises(ConfigError, match="number of its class"):
            fine_tune(backbone, Samples(every.ids, labels, every.arrays), every, TINY, device="cpu")
    with pytest.raises(ConfigError, match="1 labelled and 4 unlabelled"):
        fine_tune(backbone, pictures(np.zeros(1, int), 0), every, TINY, device="cpu")
