"""Agents of every predictor: detection, labels told, discovered classes, columns, saved state."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.errors import ConfigError, SourceError
from tasks.condda.agent import Agent, FeatureLookup, TestInfo, Training, training_examples
from tasks.condda.characterization import characterize, match_clusters
from tasks.condda.metrics import Columns
from tasks.predictors import predictor_names
from tests.condda import make_agent

KNOWN, NOVEL, DIMENSIONS, ROUND = 6, 3, 16, 25


@dataclass(frozen=True)
class Blobs:
    """Gaussian classes, the last `NOVEL` of them without examples, and a stream of rows."""

    training: Training
    features: np.ndarray
    classes: np.ndarray
    ids: tuple[str, ...]
    start: int

    def rounds(self) -> Iterator[tuple[np.ndarray, list[str]]]:
        for first in range(0, len(self.ids), ROUND):
            yield self.features[first : first + ROUND], list(self.ids[first : first + ROUND])

    @property
    def novel(self) -> np.ndarray:
        return self.classes >= KNOWN

    @property
    def labels(self) -> np.ndarray:
        """As in domain novelty: known 1..K, novel -1, -2, ..."""
        return np.where(self.novel, KNOWN - 1 - self.classes, self.classes + 1)


def blobs(
    seed: int,
    *,
    spread: float = 2.0,
    before: int = 100,
    after: int = 200,
    each: int = 40,
    width: int = DIMENSIONS,
) -> Blobs:
    rng = np.random.default_rng([seed, 7])
    means = spread * rng.standard_normal((KNOWN + NOVEL, width))
    labels = np.repeat(np.arange(KNOWN), each)
    classes = rng.integers(0, KNOWN, before + after)
    novel = (np.arange(len(classes)) >= before) & (rng.random(len(classes)) < 0.5)
    classes[novel] = KNOWN + rng.integers(0, NOVEL, novel.sum())
    noise = rng.standard_normal((len(labels) + len(classes), width))
    training = Training(
        sample_ids=[f"train{row:05d}" for row in range(len(labels))],
        features=means[labels] + noise[: len(labels)],
        labels=labels,
        known=tuple(f"class{number}" for number in range(KNOWN)),
    )
    ids = tuple(f"row{row:05d}" for row in range(len(classes)))
    return Blobs(training, means[classes] + noise[len(labels) :], classes, ids, before)


def info(blob: Blobs | None = None, **options) -> TestInfo:
    values = {"known_classes": KNOWN, "max_novel_classes": 5, "feedback_max_ids": 5, **options}
    return TestInfo("test", values.pop("protocol", "CONDDA"), **values)


def fitted(name: str, blob: Blobs, **settings) -> Agent:
    agent = make_agent(name, **settings)
    agent.fit(blob.training)
    return agent


def led_through(
    agent: Agent, blob: Blobs, test: TestInfo | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """P(world changed) of all rows, and the characterization of each round."""
    agent.start(test or info())
    chances, vectors = [], []
    for features, ids in blob.rounds():
        chances.append(agent.detect(features, ids))
        vectors.append(agent.characterize(features, ids))
    return np.concatenate(chances), vectors


def choices(vectors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([block.argmax(1) for block in vectors])


@pytest.mark.parametrize("scaling", ["none", "robust", "whiten"])
@pytest.mark.parametrize("score", ["nearest", "mahalanobis", "cosine"])
def test_known_rows_are_called_unknown_at_the_set_rate_and_novel_ones_are_found(
    score: str, scaling: str
) -> None:
    false, found, right = [], [], []
    for seed in range(2):
        blob = blobs(seed, before=300, after=200)
        settings = {"score": score, "scaling": scaling, "accepted_error": 0.1}
        agent = fitted("threshold", blob, seed=seed, **settings)
        agent.start(info())
        columns = []
        for part in blob.rounds():
            agent.detect(*part)
            columns.append(agent.classify(*part).argmax(1))
        chosen = np.concatenate(columns)
        false.append(chosen[~blob.novel] == 0)
        found.append(chosen[blob.novel] == 0)
        right.append((chosen == blob.classes + 1)[~blob.novel])
    assert 0.04 < np.concatenate(false).mean() < 0.17
    assert np.concatenate(found).mean() > 0.8
    assert np.concatenate(right).mean() > 0.8


def easy(name: str, seed: int) -> Blobs:
    """Classes far apart; a density needs more examples than dimensions."""
    return blobs(seed, spread=4.0, each=80, width=4 if name == "gmm_finch" else DIMENSIONS)


@pytest.mark.parametrize("name", predictor_names())
def test_every_predictor_is_an_agent(name: str) -> None:
    """A change is seen after it came, vectors are distributions, columns only grow, in any test."""
    blob = easy(name, 2)
    agent = fitted(name, blob)
    chances, vectors = led_through(agent, blob)
    assert chances[-1] > 0.9 and int((chances > 0.5).argmax()) >= int(blob.novel.argmax())
    widths = [block.shape[1] for block in vectors]
    assert widths == sorted(widths) and widths[0] >= 1 + KNOWN and widths[-1] <= 1 + KNOWN + 5
    for block in vectors:
        assert ((block >= 0) & (block <= 1)).all()
        np.testing.assert_allclose(block.sum(1), 1, rtol=1e-5)
    chosen = choices(vectors)
    assert (chosen == blob.classes + 1)[~blob.novel].mean() > 0.75
    new = (chosen == 0) | (chosen > KNOWN)
    assert new[blob.novel & (np.arange(len(new)) >= 200)].mean() > 0.6
    again = led_through(agent, blob)
    assert np.array_equal(chances, again[0])
    assert all(np.array_equal(*pair) for pair in zip(vectors, again[1], strict=True))


@pytest.mark.parametrize("name", predictor_names())
def test_a_saved_agent_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    blob = easy(name, 3)
    training = replace(blob.training, groups=np.arange(len(blob.training.labels)) // 3)
    # As in files of features.
    blob = replace(blob, training=training, features=blob.features.astype(np.float32))
    features = FeatureLookup(blob.ids, blob.features)
    place = dict(zip(blob.ids, blob.labels.tolist(), strict=True))

    def led(restart: int | None) -> list[np.ndarray]:
        agent, answers = fitted(name, blob), []
        agent.start(info(protocol="OND"))
        for number, (rows, ids) in enumerate(blob.rounds()):
            if number == restart:
                agent = fitted(name, blob)
                agent.start(info(protocol="OND"))
                assert agent.load(tmp_path / "agent", features) == number
            answers += [agent.detect(rows, ids), agent.classify(rows, ids)]
            wanted = agent.wanted(rows, ids)
            agent.learn({i: place[i] - 1 if place[i] > 0 else place[i] for i in wanted})
            agent.save(tmp_path / "agent", number + 1)
        assert agent.told and agent.predictor.known != agent.fitted.known
        return [*answers, agent.characterize_test()]

    for one, two in zip(led(None), led(8), strict=True):
        assert np.array_equal(one, two)


def test_detection_comes_after_the_change_and_soon() -> None:
    delays = []
    for seed in range(20):
        blob = blobs(seed)
        chances, _ = led_through(fitted("threshold", blob, seed=seed), blob)
        assert chances[-1] > 0.9
        delays.append(int((chances > 0.5).argmax()) - int(blob.novel.argmax()))
    assert sum(delay < 0 for delay in delays) <= 3
    assert np.median(delays) <= 15


def test_without_novelty_the_alarm_stays_off() -> None:
    alarms = 0
    for seed in range(60):
        blob = blobs(seed, before=200, after=0)
        chances, _ = led_through(fitted("threshold", blob, seed=seed), blob)
        alarms += chances[-1] > 0.5
    assert alarms <= 7  # 5 % of 60, and 2.4 standard deviations
    quiet = blobs(0, before=200, after=0)
    chances, vectors = led_through(fitted("clustering", quiet), quiet)
    assert chances[-1] < 0.5 and vectors[-1].shape[1] == 1 + KNOWN


def test_the_red_light_is_taken_at_its_word() -> None:
    blob = blobs(3)
    agent = fitted("clustering", blob)
    chances, vectors = led_through(agent, blob, info(red_light=blob.ids[blob.start]))
    assert chances.tolist() == [float(row >= blob.start) for row in range(len(blob.ids))]
    chosen = choices(vectors)
    assert ((chosen >= 1) & (chosen <= KNOWN))[: blob.start].all()
    assert (chosen[blob.start :] == 0).any() or (chosen[blob.start :] > KNOWN).any()


def test_the_order_of_examples_does_not_matter() -> None:
    blob = blobs(6)
    order = np.random.default_rng(1).permutation(len(blob.training.labels))
    shuffled = Training(
        [blob.training.sample_ids[row] for row in order],
        blob.training.features[order],
        blob.training.labels[order],
        blob.training.known,
    )
    agent = make_agent("clustering")
    agent.fit(shuffled)
    chances, vectors = led_through(agent, blob)
    expected = led_through(fitted("clustering", blob), blob)
    assert np.array_equal(chances, expected[0])
    assert all(np.array_equal(*pair) for pair in zip(vectors, expected[1], strict=True))


def in_groups(seed: int, groups: np.ndarray | None = None) -> Blobs:
    """Nothing novel comes; rows and examples of each eight have a shift of their own."""
    blob = blobs(seed, before=60, after=0, each=48)
    draws, training = np.random.default_rng([seed, 11]), blob.training
    of_examples = np.arange(len(training.labels)) // 8
    shifts = 3 * draws.standard_normal((of_examples.max() + 1, DIMENSIONS))
    examples = training.features + shifts[of_examples]
    rows = blob.features + 3 * draws.standard_normal((60, DIMENSIONS))
    known = of_examples if groups is None else groups
    return replace(blob, training=replace(training, features=examples, groups=known), features=rows)


@pytest.mark.parametrize("name", ["threshold", "evm"])
def test_groups_of_examples_keep_the_alarm_off_where_rows_are_of_other_groups(name: str) -> None:
    alarms = []
    for seed in range(10 if name == "threshold" else 3):
        ways = []
        for by_group in (True, False):
            agent = fitted(name, in_groups(seed), seed=seed, agent={"by_group": by_group})
            ways.append(led_through(agent, in_groups(seed))[0][-1] > 0.5)
        alarms.append(ways)
    by_group, by_row = np.mean(alarms, 0)
    assert by_group <= 0.1 and by_row >= 0.8


@pytest.mark.parametrize("name", predictor_names())
def test_an_agent_without_groups_is_the_same_to_the_bit(name: str) -> None:
    """Groups of one example and none at all are no groups; and the setting turns them off."""
    blob = easy(name, 2)
    size = len(blob.training.labels)
    ways = [(None, True), (np.full(size, -1), True), (np.arange(size), True),
            (np.arange(size) // 4, False)]  # fmt: skip
    results = []
    for groups, by_group in ways:
        agent = make_agent(name, agent={"by_group": by_group})
        agent.fit(replace(blob.training, groups=groups))
        results.append((agent.calibration, agent.fitted.novelty(blob.features)))
    for other in results[1:]:
        assert all(np.array_equal(*pair) for pair in zip(results[0], other, strict=True))


def test_discovered_classes_match_the_novel_ones() -> None:
    """Hungarian accuracy over novel rows: of the test's second half, and of all after novelty."""
    late, post, used = [], [], []
    for seed in range(6):
        blob = blobs(seed)
        test = info(max_novel_classes=None)
        _, vectors = led_through(fitted("clustering", blob, seed=seed), blob, test)
        columns = Columns(KNOWN, "first")
        measures = characterize(vectors, blob.labels, blob.novel, columns)
        value = dict(measures.filter(part="post").select("metric", "value").rows())
        post.append(value["discovery_accuracy"])
        used.append(value["clusters_used"])
        chosen = choices(vectors)
        matched = match_clusters(chosen, blob.labels, columns, vectors[-1].shape[1])
        rows = blob.novel & (np.arange(len(chosen)) >= 200)
        late.append(np.mean([matched[label] == c for label, c in
                             zip(blob.labels[rows], chosen[rows], strict=True)]))  # fmt: skip
    assert np.mean(late) > 0.9
    assert np.mean(post) > 0.8
    # Few rows that are far from all others are a class of their own while few are unknown.
    assert 3 <= np.mean(used) <= 5


