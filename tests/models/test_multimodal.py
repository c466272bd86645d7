"""Fusion is near the better modality wherever the novelty shows, and keeps its promises."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError
from tasks.learning.samples import NOVEL, Samples
from tasks.models import load_model
from tasks.models.multimodal import (
    Configuration,
    Multimodal,
    episode_scores,
    paired_scores,
    surprise,
)
from tasks.novelcraft.classes import FIRST_NOVEL_EPISODE
from tests.models.synthetic import fit, novelty
from tests.shared import shared_path

RULES = ("fisher", "max", "range")


def scores(known: int, novel: int, seed: int, shift: dict[str, float] | None = None) -> Samples:
    """Visual errors of about 0.003, heavy-tailed symbolic ones of about 3; `shift` is in units of
    each modality's spread and moves the novel samples only."""
    draws = np.random.default_rng(seed)
    labels = np.r_[np.zeros(known, np.int64), np.full(novel, NOVEL)]
    moved = {
        name: (labels == NOVEL) * (shift or {}).get(name, 0.0) for name in ("visual", "symbolic")
    }
    arrays = {
        "visual": 0.003 + 0.0005 * (draws.normal(size=len(labels)) + moved["visual"]),
        "symbolic": np.exp(1 + 0.8 * (draws.normal(size=len(labels)) + moved["symbolic"])),
    }
    return Samples([str(row) for row in range(len(labels))], labels, arrays)


def fitted(rule: str, valid: Samples | None = None) -> Multimodal:
    model = Multimodal(Configuration(rule=rule))
    fit(model, scores(10, 0, 0), valid or scores(800, 100, 1, {"visual": 3}))
    return model


@pytest.mark.parametrize("rule", ["fisher", "max"])
@pytest.mark.parametrize("shift", [{"visual": 3}, {"symbolic": 3}, {"visual": 2, "symbolic": 2}])
def test_fusion_is_near_the_better_modality(rule, shift):
    test = scores(800, 800, 2, shift)
    novel = test.labels == NOVEL
    alone = {name: roc_auc_score(novel, test.array(name)) for name in test.arrays}
    fused = roc_auc_score(novel, novelty(fitted(rule), test))
    assert fused > max(alone.values()) - 0.03
    if len(shift) == 2 and rule == "fisher":
        assert fused > max(alone.values()) + 0.02


def test_adding_ranges_loses_to_ranks_where_one_modality_is_heavy_tailed():
    """Why `fisher` and not the released kind of fusion is the default."""
    test = scores(800, 800, 2, {"symbolic": 2})
    areas = [roc_auc_score(test.labels == NOVEL, novelty(fitted(rule), test)) for rule in RULES]
    assert areas[0] > areas[2] + 0.02


def test_the_released_rule_is_the_released_formula():
    test = Samples(
        ["a", "b"],
        None,
        {"visual": np.array([0.0065, 0.0]), "symbolic": np.array([29.5301, 0.2429])},
    )
    assert novelty(fitted("released"), test) == pytest.approx([2.0, 0.0], abs=1e-12)
    ranged = fitted("range", test)
    assert novelty(ranged, test) == pytest.approx([2.0, 0.0], abs=1e-12)


def test_novel_validation_samples_do_not_calibrate():
    pure, mixed = scores(300, 0, 1), scores(300, 0, 1)
    more = scores(0, 50, 4, {"visual": 9, "symbolic": 9})
    mixed = Samples(
        [*pure.ids, *more.ids],
        np.r_[pure.labels, more.labels],
        {name: np.r_[pure.array(name), more.array(name)] for name in pure.arrays},
    )
    assert fitted("fisher", pure).fingerprint() == fitted("fisher", mixed).fingerprint()


def test_without_validation_nothing_is_calibrated():
    with pytest.raises(ConfigError, match="no known validation samples"):
        fit(Multimodal("small"), scores(10, 0, 0))
    with pytest.raises(ConfigError, match="no known validation samples"):
        fit(Multimodal("small"), scores(10, 0, 0), scores(0, 10, 0))


def test_scores_must_be_one_number_each():
    broken = Samples(["a"], None, {"visual": np.array([np.nan]), "symbolic": np.array([0.0])})
    with pytest.raises(ConfigError, match="1 visual scores are not finite, first a: nan"):
        novelty(fitted("fisher"), broken)
    wide = Samples(["a"], None, {"visual": np.zeros((1, 2)), "symbolic": np.array([0.0])})
    with pytest.raises(ConfigError, match=r"visual scores have shape \(1, 2\)"):
        novelty(fitted("fisher"), wide)


@pytest.mark.parametrize("rule", [*RULES, "released"])
def test_a_score_needs_no_company(rule):
    model, test = fitted(rule), scores(6, 6, 2, {"visual": 3})
    whole = novelty(model, test)
    for row in range(12):
        alone = Samples(["x"], None, {n: v[row : row + 1] for n, v in test.arrays.items()})
        assert novelty(model, alone) == whole[row]
    none = Samples([], None, {n: v[:0] for n, v in test.arrays.items()})
    assert novelty(model, none).shape == (0,)


