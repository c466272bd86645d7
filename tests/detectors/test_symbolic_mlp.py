"""The autoregressive network learns the rule of a small game and notices where it is broken."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError
from tasks.detectors import find_detector, load_detector
from tasks.detectors.symbolic_mlp import Configuration, SymbolicMlp, window_scores
from tasks.learning.samples import NOVEL, Samples
from tasks.novelcraft.symbols import SymbolSequences
from tasks.novelcraft.windows import cut_windows

TINY = Configuration(
    order=2,
    hidden=32,
    dropout=0.0,
    scaling="deviation",
    epochs=40,
    batch_size=32,
    learning_rate=1e-2,
)
BLOCKS = np.array(["minecraft:air", "minecraft:log", "minecraft:sand"])


def game(episodes: int, length: int, seed: int, *, novel: str = "") -> SymbolSequences:
    """Blocks in front come in a fixed cycle and a log in front is in the hands one frame later.

    `novel` breaks that from the middle of each episode on: "count" loses logs, "block" shows a
    block that was never seen.
    """
    draws = np.random.default_rng(seed)
    step = np.arange(length)
    counts, held, front = [], [], []
    for _ in range(episodes):
        place = (step + draws.integers(3)) % 3
        logs = np.r_[0, np.cumsum(place == 1)[:-1]]
        other = np.full(length, draws.integers(3))
        blocks = BLOCKS[place]
        if novel == "count":
            logs = np.where(step >= length // 2, 0, logs)
        if novel == "block":
            blocks = np.where(step >= length // 2, "minecraft:tnt", blocks)
        counts.append(np.column_stack([logs, other]))
        held.append(np.where(logs > 0, "minecraft:log", ""))
        front.append(blocks)
    return SymbolSequences(
        tuple(f"{novel}{seed}/{e}/{p}" for e in range(episodes) for p in range(length)),
        tuple(f"{novel}{seed}/{e}" for e in range(episodes)),
        np.arange(episodes + 1) * length,
        np.concatenate(counts).astype(np.float32),
        ("log", "other"),
        {"selected_item": np.concatenate(held), "block_in_front": np.concatenate(front)},
    )


def normal(episodes: int, seed: int, order: int = 2) -> Samples:
    sequences = game(episodes, 12, seed)
    return sequences.samples(order, np.zeros(len(sequences.ids), np.int64))


def contrary() -> Samples:
    """Called known, but against the rule: the better the network, the larger the loss on it."""
    sequences = game(10, 12, 8, novel="block")
    return sequences.samples(2, np.zeros(len(sequences.ids), np.int64))


@pytest.fixture(scope="module")
def fitted() -> tuple[SymbolicMlp, pl.DataFrame]:
    torch.set_num_threads(1)
    detector = SymbolicMlp(TINY)
    return detector, detector.fit(normal(40, 0), normal(10, 1), seed=3, device="cpu")


@pytest.mark.parametrize("order", [2, 5, 10])
def test_the_network_is_the_papers(order):
    paper = find_detector("symbolic_mlp").resolve("paper")
    assert (paper.layers, paper.hidden, paper.dropout) == (2, 64, 0.2)
    assert (paper.optimizer, paper.learning_rate, paper.epochs) == ("adam", 1e-4, 50)
    detector = SymbolicMlp(paper.model_copy(update={"order": order}))
    detector.scale = np.ones(23, np.float32)
    detector.vocabulary = {"selected_item": ("", "a"), "block_in_front": ("b", "c", "d")}
    width = 23 + 3 + 4
    expected = (order * width + 1) * 64 + 65 * 64 + 65 * width
    assert sum(p.numel() for p in detector._build().parameters()) == expected


def test_the_loss_of_each_variable(fitted):
    detector, _ = fitted
    given_samples = normal(1, 5)
    rows = np.array([4])
    batch = torch.from_numpy(detector._encode(given_samples, rows))
    with torch.no_grad():
        predicted = detector.network(batch[:, :-1])[0].double().numpy()
    expected = [(predicted[i] - float(batch[0, -1, i])) ** 2 for i in range(2)]
    start = 2
    for words, name in ((given_samples.array(n)[rows][0, -1], n) for n in detector.vocabulary):
        size = 1 + len(detector.vocabulary[name])
        logits = predicted[start : start + size]
        entry = 1 + detector.vocabulary[name].index(words)
        expected.append(np.log(np.exp(logits).sum()) - logits[entry])
        start += size
    found = detector.variable_losses(given_samples)[4]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert detector.score(given_samples)[4] == found.max()


@pytest.mark.parametrize("novel", ["count", "block"])
def test_broken_rules_score_higher(fitted, novel):
    detector, _ = fitted
    known = game(20, 12, 7)
    changed = game(20, 12, 8, novel=novel)
    scores = [detector.score(s.samples(2)) for s in (known, changed)]
    scored = known.position >= 2
    late = (changed.position >= 6) if novel == "block" else (changed.position == 6)
    both = np.r_[scores[0][scored], scores[1][late]]
    truth = np.r_[np.zeros(scored.sum()), np.ones(late.sum())]
    assert roc_auc_score(truth, both) > 0.9


def test_frames_without_a_full_context_score_zero(fitted):
    detector, _ = fitted
    sequences = game(5, 12, 9)
    scores = detector.score(sequences.samples(2))
    assert (scores[sequences.position < 2] == 0).all()
    assert (scores[sequences.position >= 2] > 0).all()


def test_a_score_needs_no_company(fitted):
    """Gathered lazily, given as plain arrays, turned round: the same frames score the same."""
    detector, _ = fitted
    lazy = game(3, 12, 9).samples(2)
    whole = detector.score(lazy)
    turned = np.random.default_rng(0).permutation(len(lazy))
    plain = Samples(
        [lazy.ids[row] for row in turned], None, {n: v[turned] for n, v in lazy.arrays.items()}
    )
    np.testing.assert_allclose(detector.score(plain), whole[turned], rtol=1e-4, atol=1e-7)
    empty = Samples([], None, {n: v[:0] for n, v in lazy.arrays.items()})
    assert detector.score(empty).shape == (0,)


def test_the_paper_preset_learns_too():
    detector = SymbolicMlp("paper")
    history = detector.fit(normal(20, 0, order=5), normal(5, 1, order=5), device="cpu")
    assert history.height == 50
    assert history["valid_loss"][-1] < 0.9 * history["valid_loss"][0]


def test_the_weights_of_the_best_epoch_are_kept():
    detector, valid = SymbolicMlp(TINY.model_copy(update={"epochs": 8})), contrary()
    history = detector.fit(normal(10, 0), valid, device="cpu")
    best = history["valid_loss"].arg_min()
    assert best < 7
    losses = detector.variable_losses(valid)[game(10, 12, 8).position >= 2]
    assert losses.mean() == pytest.approx(history["valid_loss"][best], rel=1e-4)
    assert detector.record["weights_of_epoch"] == f"{best + 1}, least validation loss"


def test_without_validation_the_last_weights_are_kept():
    detector = SymbolicMlp(TINY.model_copy(update={"epochs": 2}))
    assert detector.fit(normal(3, 0), device="cpu").columns == ["epoch", "loss"]
    assert detector.record["weights_of_epoch"] == "2, the last"


def test_novel_validation_frames_are_not_measured():
    valid = normal(10, 1)
    more = game(5, 12, 8, novel="block").samples(2)
    mixed = Samples(
        [*valid.ids, *more.ids],
        np.r_[valid.labels, np.full(len(more), NOVEL)],
        {n: np.concatenate([valid.array(n)[:], more.array(n)[:]]) for n in valid.arrays},
    )
    few = TINY.model_copy(update={"epochs": 2})
    one, other = SymbolicMlp(few), SymbolicMlp(few)
    alone = one.fit(normal(5, 0), valid, device="cpu")
    assert other.fit(normal(5, 0), mixed, device="cpu").equals(alone)


def test_saved_and_loaded_scores_are_equal(fitted, tmp_path):
    detector, _ = fitted
    detector.save(tmp_path / "mlp.safetensors")
    again = load_detector(tmp_path / "mlp.safetensors", device="cpu")
    changed = game(3, 12, 8, novel="block").samples(2)
    np.testing.assert_array_equal(again.score(changed), detector.score(changed))
    assert again.vocabulary == detector.vocabulary


class Killed(Exception):
    pass


@pytest.mark.parametrize("later", [0, 3])
def test_a_killed_run_ends_like_an_undisturbed_one(later, tmp_path):
    """Also what early stopping remembers, if the best epoch was just measured or long ago."""
    few = TINY.model_copy(update={"epochs": 8, "checkpoint_every": 1})
    train, valid = normal(10, 0), contrary()
    whole = SymbolicMlp(few)
    history = whole.fit(train, valid, seed=1, device="cpu")
    last = history["valid_loss"].arg_min() + 1 + later
    assert last < 8

    def kill(epoch: int, epochs: int, row: object) -> None:
        if epoch == last:
            raise Killed

    broken = SymbolicMlp(few)
    with pytest.raises(Killed):
        broken.fit(train, valid, seed=1, device="cpu", checkpoints=tmp_path, progress=kill)
    seen = []
    again = SymbolicMlp(few)
    resumed = again.fit(
        train,
        valid,
        seed=1,
        device="cpu",
        checkpoints=tmp_path,
        progress=lambda e, n, r: seen.append(e),
    )
    assert seen == list(range(last + 1, 9))
    assert resumed.equals(history)
    assert again.fingerprint() == whole.fingerprint()
    assert again.record == whole.record


def test_samples_of_another_layout_are_refused(fitted):
    detector, _ = fitted
    with pytest.raises(ConfigError, match=r"expected \(N, 3, 2\) for order 2"):
        detector.score(normal(1, 0, order=5))
    with pytest.raises(ConfigError, match="no training episode has more than order = 20"):
        SymbolicMlp(TINY.model_copy(update={"order": 20})).fit(normal(2, 0, order=20), device="cpu")


def scored_frames(lengths: list[int], seed: int) -> pl.DataFrame:
    scores = np.random.default_rng(seed).random(sum(lengths))
    return pl.DataFrame(
        {
            "class": "fence",
            "episode": np.repeat(np.arange(len(lengths)), lengths),
            "frame": np.concatenate([np.arange(n) for n in lengths]),
            "novel": False,
            "score": scores,
        }
    ).with_columns(
        pl.format("fence/{}", "episode").alias("episode_id"), pl.col("frame").alias("position")
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from(["non_overlapping", "stride_1"]),
    st.integers(1, 10),
    st.integers(0, 99),
)
def test_window_scores_are_the_largest_of_their_frames(lengths, mode, context, seed):
    frames = scored_frames(lengths, seed)
    windows = cut_windows(frames, context, mode)
    found = window_scores(frames.sample(fraction=1, shuffle=True, seed=seed), windows)
    assert found.drop("score").equals(windows)
    for row in found.iter_rows(named=True):
        own = frames.filter(pl.col("episode_id") == row["episode_id"])["score"]
        assert row["score"] == own[row["start"] : row["stop"]].max()


def test_windows_without_scores_are_refused():
    frames = scored_frames([20, 20], 0)
    windows = cut_windows(frames, 2, "non_overlapping")
    with pytest.raises(ConfigError, match="2 windows have frames without a score, first 1 to 11"):
        window_scores(frames.filter(pl.col("episode") == 0), windows)
    with pytest.raises(ConfigError, match="episode fence/0 has 19 scores up to position 19"):
        window_scores(frames.filter((pl.col("episode") == 1) | (pl.col("frame") != 4)), windows)


def test_several_orders_are_a_run_each():
    def orders(changes: dict) -> list[int]:
        return [made.order for made in SymbolicMlp.variants("small", changes)]

    assert orders({}) == [2, 5, 10]
    assert orders({"orders": "2,5"}) == [2, 5] and orders({"order": "7"}) == [7]
    one, other = SymbolicMlp.variants("small", {"orders": [2, 3]})
    assert {n for n, v in one.model_dump().items() if v != other.model_dump()[n]} == {"order"}
    with pytest.raises(ConfigError, match="symbolic_mlp: wrong settings: order"):
        orders({"orders": [0]})
