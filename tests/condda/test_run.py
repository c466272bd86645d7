"""The run loop against the harness in process: whole sessions, interruptions, other domains."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from schemas.errors import SourceError
from tasks.condda.agent import Agent, FeatureLookup, Training, training_examples
from tasks.condda.characterization import characterize
from tasks.condda.commands import EVALUATION, PUBLISHED, Policy, ProtocolRefusal
from tasks.condda.harness import Harness
from tasks.condda.make_tests import TestSettings, make_tests
from tasks.condda.measures import aligned, matrix
from tasks.condda.metrics import Columns, evaluate
from tasks.condda.run import SessionRun, run_session, run_test
from tasks.condda.server.client import Mirrored
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
from tasks.sample.condda import KNOWN_CLASSES, write_condda
from tests.condda import make_agent

KNOWN, NOVEL, EACH, DIMENSIONS = 4, 3, 60, 12
KINDS = {"CONDDA": ("detection", "characterization"), "OND": ("detection", "classification")}


class World:
    """Tables of Gaussian classes, tests made of them, and an agent's examples."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(11)
        means = 2.2 * rng.standard_normal((KNOWN + NOVEL, DIMENSIONS))
        classes = np.tile(np.arange(KNOWN + NOVEL), 2 * EACH)
        self.labelled = pl.DataFrame(
            {
                "sample_id": [f"sample_{row:05d}" for row in range(len(classes))],
                "class": [f"class_{number}" for number in classes],
                "split": ["train", "test"] * (len(classes) // 2),
                "role": np.where(classes < KNOWN, "known", "novel"),
            }
        )
        values = means[classes] + rng.standard_normal((len(classes), DIMENSIONS))
        self.features = FeatureLookup(self.labelled["sample_id"].to_list(), values)
        self.training = training_examples(self.labelled, self.features)
        self.root = root
        shared: dict[str, Any] = {
            "tests": 2, "rows": 170, "round_size": 30, "novel_classes": 2, "feedback_max_ids": 4,
            "anonymous": False, "seed": 0, "earliest_change": 0.3, "latest_change": 0.3,
        }  # fmt: skip
        self.tests = {
            protocol: make_tests(
                self.labelled, root, TestSettings(kind=protocol, **shared)
            )["test_id"].to_list()
            for protocol in ("CONDDA", "OND")
        }  # fmt: skip

    def agent(self, name: str = "clustering") -> Agent:
        agent = make_agent(name)
        agent.fit(self.training)
        return agent

    def harness(self, folder: Path, mode: Policy = EVALUATION) -> Harness:
        return Harness(TestLibrary(self.root), EventStore(folder / "events.sqlite"), mode)

    def run(self, harness: Any, protocol: str, agent: Agent, **options: Any) -> SessionRun:
        return run_session(
            harness, self.tests[protocol], agent, self.features, protocol=protocol, **options
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tests"))


@pytest.fixture(scope="module")
def agent(world: World) -> Agent:
    return world.agent()


def posted(harness: Harness, run: SessionRun, world: World, protocol: str) -> list[pl.DataFrame]:
    kinds = (*KINDS[protocol], *(("characterization",) if protocol == "OND" else ()))
    return [
        harness.results(run.session_id, test, kind)
        for test in world.tests[protocol]
        for kind in kinds
    ]


def discovery(harness: Harness, session: str, test: str) -> pl.DataFrame:
    """Measures of the characterization that was posted."""
    truth = harness.library.load(test, "CONDDA", "novelty")
    results = harness.results(session, test, "characterization")
    assert results["instance_id"].to_list() == list(truth.names)
    blocks = [
        matrix(part["values"], "characterization")
        for part in results.partition_by("round", maintain_order=True)
    ]
    columns = Columns(KNOWN, truth.domain.unknown)
    return characterize(blocks, truth.labels, truth.truth["novel"], columns)


def test_condda_with_and_without_the_red_light(world: World, agent: Agent, tmp_path: Path) -> None:
    harness = world.harness(tmp_path, Policy(red_light=True))
    runs = {hint: world.run(harness, "CONDDA", agent, red_light=hint) for hint in (False, True)}
    for hint, run in runs.items():
        status = harness.session_progress(session_id=run.session_id)
        assert status["terminated"] and all(t["completed"] for t in status["tests"].values())
        assert status["detector"] == agent.detector
        assert status["hints"] == (["red_light"] if hint else [])
        for done, test in zip(run.tests, world.tests["CONDDA"], strict=True):
            truth = harness.library.load(test, "CONDDA", "novelty")
            start = truth.metadata["detection"]
            assert (done.test_id, done.rounds, done.rows, done.replayed) == (test, 6, 170, 0)
            chances = aligned(truth, harness.results(run.session_id, test, "detection"), "d")[:, 0]
            assert done.detected_row == int((chances > 0.5).argmax())
            if hint:
                assert chances.tolist() == [float(row >= start) for row in range(170)]
            else:
                assert start <= done.detected_row <= start + 30
                assert (np.diff(chances) >= 0).all()
            measures = discovery(harness, run.session_id, test)
            value = dict(measures.filter(part="post").select("metric", "value").rows())
            assert value["k_plus_1_accuracy"] > 0.85
            assert value["discovery_accuracy"] > (0.8 if hint else 0.6)
            assert value["nmi"] > 0.7
    for test in world.tests["CONDDA"]:
        sides = [discovery(harness, runs[hint].session_id, test) for hint in (True, False)]
        told, alone = (
            side.filter(part="post", metric="discovery_accuracy")["value"][0] for side in sides
        )
        assert told >= alone


def test_ond_with_labels_told(world: World, agent: Agent, tmp_path: Path) -> None:
    harness = world.harness(tmp_path)
    run = world.run(harness, "OND", agent)
    for done, test in zip(run.tests, world.tests["OND"], strict=True):
        truth = harness.library.load(test, "OND", "novelty")
        assert 0 < done.told <= 4 * 6
        metrics = harness.evaluate(test_id=test, session_id=run.session_id)
        start = int(truth.truth["novel"].arg_max()) + 1
        assert metrics["m_num_stats"]["GT_indx"] == start
        assert metrics["m_num_stats"]["P_indx_0.5"] == done.detected_row + 1
        assert metrics["m_acc"]["pre_top1"] > 0.85
        chances, classes = (
            aligned(truth, harness.results(run.session_id, test, kind), kind)
            for kind in KINDS["OND"]
        )
        assert classes.shape == (170, KNOWN + 1)
        corrected = evaluate(
            chances[:, 0], classes, truth.truth["novel"], truth.labels, Columns(KNOWN, "first"), 30
        )
        assert corrected["m_acc"]["full_top1"] > 0.85
        assert corrected["m_is_cdt_and_is_early"]["Is CDT"]
        clusters = harness.results(run.session_id, test, "characterization")
        assert clusters.height == 170 and clusters["round"].unique().to_list() == [0]
        assert clusters["values"].list.len().unique().to_list() in ([2], [3], [4], [5])


class Interrupted(Exception):
    pass


class Breaking:
    """A harness whose calls end in an exception at one place, before or after they had effect."""

    def __init__(self, harness: Harness, place: int, *, after: bool) -> None:
        self.harness, self.place, self.after = harness, place, after
        self.calls = count()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.harness, name)

        def broken(**arguments: Any) -> Any:
            number = next(self.calls)
            if number == self.place and not self.after:
                raise Interrupted(name)
            try:
                return call(**arguments)
            finally:
                if number == self.place:
                    raise Interrupted(name)

        return broken


def interrupted_and_resumed(
    world: World, folder: Path, protocol: str, agent: Agent, place: int, after: bool, **options: Any
) -> tuple[Harness, SessionRun, str]:
    """The run broken at call number `place` and resumed by a new agent; and the broken call."""
    sessions: list[str] = []
    first = Breaking(world.harness(folder), place, after=after)
    with pytest.raises(Interrupted) as broken:
        world.run(first, protocol, agent, opened=sessions.append, **options)
    harness = world.harness(folder)
    run = world.run(harness, protocol, agent, resume=sessions[0], **options)
    assert run.session_id == sessions[0]
    return harness, run, str(broken.value)


def total_calls(world: World, folder: Path, protocol: str, agent: Agent, **options: Any) -> int:
    counting = Breaking(world.harness(folder), -1, after=False)
    world.run(counting, protocol, agent, **options)
    return next(counting.calls)


@pytest.mark.parametrize("after", [False, True], ids=["not_done", "answer_lost"])
@pytest.mark.parametrize("protocol", ["CONDDA", "OND"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    world: World, agent: Agent, tmp_path: Path, protocol: str, after: bool
) -> None:
    """Broken at calls spread over the whole session, the last ones included."""
    options = {"journal": tmp_path / "journal"}
    harness = world.harness(tmp_path)
    whole = world.run(harness, protocol, agent, **options)
    expected = posted(harness, whole, world, protocol)
    calls = total_calls(world, tmp_path, protocol, agent, **options)
    names = set()
    places = sorted({*range(1, calls - 1, 7), calls - 2, calls - 1})
    for place in places:
        folder = tmp_path / str(place)
        folder.mkdir()
        try:
            broken, run, name = interrupted_and_resumed(
                world, folder, protocol, agent, place, after, **options
            )
        except SourceError as error:
            # Labels whose answer was lost cannot be had again; that is said, not passed over.
            assert after and protocol == "OND" and "were told to an earlier run" in str(error)
            continue
        names.add(name)
        for one, two in zip(expected, posted(broken, run, world, protocol), strict=True):
            assert one.equals(two), (place, name)
        assert broken.session_progress(session_id=run.session_id)["terminated"]
    assert {"dataset_request", "post_results", "terminate_session"} <= names


def test_a_resumed_run_replays_what_was_posted(world: World, agent: Agent, tmp_path: Path) -> None:
    """Calls: 0 session, 1 metadata, then 3 a round: data, detection, characterization."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    _, run, name = interrupted_and_resumed(world, tmp_path / "a", "CONDDA", agent, 11, False)
    assert name == "dataset_request"
    assert [test.replayed for test in run.tests] == [2, 0]
    harness, run, name = interrupted_and_resumed(world, tmp_path / "b", "CONDDA", agent, 10, False)
    assert name == "post_results"
    assert run.tests[0].replayed == 2
    assert harness.results(run.session_id, run.tests[0].test_id, "characterization").height == 170


def test_labels_that_were_told_and_not_kept_are_missed(
    world: World, agent: Agent, tmp_path: Path
) -> None:
    """Without a journal a run that was told labels cannot go on, and says so."""
    calls = total_calls(world, tmp_path, "OND", agent)
    (tmp_path / "late").mkdir()
    with pytest.raises(SourceError, match="no journal was named; name the journal of that run"):
        interrupted_and_resumed(world, tmp_path / "late", "OND", agent, calls - 3, False)


def test_a_journal_that_is_damaged_is_named(world: World, agent: Agent, tmp_path: Path) -> None:
    """It is replaced as a whole after each round, so a kill leaves none."""
    journal = tmp_path / "journal"
    sessions: list[str] = []
    with pytest.raises(Interrupted):
        broken = Breaking(world.harness(tmp_path), 26, after=False)
        world.run(broken, "OND", agent, opened=sessions.append, journal=journal)
    [file] = journal.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SourceError, match=file.name):
        world.run(world.harness(tmp_path), "OND", agent, resume=sessions[0], journal=journal)


@pytest.mark.parametrize("mode", [EVALUATION, PUBLISHED], ids=["evaluation", "published"])
def test_with_a_journal_a_run_goes_on_in_the_middle(
    world: World, agent: Agent, tmp_path: Path, mode: Policy
) -> None:
    """The harness serves no round again but the one that was not finished."""
    sessions: list[str] = []
    with pytest.raises(Interrupted):
        broken = Breaking(world.harness(tmp_path, mode), 16, after=False)
        world.run(broken, "CONDDA", agent, opened=sessions.append, journal=tmp_path / "journal")
    harness = world.harness(tmp_path, mode)
    counting = Breaking(harness, -1, after=False)
    run = world.run(counting, "CONDDA", agent, resume=sessions[0], journal=tmp_path / "journal")
    assert run.tests[0].rounds == 6 and run.tests[0].replayed >= 4
    # Finished tests, metadata, where, the last two rounds, the end; the second test; the session.
    assert next(counting.calls) <= 3 + 2 * 3 + 2 + (2 + 6 * 3 + 2) + 1
    assert harness.results(sessions[0], run.tests[0].test_id, "detection").height == 170


@pytest.mark.parametrize("protocol", ["CONDDA", "OND"])
def test_a_harness_that_begins_anew_is_followed(
    world: World, agent: Agent, tmp_path: Path, protocol: str
) -> None:
    """As published a started test is wiped when its round 0 is asked for again (rule 7)."""
    (tmp_path / "whole").mkdir()
    harness = world.harness(tmp_path / "whole", PUBLISHED)
    expected = posted(harness, world.run(harness, protocol, agent), world, protocol)
    compat = world.harness(tmp_path, PUBLISHED)
    sessions: list[str] = []
    with pytest.raises(Interrupted):
        broken = Breaking(compat, 9, after=False)
        world.run(broken, protocol, agent, opened=sessions.append)
    run = world.run(compat, protocol, agent, resume=sessions[0])
    assert [test.replayed for test in run.tests] == [0, 0]
    for one, two in zip(expected, posted(compat, run, world, protocol), strict=True):
        assert one.equals(two)


def test_another_agent_cannot_finish_a_run(world: World, agent: Agent, tmp_path: Path) -> None:
    sessions: list[str] = []
    with pytest.raises(Interrupted):
        broken = Breaking(world.harness(tmp_path), 17, after=False)
        world.run(broken, "CONDDA", agent, opened=sessions.append)
    other = make_agent("clustering", seed=5)
    other.fit(world.training)
    with pytest.raises(ProtocolRefusal, match="was posted before with other content"):
        world.run(world.harness(tmp_path), "CONDDA", other, resume=sessions[0])


def test_anonymous_tests_run_the_same(world: World, agent: Agent, tmp_path: Path) -> None:
    runs = []
    for anonymous in (False, True):
        root = tmp_path / str(anonymous)
        settings = TestSettings(tests=1, rows=100, anonymous=anonymous, seed=4)
        [test] = make_tests(world.labelled, root, settings)["test_id"]
        harness = Harness(TestLibrary(root), EventStore(root / "events.sqlite"))
        file = harness.library.load(test, "CONDDA", "novelty")
        features = FeatureLookup(file.names, world.features.of(file.truth["sample_id"].to_list()))
        run = run_session(harness, [test], agent, features, protocol="CONDDA")
        runs.append(harness.results(run.session_id, test, "characterization"))
    assert runs[0]["values"].equals(runs[1]["values"])
    assert not set(runs[0]["instance_id"]) & set(runs[1]["instance_id"])


def test_a_sample_without_features_stops_the_run(
    world: World, agent: Agent, tmp_path: Path
) -> None:
    harness = world.harness(tmp_path)
    few = FeatureLookup(["other"], np.zeros((1, DIMENSIONS)))
    with pytest.raises(SourceError, match="has no feature vector"):
        run_session(harness, world.tests["OND"], agent, few, protocol="OND")


def test_one_test_of_a_session(world: World, agent: Agent, tmp_path: Path) -> None:
    """Tests do not touch each other: the second alone is as after the first."""
    harness = world.harness(tmp_path)
    whole = world.run(harness, "CONDDA", agent)
    second = world.tests["CONDDA"][1]
    session = harness.session_request(
        test_ids=[second], protocol="CONDDA", domain="novelty", novelty_detector_version="x-1"
    )
    alone = run_test(harness, session, second, agent, world.features, protocol="CONDDA")
    assert alone == whole.tests[1]
    sides = [harness.results(name, second, "detection") for name in (session, whole.session_id)]
    assert sides[0].equals(sides[1])


@pytest.mark.parametrize("protocol", ["CONDDA", "OND"])
@pytest.mark.parametrize("domain", ["activity_recognition", "image_classification"])
def test_sample_tests_of_published_domains(tmp_path: Path, domain: str, protocol: str) -> None:
    """Unknown stands last in activity tests; image tests count it among the known classes."""
    write_condda(tmp_path / "data", bad_records=False)
    library = TestLibrary(tmp_path / "data")
    harness = Harness(library, EventStore(tmp_path / "events.sqlite"))
    test = library.test_ids(protocol, domain)[1]
    held = np.load(tmp_path / "data" / "features" / f"{test}.npz")
    images = domain == "image_classification"
    known = KNOWN_CLASSES[domain]
    training = Training(
        sample_ids=[f"{row:05d}" for row in range(len(held["train_labels"]))],
        features=held["train_features"],
        labels=held["train_labels"] - images,
        known=tuple(f"{number:02d}" for number in range(known)),
    )
    agent = make_agent("clustering")
    agent.fit(training)
    features = FeatureLookup(held["instance_id"].tolist(), held["features"])
    run = run_session(harness, [test], agent, features, protocol=protocol, domain=domain)
    truth = library.load(test, protocol, domain)
    novel = truth.truth[truth.domain.novel].to_numpy().astype(bool)
    kind = KINDS[protocol][1]
    results = harness.results(run.session_id, test, kind)
    columns = Columns(known, truth.domain.unknown)
    vectors = [
        matrix(part["values"], kind) for part in results.partition_by("round", maintain_order=True)
    ]
    measures = characterize(vectors, truth.labels, novel, columns)
    value = dict(measures.filter(part="all").select("metric", "value").rows())
    assert value["k_plus_1_accuracy"] > 0.75
    assert run.tests[0].told > 0 or protocol == "CONDDA"


@pytest.mark.parametrize("lost", ["complete_test", "terminate_session"])
def test_a_mirror_that_was_killed_is_told_what_it_missed(
    world: World, agent: Agent, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has heard the call, this machine died before its own store had."""
    for name in ("server", "here"):
        (tmp_path / name).mkdir()
    server, library = world.harness(tmp_path / "server"), TestLibrary(world.root)
    test = world.tests["CONDDA"][0]

    def run(mirror: Mirrored, **options: Any) -> SessionRun:
        return run_session(mirror, [test], agent, world.features, protocol="CONDDA", **options)

    def die(**arguments: Any) -> None:
        raise Interrupted(lost)

    store = EventStore(tmp_path / "here" / "events.sqlite")
    mirror = Mirrored(server, library, store)
    monkeypatch.setattr(mirror.local, lost, die)
    with pytest.raises(Interrupted):
        run(mirror)
    (session,) = store.sessions()
    store.close()
    again = Mirrored(server, library, EventStore(tmp_path / "here" / "events.sqlite"))
    assert run(again, resume=session).session_id == session
    known = again.local.session_progress(session_id=session)
    assert known["terminated"] and known["tests"][test]["completed"]
