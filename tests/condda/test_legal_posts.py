"""Whatever an agent may post under `evaluation`: a test that it completes has its measures, and
nothing is told of an instance before all that is measured of it was posted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.condda.commands import EVALUATION, PUBLISHED, Policy, ProtocolRefusal
from tasks.condda.harness import Harness
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
from tests.condda.small import IDS, classes, detection, round_ids, write_test

KINDS = ("detection", "classification", "characterization")
MEASURED = {"OND": "classification", "CONDDA": "characterization"}
NUMBERS = ("0", "1", ".5", "0.25", "1.", "+1", "1e-3", "-0", "00.5", "2", "nan", "", "a")
ROUNDS = 3
POLICY = Policy(red_light=True)
# Labels by domain: where the unknown column is last a novel label is K, here 2.
NOVELTY = "instance_id,novel,detection,classification\n"
ACTIVITY = "vid,novel,detection,activity\n"
TRUTHS = {
    "image_classification": (3, None),
    "novelty": (2, NOVELTY + "".join(f"{i},{n},{d},{c}\n" for i, n, d, c in zip(
        IDS, (0, 0, 0, 0, 1, 0, 1, 0), (0, 0, 0, 0, 1, 1, 1, 1), (1, 2, 1, 2, -1, 1, -2, 2),
        strict=True,
    ))),
    "activity_recognition": (2, ACTIVITY + "".join(f"{i},{n},{d},{c}\n" for i, n, d, c in zip(
        IDS, (0, 0, 0, 0, 1, 0, 1, 0), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 2, 0, 2, 1),
        strict=True,
    ))),
}  # fmt: skip


def make_harness(folder: Path, policy: Policy) -> Harness:
    for protocol in MEASURED:
        for domain, (known, truth) in TRUTHS.items():
            options = {"protocol": protocol, "domain": domain, "known_classes": known}
            write_test(folder / "data", "T", truth=truth, **options)
    store = EventStore(folder / "events.sqlite")
    store._connection.execute("pragma synchronous = off")
    return Harness(TestLibrary(folder / "data"), store, policy)


def opened(harness: Harness, protocol: str, domain: str, *hints: str) -> dict[str, str]:
    about = {"protocol": protocol, "domain": domain, "novelty_detector_version": "a"}
    session = harness.session_request(test_ids=["T"], hints=list(hints), **about)
    return {"session_id": session, "test_id": "T"}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, int, str]:
    """A type, a number of values on a line, and how each of them is written."""
    text = draw(st.sampled_from(NUMBERS))
    return draw(st.sampled_from(KINDS)), draw(st.integers(0, 6)), text


def tried(call: Any, **options: Any) -> bool:
    try:
        call(**options)
    except ProtocolRefusal:
        return False
    return True


def test_a_completed_test_has_measures_whatever_was_posted(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, POLICY)
    outcomes: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        protocol = data.draw(st.sampled_from(sorted(MEASURED)))
        domain = data.draw(st.sampled_from(sorted(TRUTHS)))
        hints = data.draw(st.sampled_from([(), ("red_light",)]))
        about = opened(harness, protocol, domain, *hints)
        # Agents mean to finish and try widths until one is taken; each strays where it is drawn to.
        for number in range(ROUNDS):
            tried(harness.dataset_request, round_id=number, **about)
            widths = data.draw(st.permutations(range(1, 6)))
            strays = [
                (kind, [w], text) for kind, w, text in data.draw(st.lists(files(), max_size=1))
            ]
            honest = [
                (kind, widths, ".5")
                for kind in data.draw(st.permutations(KINDS))
                if data.draw(st.integers(0, 19))
            ]
            for kind, wanted, text in (*strays, *honest):
                whole = (protocol, kind) == ("OND", "characterization")
                names = IDS if whole else round_ids(number)
                for width in wanted:
                    body = "".join(",".join([name, *[text] * width]) + "\n" for name in names)
                    results = {kind: body.encode()}
                    where = 0 if whole else number
                    if tried(harness.post_results, result_files=results, round_id=where, **about):
                        break
        done = tried(harness.complete_test, **about)
        outcomes[f"{protocol} {'completed' if done else 'not'}"] += 1
        if done:
            measures = harness.measures(about["session_id"], "T")
            assert measures["m_acc"]["full_top1"] is not None
            assert ("m_num_stats" in measures) or hints
            assert ("characterization" in measures) == (protocol == "CONDDA")
            assert harness.evaluate(**about)

    play()
    assert min(outcomes[f"{protocol} completed"] for protocol in MEASURED) >= 4, outcomes
    assert min(outcomes[f"{protocol} not"] for protocol in MEASURED) >= 4, outcomes
    harness.store.close()


@pytest.fixture
def strict(tmp_path: Path) -> Harness:
    return make_harness(tmp_path, POLICY)


def post(harness: Harness, about: dict[str, str], number: int, **bodies: bytes) -> None:
    harness.post_results(result_files=bodies, round_id=number, **about)


def reason(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ProtocolRefusal) as refusal:
        call(*arguments, **options)
    return refusal.value.reason


def test_detection_keeps_its_number_of_values(strict: Harness) -> None:
    about = opened(strict, "OND", "image_classification")
    ids = round_ids(0)
    strict.dataset_request(round_id=0, **about)
    post(strict, about, 0, detection=detection(ids), classification=classes(ids))
    strict.dataset_request(round_id=1, **about)
    wider = "".join(f"{name},0.1,0.2\n" for name in round_ids(1)).encode()
    assert reason(post, strict, about, 1, detection=wider) == "WrongColumns"


@pytest.mark.parametrize("protocol", sorted(MEASURED))
@pytest.mark.parametrize("lacking", ["detection", "classes"])
def test_a_round_is_over_when_all_that_is_measured_is_posted(
    strict: Harness, protocol: str, lacking: str
) -> None:
    about = opened(strict, protocol, "novelty")
    other = MEASURED[protocol]
    for number in range(ROUNDS):
        ids = round_ids(number)
        bodies = {"detection": detection(ids), other: classes(ids)}
        missing = "detection" if lacking == "detection" else other
        late = {missing: bodies.pop(missing)}
        strict.dataset_request(round_id=number, **about)
        post(strict, about, number, **bodies)
        if number < ROUNDS - 1:
            asked = {"round_id": number + 1, **about}
            assert reason(strict.dataset_request, **asked) == "RoundOrder"
        else:
            assert reason(strict.complete_test, **about) == "TestIncomplete"
        post(strict, about, number, **late)
    strict.complete_test(**about)
    assert strict.measures(about["session_id"], "T")


def test_a_reaction_baseline_posts_detection_in_no_round_or_in_all(strict: Harness) -> None:
    about = opened(strict, "OND", "novelty", "red_light")
    for number in range(ROUNDS):
        ids = round_ids(number)
        strict.dataset_request(round_id=number, **about)
        if number:
            assert reason(post, strict, about, number, detection=detection(ids)) == "RoundOrder"
        post(strict, about, number, classification=classes(ids))
    strict.complete_test(**about)
    assert set(strict.measures(about["session_id"], "T")) == {"m_acc"}
    about = opened(strict, "OND", "novelty", "red_light")
    strict.dataset_request(round_id=0, **about)
    ids = round_ids(0)
    post(strict, about, 0, classification=classes(ids), detection=detection(ids))
    strict.dataset_request(round_id=1, **about)
    post(strict, about, 1, classification=classes(round_ids(1)))
    assert reason(strict.dataset_request, round_id=2, **about) == "RoundOrder"


def test_condda_is_measured_by_its_characterization_beside_classification(strict: Harness) -> None:
    about = opened(strict, "CONDDA", "novelty")
    for number in range(ROUNDS):
        ids = round_ids(number)
        strict.dataset_request(round_id=number, **about)
        bodies = {"detection": detection(ids), "characterization": classes(ids, 2, 4)}
        extra = {"classification": classes(ids, 1)} if number == 0 else {}
        post(strict, about, number, **bodies, **extra)
    strict.complete_test(**about)
    measures = strict.measures(about["session_id"], "T")
    assert measures["m_acc"]["full_top1"] == 3 / 8 and "characterization" in measures


def test_without_public_evaluation_there_are_the_corrected_measures(tmp_path: Path) -> None:
    """All rows after the change are novel: the public code refuses negative labels alone."""
    truth = NOVELTY + "".join(f"{i},{n > 3:d},{n > 3:d},{1 if n < 4 else -1}\n" for n, i in
                              enumerate(IDS))  # fmt: skip
    for policy in (POLICY, PUBLISHED):
        harness = make_harness(tmp_path / policy.name, policy)
        write_test(tmp_path / policy.name / "data", "T", domain="novelty", truth=truth)
        about = opened(harness, "OND", "novelty")
        for number in range(ROUNDS):
            ids = round_ids(number)
            harness.dataset_request(round_id=number, **about)
            post(harness, about, number, detection=detection(ids), classification=classes(ids, 0))
        harness.complete_test(**about)
        if policy.strict:
            assert harness.evaluate(**about)["m_acc"]["post_top1"] == 1.0
            compared = harness.evaluate(**about, baseline_session_id=about["session_id"])
            # Columns of zeros but the unknown one: right after the change, wrong before it.
            assert compared["m_nrp"] == {"M_nrp_post_top1": None, "M_nrp_post_top3": 100.0}
        else:
            assert reason(harness.evaluate, **about) == "InvalidResults"


def declared(harness: Harness) -> dict[str, str]:
    """A session that has declared novelty in round 0 and was served round 1."""
    about = opened(harness, "OND", "novelty")
    ids = round_ids(0)
    harness.dataset_request(round_id=0, **about)
    post(harness, about, 0, detection=detection(ids, 0.9), classification=classes(ids))
    harness.dataset_request(round_id=1, **about)
    return about


@pytest.mark.parametrize("kind", ["classification", "detection", "score"])
def test_no_feedback_on_what_is_not_answered_yet(strict: Harness, kind: str) -> None:
    about = declared(strict)
    asked = {"feedback_type": kind, **about}
    ids = list(round_ids(1))
    ask = strict.get_feedback_request
    # Served, and nothing of it posted: nothing is told of it.
    assert reason(ask, feedback_ids=ids, **asked) == "FeedbackIdsNotServed"
    # A part of its results was posted: what is told could be used for the rest.
    post(strict, about, 1, detection=detection(round_ids(1), 0.9))
    for wanted in (ids, None, [IDS[0]]):
        assert reason(ask, feedback_ids=wanted, **asked) == "ResultsMissing"
    post(strict, about, 1, classification=classes(round_ids(1)))
    assert ask(feedback_ids=ids, **asked)


@pytest.mark.parametrize(
    ("change", "reason_given"),
    [
        ({"round_size": None}, "no_defined_rounds"),
        ({"round_size": 0}, "no_defined_rounds"),
        ({"round_size": "many"}, "SourceError"),
        ({"truth": "id,detection,classification\na,0,cat\n"}, "SourceError"),
        ({"truth": "id,detection,classification\n"}, "no_defined_rounds"),
        ({"known_classes": None}, "no_known_classes"),
        ("metadata", "metadata_not_found"),
    ],
)
def test_a_test_that_cannot_be_run_or_measured_costs_no_attempt(
    strict: Harness, tmp_path: Path, change: Any, reason_given: str
) -> None:
    folder = tmp_path / "data"
    if change == "metadata":
        (folder / "OND" / "image_classification" / "T_metadata.json").unlink()
    else:
        write_test(folder, "T", **change)
    about = ("OND", "image_classification")
    assert reason(opened, strict, *about) == reason_given
    strict.policy = EVALUATION.model_copy(update={"round_size": 2})
    assert reason(opened, strict, *about) == reason_given
    assert strict.sessions() == []