@pytest.mark.parametrize("rule", [*RULES, "released"])
def test_saved_and_loaded_scores_are_equal(rule, tmp_path):
    model, test = fitted(rule), scores(20, 20, 2, {"visual": 3})
    model.save(tmp_path / "fusion.safetensors")
    again = load_model(tmp_path / "fusion.safetensors", device="cpu")
    np.testing.assert_array_equal(novelty(again, test), novelty(model, test))
    assert again.record["visual"] == "patch_memory"


numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=30), st.lists(numbers, min_size=1, max_size=30))
def test_surprise_is_the_empirical_p_value_and_keeps_order(calibration, tried):
    calibration, tried = np.sort(calibration), np.sort(tried)
    found = surprise(tried, calibration)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (np.diff(found) >= 0).all()
    beyond = tried > calibration[-1]
    p = [(1 + (calibration >= score).sum()) / (len(calibration) + 1) for score in tried[~beyond]]
    np.testing.assert_allclose(np.exp(-found[~beyond]), p)
    outer = np.unique(tried[beyond])
    assert (np.diff(surprise(outer, calibration)) > 0).all()


def test_p_values_of_normal_scores_are_uniform():
    draws = np.random.default_rng(0)
    p = np.exp(-surprise(draws.normal(size=4000), np.sort(draws.normal(size=4000))))
    for level in (0.01, 0.1, 0.5, 0.9):
        assert abs((p <= level).mean() - level) < 0.03


def test_tables_are_joined_by_frame():
    visual = pl.DataFrame({"frame_id": ["b", "a"], "score": [1.0, 2.0]})
    symbolic = pl.DataFrame({"frame_id": ["a", "b", "c"], "score": [20.0, 10.0, 30.0]})
    found = paired_scores(visual, symbolic)
    assert found.ids == ["b", "a"]
    assert found.array("symbolic").tolist() == [10.0, 20.0]
    with pytest.raises(ConfigError, match=r"1 of 3 have a visual score but no symbolic one.*c"):
        paired_scores(symbolic, visual)


def test_the_last_frame_of_an_episode_is_left_out():
    frames = pl.DataFrame(
        {
            "episode_id": ["a", "a", "a", "b"],
            "position": [2, 0, 1, 0],
            "score": [9.0, 1.0, 2.0, 5.0],
        }
    )
    assert episode_scores(frames).rows() == [("a", 2.0), ("b", 5.0)]
    assert episode_scores(frames, drop_last=False).rows() == [("a", 9.0), ("b", 5.0)]


def released_frames(name: str, column: str) -> pl.DataFrame:
    """Frames by position: the two releases number the frames of episode 0 differently."""
    part = pl.col(column).str.replace(r"\.\w+$", "").str.split("/").list
    return (
        pl.read_csv(shared_path(f"novelcraft/scores/{name}.csv"))
        .select(
            part.get(0).alias("class"),
            part.get(1).cast(pl.Int64).alias("episode"),
            part.get(2).cast(pl.Int64).alias("frame"),
            pl.format("{}/{}", part.get(0), part.get(1)).alias("episode_id"),
            "score",
        )
        .with_columns((pl.col("frame").rank("ordinal").over("episode_id") - 1).alias("position"))
    )


def test_real_episodes():
    """Released scores, calibrated on every second normal episode: the fusion beats both alone."""
    visual = released_frames("episode_ae_patch", "path")
    symbolic = released_frames("episode_symbolic_per_step_k5", "name")
    both = set(visual["episode_id"]) & set(symbolic["episode_id"])
    first = pl.col("class").replace_strict(
        dict(FIRST_NOVEL_EPISODE), default=10**6, return_dtype=pl.Int64
    )
    episodes = (
        visual.filter(pl.col("episode_id").is_in(both))
        .select("episode_id", "episode", (pl.col("episode") >= first).alias("novel"))
        .unique()
        .sort("episode_id")
    )
    calibrates = ~episodes["novel"] & (episodes["episode"] % 2 == 0)
    assert (calibrates.sum(), (~calibrates & ~episodes["novel"]).sum()) == (35, 32)

    def samples(chosen: pl.Series) -> Samples:
        wanted = episodes.filter(chosen).select("episode_id")
        parts = [episode_scores(t).join(wanted, on="episode_id") for t in (visual, symbolic)]
        return paired_scores(*(part.sort("episode_id") for part in parts), on="episode_id")

    model, test = Multimodal(Configuration(rule="fisher")), samples(~calibrates)
    fit(model, samples(calibrates), samples(calibrates))
    novel = episodes.filter(~calibrates)["novel"].to_numpy()
    assert test.ids == episodes.filter(~calibrates)["episode_id"].to_list()
    alone = [roc_auc_score(novel, test.array(name)) for name in test.arrays]
    assert roc_auc_score(novel, novelty(model, test)) > max(alone) + 0.005
