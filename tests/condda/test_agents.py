"""The agents: false alarms at the set rate, detection, labels told, discovered classes, columns."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, SourceError
from tasks.condda.agents import agent_names, find_agent, make_agent
from tasks.condda.agents.base import Agent, FeatureLookup, TestInfo, Training, training_examples
from tasks.condda.agents.clustering import ClusteringAgent, Merger
from tasks.condda.agents.threshold import ChangeTest, ThresholdSettings
from tasks.condda.characterization import characterize, match_clusters
from tasks.condda.metrics import Columns

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
    seed: int, *, spread: float = 2.0, before: int = 100, after: int = 200, each: int = 40
) -> Blobs:
    rng = np.random.default_rng([seed, 7])
    means = spread * rng.standard_normal((KNOWN + NOVEL, DIMENSIONS))
    labels = np.repeat(np.arange(KNOWN), each)
    classes = rng.integers(0, KNOWN, before + after)
    novel = (np.arange(len(classes)) >= before) & (rng.random(len(classes)) < 0.5)
    classes[novel] = KNOWN + rng.integers(0, NOVEL, novel.sum())
    noise = rng.standard_normal((len(labels) + len(classes), DIMENSIONS))
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
    agent = make_agent(name, settings)
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


def test_agents_are_found_by_their_files() -> None:
    assert agent_names() == ("clustering", "threshold")
    assert find_agent("clustering") is ClusteringAgent
    assert make_agent("threshold").detector == "threshold-1"
    with pytest.raises(ConfigError, match="no agent 'x'; there are: clustering, threshold"):
        make_agent("x")
    with pytest.raises(ConfigError, match="novel_shares"):
        make_agent("threshold", {"novel_shares": [0.5, 1.0]})


@pytest.mark.parametrize("held_out", [40, 400])
def test_the_running_test_raises_false_alarms_no_more_often_than_set(held_out: int) -> None:
    """Bound by theory for any number of held-out samples: at most 10 %, here of 600 streams."""
    settings = ThresholdSettings(test_false_alarms=0.1)
    alarms = 0
    for seed in range(600):
        rng = np.random.default_rng(seed)
        change = ChangeTest(rng.standard_normal(held_out), settings)
        alarms += change.update(rng.standard_normal(400))[-1] > 0.5
    # 3.3 standard deviations above the bound; without the bound being kept it is far above.
    assert alarms / 600 <= 0.14


def test_the_running_test_detects_a_change_soon() -> None:
    delays = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        change = ChangeTest(rng.standard_normal(100), ThresholdSettings())
        scores = rng.standard_normal(300)
        scores[200:] += 5 * (rng.random(100) < 0.5)
        chances = change.update(scores)
        assert chances[-1] > 0.99
        delays.append(int((chances > 0.5).argmax()) - 200)
    assert np.median(delays) <= 20
    assert sum(delay < 0 for delay in delays) <= 12


@given(
    scores=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    held_out=st.lists(st.integers(0, 9), min_size=1, max_size=30),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_running_test_is_monotone_and_independent_of_rounds(
    scores: list[int], cuts: list[int], held_out: list[int]
) -> None:
    rows = np.array(scores, dtype=float)
    settings = ThresholdSettings()
    whole = ChangeTest(np.array(held_out, float), settings).update(rows)
    assert (np.diff(whole) >= 0).all() and ((whole > 0) & (whole < 1)).all()
    parts = ChangeTest(np.array(held_out, float), settings)
    split = np.concatenate([parts.update(part) for part in np.split(rows, sorted(cuts))])
    np.testing.assert_allclose(split, whole, rtol=1e-9)
    # A row that is less novel than all others is never more evidence than one that is more.
    lower = ChangeTest(np.array(held_out, float), settings).update(np.append(rows, -1.0))[-1]
    higher = ChangeTest(np.array(held_out, float), settings).update(np.append(rows, 10.0))[-1]
    assert lower <= higher


def test_p_values_by_hand() -> None:
    change = ChangeTest(np.array([1.0, 2.0, 3.0]), ThresholdSettings())
    # Among 3: one is as high as 3; among 4 (1, 2, 3, 3): none above 4; among 5: all five.
    assert change._p_values(np.array([3.0, 4.0, 0.0])).tolist() == [2 / 4, 1 / 5, 6 / 6]


@pytest.mark.parametrize("scorer", ["nearest", "evm", "ann"])
def test_known_rows_are_called_unknown_at_the_set_rate_and_novel_ones_are_found(
    scorer: str,
) -> None:
    false, found, right = [], [], []
    for seed in range(2):
        blob = blobs(seed, before=300, after=200)
        agent = fitted("threshold", blob, scorer=scorer, row_false_alarms=0.1, seed=seed)
        agent.start(info())
        columns = np.concatenate([agent.classify(*part).argmax(1) for part in blob.rounds()])
        false.append(columns[~blob.novel] == 0)
        found.append(columns[blob.novel] == 0)
        right.append((columns == blob.classes + 1)[~blob.novel])
    assert 0.04 < np.concatenate(false).mean() < 0.17
    assert np.concatenate(found).mean() > 0.8
    assert np.concatenate(right).mean() > 0.8


def test_a_density_scores_what_it_has_not_seen() -> None:
    """GMM-FINCH needs more examples than dimensions: 4 of the 16 here."""
    blob = blobs(0, each=80)
    few = Training(
        blob.training.sample_ids,
        blob.training.features[:, :4],
        blob.training.labels,
        blob.training.known,
    )
    agent = make_agent("threshold", {"scorer": "gmm_finch", "row_false_alarms": 0.1})
    agent.fit(few)
    agent.start(info())
    far = agent.classify(np.full((1, 4), 30.0), ["far"])
    assert far[0].argmax() == 0
    own = np.concatenate([few.features[few.labels == k].mean(0)[None] for k in range(KNOWN)])
    near = agent.classify(own, [f"near{k}" for k in range(KNOWN)])
    assert (near.argmax(1) == np.arange(KNOWN) + 1).mean() >= 5 / 6


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


@pytest.mark.parametrize("name", ["threshold", "clustering"])
def test_vectors_are_distributions_and_tests_do_not_touch_each_other(name: str) -> None:
    blob = blobs(5)
    agent = fitted(name, blob)
    first = led_through(agent, blob)
    again = led_through(agent, blob)
    fresh = led_through(fitted(name, blob), blob)
    for other in (again, fresh):
        assert np.array_equal(first[0], other[0])
        assert all(np.array_equal(*pair) for pair in zip(first[1], other[1], strict=True))
    for block in first[1]:
        assert ((block >= 0) & (block <= 1)).all()
        np.testing.assert_allclose(block.sum(1), 1)


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


def test_discovered_classes_match_the_novel_ones() -> None:
    """Hungarian accuracy over novel rows: of the test's second half, and of all after novelty."""
    late, post, used = [], [], []
    for seed in range(6):
        blob = blobs(seed)
        _, vectors = led_through(fitted("clustering", blob, seed=seed), blob)
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
    assert 3 <= np.mean(used) <= 4


