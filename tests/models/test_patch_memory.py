"""Patch memory: the choice of memories and the score against direct sums, small objects found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError
from tasks.features.efficientnet import patch_features
from tasks.learning.samples import Samples
from tasks.models import load_model
from tasks.models.patch_memory import (
    Configuration,
    PatchMemory,
    k_centre,
    nearest,
    random_rows,
    strangeness,
)
from tests.models.synthetic import fit, novelty


def samples(images: np.ndarray) -> Samples:
    return Samples([str(row) for row in range(len(images))], None, {"images": images})


def textured(count: int, seed: int) -> np.ndarray:
    """Grey frames of two coarse textures, the second below the first."""
    draws = np.random.default_rng(seed)
    cells = draws.integers(100, 140, (count, 16, 16, 1))
    cells[:, 8:] = draws.integers(40, 120, (count, 8, 16, 1))
    return np.broadcast_to(cells.repeat(4, 1).repeat(4, 2), (count, 64, 64, 3)).astype(np.uint8)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_each_centre_is_the_farthest_point_from_those_before(seed, count):
    points = np.random.default_rng(seed).normal(size=(40, 3))
    rows, radius = k_centre(torch.from_numpy(points), count)
    rows = rows.numpy()
    assert len(set(rows)) == count
    between = np.linalg.norm(points[:, None] - points, axis=2)
    for number in range(1, count):
        left = between[:, rows[:number]].min(1)
        assert left[rows[number]] == pytest.approx(left.max())
    assert radius == pytest.approx(between[:, rows].min(1).max(), abs=1e-6)


def test_no_more_centres_than_different_points():
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 4.0]]).repeat(5, 1)
    rows, radius = k_centre(points, 9)
    assert sorted((rows % 3).tolist()) == [0, 1, 2]
    assert radius == 0


def test_memories_drawn_at_random_cover_less_and_are_as_many():
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(400, 3)))
    torch.manual_seed(0)
    rows, radius = random_rows(points, 20)
    assert len(set(rows.tolist())) == 20
    between = torch.cdist(points, points[rows])
    assert radius == pytest.approx(float(between.min(1).values.max()))
    assert radius > k_centre(points, 20)[1]
    model = PatchMemory(Configuration(choice="random", candidates=500))
    history = model.fit(samples(textured(4, 0)))
    assert len(model.memory) == history["memories"][0] == round(history["candidates"][0] * 0.01) > 0


def test_a_projection_keeps_the_farthest_apart():
    draws = np.random.default_rng(0)
    centres = 30 * draws.normal(size=(6, 400))
    points = centres[np.arange(120) % 6] + draws.normal(size=(120, 400))
    torch.manual_seed(3)
    rows, _ = k_centre(torch.from_numpy(points).float(), 6)
    assert sorted((rows % 6).tolist()) == [0, 1, 2, 3, 4, 5]


def test_nearest_memory(monkeypatch):
    monkeypatch.setattr("tasks.models.patch_memory.LARGEST", 60)
    points, memory = torch.randn(37, 5, generator=torch.Generator().manual_seed(0)).split((17, 20))
    distances, rows = nearest(points, memory)
    expected = (points[:, None] - memory).norm(dim=2).min(1)
    torch.testing.assert_close(distances, expected.values)
    assert torch.equal(rows, expected.indices)


def test_score_by_hand():
    memory = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]])
    # Distances 2, 3 and 0, 0.5.
    patches = torch.tensor([[[0.0, 2.0], [1.0, 3.0]], [[9.0, 0.0], [0.0, 0.5]]])
    assert strangeness(patches, memory, 0.0, 0).tolist() == [3.0, 0.5]
    assert strangeness(patches, memory, 1.0, 0).tolist() == [2.5, 0.25]
    # Farthest: (1, 3), nearest (1, 0), around it (1, 0) and (0, 0) at sqrt(10); then (0, 0.5).
    weight = 1 - np.exp(3) / (np.exp(3) + np.exp(10**0.5))
    other = 1 - np.exp(0.5) / (np.exp(0.5) + np.exp(1.25**0.5))
    found = strangeness(patches, memory, 0.0, 2)
    np.testing.assert_allclose(found, [3 * weight, 0.5 * other], rtol=1e-5)
    everything = strangeness(patches, memory, 0.0, 50)
    assert torch.isfinite(everything).all()
    assert not torch.allclose(everything, found)
    assert strangeness(patches, memory[:1], 0.0, 9)[1] == 9
    # exp(1000) is no float.
    assert torch.isfinite(strangeness(patches * 1000, memory * 1000, 0.0, 2)).all()


def test_all_patches_remembered_are_no_news():
    images = textured(3, seed=0)
    model = PatchMemory(Configuration(coreset=1.0, item_bar_rows=0))
    (history,) = fit(model, samples(images)).to_dicts()
    patches = patch_features(images, device="cpu").reshape(-1, 152)
    assert history["patches"] == history["candidates"] == len(patches) == 3 * 8 * 8
    remembered, expected = (
        np.unique(np.asarray(rows).round(3), axis=0) for rows in (model.memory, patches)
    )
    np.testing.assert_allclose(remembered, expected, atol=1e-2)
    new = novelty(model, samples(textured(3, seed=1)))
    assert novelty(model, samples(images)).max() < 0.05 * new.min()


def test_candidates_are_drawn_from_all_images():
    images = textured(6, seed=0)
    model = PatchMemory(Configuration(candidates=60, coreset=0.5, item_bar_rows=0, batch_size=4))
    (history,) = fit(model, samples(images), seed=1).to_dicts()
    assert (history["candidates"], history["memories"]) == (60, 30)
    assert model.memory.shape == (30, 152)
    patches = torch.from_numpy(patch_features(images, device="cpu"))
    distance, row = nearest(model.memory, patches.reshape(-1, 152))
    assert distance.max() < 0.05 * history["radius"]
    assert len((row // 64).unique()) > 3
    other = PatchMemory(model.settings)
    fit(other, samples(images), seed=2)
    assert not torch.equal(other.memory, model.memory)


@pytest.mark.parametrize("preset", ["paper", "small"])
def test_a_small_object_is_found_wherever_it_stands(preset):
    settings = PatchMemory.resolve(preset, {"item_bar_rows": 0, "coreset": 0.2})
    model = PatchMemory(settings)
    fit(model, samples(textured(24, seed=0)))
    normal = textured(12, seed=1)
    novel = textured(12, seed=2)
    for number, (top, left) in enumerate(np.random.default_rng(3).integers(0, 52, (12, 2))):
        novel[number, top : top + 12, left : left + 12] = [200, 40, 200]
    scores = novelty(model, samples(np.concatenate([normal, novel])))
    assert roc_auc_score(np.arange(24) >= 12, scores) == 1


def test_the_item_bar_does_not_count():
    images = textured(4, seed=0)
    model = PatchMemory(PatchMemory.resolve("small", {"item_bar_rows": 22}))
    fit(model, samples(images))
    changed = images.copy()
    changed[:, -22:] = 255
    np.testing.assert_array_equal(novelty(model, samples(changed)), novelty(model, samples(images)))
    with pytest.raises(ConfigError, match="item_bar_rows to 0"):
        novelty(model, samples(images[:, :20]))


def test_other_weights_than_those_of_the_training_are_refused(tmp_path):
    model = PatchMemory("small")
    fit(model, samples(textured(2, seed=0)))
    assert model.record["weights"].startswith("efficientnet-lite0-57934424.pth sha256 ")
    model.record = {"weights": "other.pth sha256 00"}
    model.save(tmp_path / "a.safetensors")
    again = load_model(tmp_path / "a.safetensors", device="cpu")
    with pytest.raises(ConfigError, match=r"fitted on the weights other\.pth sha256 00, but"):
        novelty(again, samples(textured(1, seed=1)))


@pytest.mark.slow
def test_novel_objects_of_the_sample_are_found():
    from tasks.sample.blockworld import draw
    from tasks.sample.novelcraft import NOVEL_BLOCKS, play

    def frames(name: str, episodes: range) -> np.ndarray:
        """All frames of `normal`, else those with at least 1 % of novel pixels."""
        kept = []
        for frame in (f for episode in episodes for f in play(0, name, episode)[:-1]):
            picture = draw(frame.view())
            rest = {c: b for c, b in frame.cells.items() if b != NOVEL_BLOCKS.get(name)}
            without = draw(replace(frame, cells=rest).view())
            if name == "normal" or (picture != without).any(2).mean() >= 0.01:
                kept.append(picture)
        return np.stack(kept)

    model = PatchMemory("small")
    model.fit(samples(frames("normal", range(4))), device="cpu")
    normal = frames("normal", range(4, 6))
    novel = np.concatenate([frames(n, range(2)) for n in ("item_pumpkin", "item_bookshelf")])
    scores = novelty(model, samples(np.concatenate([normal, novel])))
    assert roc_auc_score(np.arange(len(scores)) >= len(normal), scores) >= 0.8
