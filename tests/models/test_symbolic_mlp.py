"""The autoregressive network learns the rule of a small game and notices where it is broken."""

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError
from tasks.learning.samples import NOVEL, Samples
from tasks.models import load_model
from tasks.models.symbolic_mlp import Configuration, SymbolicMlp
from tasks.novelcraft.symbols import SymbolSequences
from tests.models.synthetic import fit, novelty

TINY = Configuration(
    context=2,
    cpu_threads=1,
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


def normal(episodes: int, seed: int, context: int = 2) -> Samples:
    sequences = game(episodes, 12, seed)
    return sequences.samples(context, np.zeros(len(sequences.ids), np.int64))


def contrary() -> Samples:
    """Called known, but against the rule: the better the network, the larger the loss on it."""
    sequences = game(10, 12, 8, novel="block")
    return sequences.samples(2, np.zeros(len(sequences.ids), np.int64))


@pytest.fixture(scope="module")
def fitted() -> tuple[SymbolicMlp, pl.DataFrame]:
    torch.set_num_threads(1)
    model = SymbolicMlp(TINY)
    return model, fit(model, normal(40, 0), normal(10, 1), seed=3)


@pytest.mark.parametrize("context", [2, 5, 10])
def test_the_network_is_the_papers(context):
    paper = SymbolicMlp.resolve("paper")
    assert (paper.layers, paper.hidden, paper.dropout) == (2, 64, 0.2)
    assert (paper.choose, SymbolicMlp.resolve("small").choose) == ("validation", "fixed")
    assert (paper.layers_grid, paper.hidden_grid) == ((1, 2, 3), (16, 32, 48, 64))
    assert (paper.optimizer, paper.learning_rate, paper.epochs) == ("adam", 1e-4, 50)
    model = SymbolicMlp(paper.model_copy(update={"context": context}))
    words = [["selected_item", ["", "a"]], ["block_in_front", ["b", "c", "d"]]]
    model.record = {"scale": [1.0] * 23, "vocabulary": words}
    width = 23 + 3 + 4
    expected = (context * width + 1) * 64 + 65 * 64 + 65 * width
    assert sum(p.numel() for p in model.build()["latest"].parameters()) == expected


def test_the_shape_of_the_least_validation_loss_is_kept(tmp_path):
    grid = {"layers_grid": (1, 2), "hidden_grid": (2, 16)}
    settings = TINY.model_copy(update={"choose": "validation", "epochs": 6, **grid})
    model = SymbolicMlp(settings)
    history = fit(model, normal(40, 0), normal(10, 1), seed=3, work=tmp_path)
    assert history.columns == ["layers", "hidden", "valid_loss", "chosen"]
    assert history.select("layers", "hidden").rows() == [(1, 2), (1, 16), (2, 2), (2, 16)]
    best = history.filter(pl.col("chosen") == 1).row(0, named=True)
    assert best["valid_loss"] == history["valid_loss"].min() < history["valid_loss"].max()
    shape = {"layers": best["layers"], "hidden": best["hidden"]}
    assert model.record["chosen"] == shape and best["hidden"] == 16
    alone = SymbolicMlp(settings.model_copy(update={"choose": "fixed", **shape}))
    fit(alone, normal(40, 0), normal(10, 1), seed=3)
    assert alone.fingerprint() == model.fingerprint()
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        novelty(load_model(tmp_path / "model", device="cpu"), normal(4, 2)),
        novelty(model, normal(4, 2)),
    )


def test_choosing_a_shape_needs_validation_samples():
    model = SymbolicMlp(TINY.model_copy(update={"choose": "validation"}))
    with pytest.raises(ConfigError, match="needs known validation samples; set choose to fixed"):
        fit(model, normal(4, 0))


def test_a_shape_that_is_given_is_not_chosen():
    for changes, choose in (({}, "validation"), ({"hidden": 8}, "fixed"), ({"layers": 1}, "fixed")):
        variants = SymbolicMlp.variants("paper", changes, None, ())
        assert [SymbolicMlp.resolve("paper", v).context for v in variants] == [2, 5, 10]
        assert {SymbolicMlp.resolve("paper", v).choose for v in variants} == {choose}


def test_the_loss_of_each_variable(fitted):
    model, _ = fitted
    given_samples = normal(1, 5)
    rows = np.array([4])
    batch = torch.from_numpy(model.encode(given_samples, rows))
    with torch.no_grad():
        predicted = model.layers["best"](batch[:, :-1])[0].double().numpy()
    expected = [(predicted[i] - float(batch[0, -1, i])) ** 2 for i in range(2)]
    start = 2
    for words, name in ((given_samples.array(n)[rows][0, -1], n) for n in model.vocabulary):
        size = 1 + len(model.vocabulary[name])
        logits = predicted[start : start + size]
        entry = 1 + model.vocabulary[name].index(words)
        expected.append(np.log(np.exp(logits).sum()) - logits[entry])
        start += size
    found = model.variable_losses(given_samples)[4]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert novelty(model, given_samples)[4] == found.max()