def test_columns_keep_their_meaning() -> None:
    """Clustered rows of a novel class are in one column in all rounds, and no class shares it.

    Seed 1 has two novel classes that are closer than any two known ones: one column at first.
    """
    for seed in range(4):
        blob = blobs(seed, after=300)
        _, vectors = led_through(fitted("clustering", blob, seed=seed), blob)
        widths = [block.shape[1] for block in vectors]
        assert widths == sorted(widths) and widths[-1] <= 1 + KNOWN + 5
        chosen = choices(vectors)
        own = [
            np.bincount(chosen[(blob.classes == label) & (chosen > KNOWN)])
            for label in range(KNOWN, KNOWN + NOVEL)
        ]
        assert len({int(counts.argmax()) for counts in own}) == NOVEL
        share = sum(counts.max() for counts in own) / sum(counts.sum() for counts in own)
        assert share > (0.85 if seed == 1 else 0.99)


def test_no_more_columns_than_allowed() -> None:
    blob = blobs(1)
    _, vectors = led_through(fitted("clustering", blob), blob, info(max_novel_classes=2))
    assert max(block.shape[1] for block in vectors) == 1 + KNOWN + 2
    _, vectors = led_through(fitted("clustering", blob), blob, info(max_novel_classes=0))
    assert {block.shape[1] for block in vectors} == {1 + KNOWN}


def assigned(agent: ClusteringAgent, clusters: list[int]) -> list[int]:
    agent.serials = np.arange(len(clusters))
    agent.pool = np.zeros((len(clusters), DIMENSIONS))
    return agent._assign(np.array(clusters)).tolist()