def test_columns_keep_their_meaning() -> None:
    """Clustered rows of a novel class are in one column in all rounds, and no class shares it.

    Seed 1 has two novel classes that are closer than any two known ones: one column at first.
    """
    for seed in range(4):
        blob = blobs(seed, after=300)
        test = info(max_novel_classes=None)
        _, vectors = led_through(fitted("clustering", blob, seed=seed), blob, test)
        widths = [block.shape[1] for block in vectors]
        assert widths == sorted(widths)
        chosen = choices(vectors)
        own = [
            np.bincount(chosen[(blob.classes == label) & (chosen > KNOWN)])
            for label in range(KNOWN, KNOWN + NOVEL)
        ]
        assert len({int(counts.argmax()) for counts in own}) == NOVEL
        share = sum(counts.max() for counts in own) / sum(counts.sum() for counts in own)
        assert share > (0.85 if seed == 1 else 0.95)


def test_no_more_columns_than_allowed() -> None:
    blob = blobs(1)
    _, vectors = led_through(fitted("clustering", blob), blob, info(max_novel_classes=2))
    assert max(block.shape[1] for block in vectors) == 1 + KNOWN + 2
    _, vectors = led_through(fitted("clustering", blob), blob, info(max_novel_classes=0))
    assert {block.shape[1] for block in vectors} == {1 + KNOWN}