@pytest.mark.parametrize("novel", ["count", "block"])
def test_broken_rules_score_higher(fitted, novel):
    model, _ = fitted
    known = game(20, 12, 7)
    changed = game(20, 12, 8, novel=novel)
    scores = [novelty(model, s.samples(2)) for s in (known, changed)]
    scored = known.position >= 2
    late = (changed.position >= 6) if novel == "block" else (changed.position == 6)
    both = np.r_[scores[0][scored], scores[1][late]]
    truth = np.r_[np.zeros(scored.sum()), np.ones(late.sum())]
    assert roc_auc_score(truth, both) > 0.9


def test_frames_without_a_full_context_score_zero(fitted):
    model, _ = fitted
    sequences = game(5, 12, 9)
    scores = novelty(model, sequences.samples(2))
    assert (scores[sequences.position < 2] == 0).all()
    assert (scores[sequences.position >= 2] > 0).all()


def test_a_score_needs_no_company(fitted):
    """Gathered lazily, given as plain arrays, turned round: the same frames score the same."""
    model, _ = fitted
    lazy = game(3, 12, 9).samples(2)
    whole = novelty(model, lazy)
    turned = np.random.default_rng(0).permutation(len(lazy))
    plain = Samples(
        [lazy.ids[row] for row in turned], None, {n: v[turned] for n, v in lazy.arrays.items()}
    )
    np.testing.assert_allclose(novelty(model, plain), whole[turned], rtol=1e-4, atol=1e-7)
    empty = Samples([], None, {n: v[:0] for n, v in lazy.arrays.items()})
    assert novelty(model, empty).shape == (0,)


def test_the_paper_preset_learns_too():
    model = SymbolicMlp(SymbolicMlp.resolve("paper", {"choose": "fixed"}))
    history = fit(model, normal(20, 0, context=5), normal(5, 1, context=5))
    assert history.height == 50
    assert history["valid_loss"][-1] < 0.9 * history["valid_loss"][0]


def test_the_weights_of_the_best_epoch_are_kept():
    model, valid = SymbolicMlp(TINY.model_copy(update={"epochs": 8})), contrary()
    history = fit(model, normal(10, 0), valid)
    best = history["valid_loss"].arg_min()
    assert best < 7
    losses = model.variable_losses(valid)[game(10, 12, 8).position >= 2]
    assert losses.mean() == pytest.approx(history["valid_loss"][best], rel=1e-4)
    assert model.record["weights_of_epoch"] == f"{best + 1}, least validation loss"


def test_without_validation_the_last_weights_are_kept():
    model = SymbolicMlp(TINY.model_copy(update={"epochs": 2}))
    assert fit(model, normal(3, 0)).columns == ["epoch", "rate", "loss"]
    assert model.record["weights_of_epoch"] == "2, the last"


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
    alone = fit(one, normal(5, 0), valid)
    assert fit(other, normal(5, 0), mixed).equals(alone)


def test_saved_and_loaded_scores_are_equal(fitted, tmp_path):
    model, _ = fitted
    model.save(tmp_path / "mlp.safetensors")
    again = load_model(tmp_path / "mlp.safetensors", device="cpu")
    changed = game(3, 12, 8, novel="block").samples(2)
    np.testing.assert_array_equal(novelty(again, changed), novelty(model, changed))
    assert again.vocabulary == model.vocabulary


class Killed(Exception):
    pass


@pytest.mark.parametrize("later", [0, 3])
def test_a_killed_run_ends_like_an_undisturbed_one(later, tmp_path):
    """Also what early stopping remembers, if the best epoch was just measured or long ago."""
    few = TINY.model_copy(update={"epochs": 8, "checkpoint_every": 1})
    train, valid = normal(10, 0), contrary()
    whole = SymbolicMlp(few)
    history = fit(whole, train, valid, seed=1)
    last = history["valid_loss"].arg_min() + 1 + later
    assert last < 8

    def kill(epoch: int, epochs: int, row: object) -> None:
        if epoch == last:
            raise Killed

    broken = SymbolicMlp(few)
    with pytest.raises(Killed):
        fit(broken, train, valid, seed=1, work=tmp_path, progress=kill)
    seen = []
    again = SymbolicMlp(few)
    resumed = fit(
        again,
        train,
        valid,
        seed=1,
        work=tmp_path,
        progress=lambda e, n, r: seen.append(e),
    )
    assert seen == list(range(last + 1, 9))
    assert resumed.equals(history)
    assert again.fingerprint() == whole.fingerprint()
    assert again.record == whole.record


def test_samples_of_another_layout_are_refused(fitted):
    model, _ = fitted
    with pytest.raises(ConfigError, match=r"expected \(N, 3, 2\) for context 2"):
        novelty(model, normal(1, 0, context=5))
    with pytest.raises(ConfigError, match="no training episode has more than context = 20"):
        fit(SymbolicMlp(TINY.model_copy(update={"context": 20})), normal(2, 0, context=20))


def test_several_contexts_are_a_run_each():
    def contexts(changes: dict) -> list[int]:
        made = SymbolicMlp.variants("small", changes, None, ())
        return [SymbolicMlp.resolve("small", changes).context for changes in made]

    assert contexts({}) == [2, 5, 10]
    assert contexts({"contexts": "2,5"}) == [2, 5] and contexts({"context": "7"}) == [7]
    with pytest.raises(ConfigError, match="symbolic_mlp: wrong settings: context"):
        contexts({"contexts": [0]})