def test_columns_through_growth_split_merge_and_return() -> None:
    agent = fitted("clustering", blobs(0), min_cluster=2, min_share=0.0)
    assert isinstance(agent, ClusteringAgent)
    agent.start(info(max_novel_classes=3))
    assert assigned(agent, [0, 0, 0, 1, 1, 2]) == [0, 0, 0, 1, 1, -1]
    # Numbered the other way round, and grown: the same columns; a class of its own is appended.
    assert assigned(agent, [1, 1, 1, 0, 0, 2, 1, 2]) == [0, 0, 0, 1, 1, 2, 0, 2]
    # Merged: the column of the larger part goes on, the other is empty.
    assert assigned(agent, [0, 0, 0, 0, 0, 1, 0, 1]) == [0, 0, 0, 0, 0, 2, 0, 2]
    assert [centroid is None for centroid in agent.centroids] == [False, True, False]
    # Apart again: all have their old columns, and there is no room for a fourth.
    back = assigned(agent, [0, 0, 0, 1, 1, 2, 0, 2, 3, 3])
    assert back == [0, 0, 0, 1, 1, 2, 0, 2, -1, -1]
    # A cluster that shares fewer than half of the smaller one's rows is another class.
    agent.start(info(max_novel_classes=3))
    assert assigned(agent, [0, 0, 0, 0, 0, 0]) == [0] * 6
    assert assigned(agent, [0, 0, 1, 2, 3, 4, 0, 0, 0, 0]) == [1, 1, -1, -1, -1, -1, 1, 1, 1, 1]


def test_known_classes_set_the_width_of_new_ones() -> None:
    """The same rows are one class where known classes are wide, and four where they are narrow."""
    rng = np.random.default_rng(0)
    corners = 10.0 * np.eye(8)[:, :8]
    labels = np.repeat(np.arange(4), 40)
    narrow = corners[labels] + rng.standard_normal((160, 8))
    rows = corners[4 + labels] + rng.standard_normal((160, 8))
    assert len(np.unique(Merger(narrow, labels, 0).clusters(rows))) == 4
    wide = Merger(np.vstack([narrow, narrow + 1000]), np.repeat([0, 1], 160), 0)
    assert len(np.unique(wide.clusters(rows))) == 1


def test_first_rows_of_two_classes_are_not_one_cluster() -> None:
    """FINCH alone links each row to its nearest one, however far it is."""
    rng = np.random.default_rng(0)
    corners = 10.0 * np.eye(8)
    labels = np.repeat(np.arange(4), 40)
    merger = Merger(corners[labels] + rng.standard_normal((160, 8)), labels, 0)
    for sizes in ([3, 1], [1, 1], [2, 2], [1, 1, 1]):
        classes = np.repeat(np.arange(len(sizes)), sizes)
        rows = corners[4 + classes] + rng.standard_normal((len(classes), 8))
        assert merger.clusters(rows).tolist() == classes.tolist(), sizes


def classified(agent: Agent, blob: Blobs, *, told: bool) -> np.ndarray:
    agent.start(info(protocol="OND"))
    columns = []
    place = dict(zip(blob.ids, blob.labels.tolist(), strict=True))
    for features, ids in blob.rounds():
        agent.detect(features, ids)
        columns.append(agent.classify(features, ids).argmax(1))
        wanted = agent.wanted(ids)
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
    clusters = agent.characterize_test(blob.features, blob.ids)
    assert clusters is not None and clusters.shape == (len(blob.ids), 1 + NOVEL)
    chosen = clusters.argmax(1)
    assert (chosen[: blob.start] == 0).all()
    assert (chosen[~blob.novel] == 0).mean() > 0.85
    named = [np.bincount(chosen[blob.classes == KNOWN + k]).argmax() for k in range(NOVEL)]
    assert sorted(named) == [1, 2, 3]
    assert fitted("threshold", blob).characterize_test(blob.features, blob.ids) is None


def test_a_known_class_without_examples_has_an_empty_column() -> None:
    blob = blobs(0)
    training = blob.training
    agent = make_agent("clustering")
    agent.fit(Training(training.sample_ids, training.features, training.labels,
                       (*training.known, "never seen")))  # fmt: skip
    agent.start(info(known_classes=KNOWN + 1))
    vectors = agent.classify(blob.features, blob.ids)
    assert vectors.shape[1] == KNOWN + 2 and (vectors[:, -1] == 0).all()


def test_misuse_is_a_sentence() -> None:
    blob = blobs(0)
    with pytest.raises(ConfigError, match="is not fitted"):
        make_agent("threshold").start(info())
    with pytest.raises(ConfigError, match="72 examples are held out, row_false_alarms"):
        fitted("threshold", blob, row_false_alarms=0.001)
    with pytest.raises(ConfigError, match="test test has 5 known classes"):
        fitted("threshold", blob).start(info(known_classes=5))
    with pytest.raises(ConfigError, match="no predictor 'nonsense'"):
        fitted("threshold", blob, scorer="nonsense")
    agent = fitted("threshold", blob)
    agent.start(info())
    with pytest.raises(ConfigError, match="round just classified"):
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