def classified(agent: Agent, blob: Blobs, *, told: bool) -> np.ndarray:
    agent.start(info(protocol="OND"))
    columns = []
    place = dict(zip(blob.ids, blob.labels.tolist(), strict=True))
    for features, ids in blob.rounds():
        agent.detect(features, ids)
        columns.append(agent.classify(features, ids).argmax(1))
        wanted = agent.wanted(features, ids)
        assert len(wanted) <= 5 and set(wanted) <= set(ids)
        if told:
            agent.learn({i: place[i] - 1 if place[i] > 0 else place[i] for i in wanted})
    return np.concatenate(columns)


def test_labels_told_make_the_answers_better() -> None:
    """Novel classes close to known ones: 5 labels a round against none."""
    gains = []
    for seed in range(8):
        blob = blobs(seed, spread=1.1, after=400)
        truth = np.where(blob.novel, 0, blob.classes + 1)
        agent = fitted("threshold", blob, seed=seed)
        with_labels, without = (classified(agent, blob, told=t) == truth for t in (True, False))
        gains.append(with_labels[300:].mean() - without[300:].mean())
    assert np.mean(gains) > 0.05
    assert np.mean(np.array(gains) > 0) >= 0.75


def test_clusters_of_a_whole_ond_test() -> None:
    blob = blobs(2)
    agent = fitted("clustering", blob)
    classified(agent, blob, told=True)
    clusters = agent.characterize_test()
    assert clusters is not None and clusters.shape[0] == len(blob.ids)
    chosen = clusters.argmax(1)
    assert (chosen[: blob.start] == 0).all()
    assert (chosen[~blob.novel] == 0).mean() > 0.85
    named = [np.bincount(chosen[blob.classes == KNOWN + k]).argmax() for k in range(NOVEL)]
    assert len(set(named)) == NOVEL and min(named) > 0
    agent = fitted("threshold", blob)
    classified(agent, blob, told=False)
    assert agent.characterize_test() is None


def test_a_known_class_without_examples_has_an_empty_column() -> None:
    blob = blobs(0)
    training = blob.training
    agent = make_agent("clustering")
    agent.fit(Training(training.sample_ids, training.features, training.labels,
                       (*training.known, "never seen")))  # fmt: skip
    agent.start(info(known_classes=KNOWN + 1))
    agent.detect(blob.features, blob.ids)
    vectors = agent.classify(blob.features, blob.ids)
    assert vectors.shape[1] == KNOWN + 2 and (vectors[:, -1] == 0).all()


def test_misuse_is_a_sentence() -> None:
    blob = blobs(0)
    with pytest.raises(ConfigError, match="is not fitted"):
        make_agent("threshold").start(info())
    with pytest.raises(ConfigError, match="240 samples are held out, accepted_error"):
        fitted("threshold", blob, accepted_error=0.001)
    with pytest.raises(ConfigError, match="test test has 5 known classes"):
        fitted("threshold", blob).start(info(known_classes=5))
    for wrong, said in (
        ({"score": "nonsense"}, "no score 'nonsense'"),
        ({"score": "msp"}, "score msp needs logits"),
        ({"score": "nearest", "score_settings": {"depth": 1}}, "depth is not a setting"),
    ):
        with pytest.raises(ConfigError, match=said):
            fitted("threshold", blob, **wrong)
    agent = fitted("threshold", blob)
    agent.start(info())
    with pytest.raises(ConfigError, match="instances that it has seen"):
        agent.learn({"x": 0})


def test_features_and_examples_come_from_tables() -> None:
    labelled = pl.DataFrame(
        {
            "sample_id": ["s3", "s1", "s2", "s4"],
            "class": ["b", "a", "n", "a"],
            "split": ["train", "train", "test", "test"],
            "role": ["known", "known", "novel", "known"],
        }
    )
    table = pl.DataFrame(
        {"sample_id": ["s1", "s2", "s3"], "embedding": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
        schema={"sample_id": pl.String, "embedding": pl.Array(pl.Float32, 2)},
    )
    features = FeatureLookup.of_table(table)
    training = training_examples(labelled, features)
    assert training.known == ("a", "b")
    assert training.labels.tolist() == [1, 0]
    assert training.features.tolist() == [[5.0, 6.0], [1.0, 2.0]]
    listed = FeatureLookup.of_table(table.cast({"embedding": pl.List(pl.Float32)}))
    assert listed.of(["s2"]).tolist() == [[3.0, 4.0]]
    with pytest.raises(SourceError, match="sample 's4' has no feature vector"):
        features.of(["s1", "s4"])
    with pytest.raises(SourceError, match="two vectors"):
        FeatureLookup.of_table(pl.concat([table, table]))
