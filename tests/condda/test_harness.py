"""The harness: recorded exchanges, restarts, threads, a killed process, exports."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import polars as pl
import pytest

from tasks.condda.commands import EVALUATION, PUBLISHED, Limits, Policy, ProtocolRefusal
from tasks.condda.harness import Harness
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
from tests.condda.recorded import replay
from tests.condda.small import (
    CONDDA,
    DOMAIN,
    IDS,
    LABELS,
    TEST,
    classes,
    detection,
    round_ids,
    write_test,
)
from tests.shared import shared_path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_test(tmp_path / "data")
    write_test(tmp_path / "data", CONDDA, protocol="CONDDA")
    return tmp_path / "data"


def harness(data: Path, mode: Policy = PUBLISHED, store: Path | None = None, **options) -> Harness:
    path = store or data.parent / "events.sqlite"
    return Harness(TestLibrary(data), EventStore(path), mode, **options)


def opened(served: Harness, **options) -> str:
    values = {
        "test_ids": [TEST],
        "protocol": "OND",
        "domain": DOMAIN,
        "novelty_detector_version": "agent-1",
        **options,
    }
    return served.session_request(**values)


def run_test(served: Harness, session: str, test: str = TEST, value: float = 0.1) -> None:
    for number in range(3):
        served.dataset_request(test_id=test, round_id=number, session_id=session)
        post_round(served, session, number, test, value)
    served.complete_test(session_id=session, test_id=test)


def post_round(
    served: Harness, session: str, number: int, test: str = TEST, value: float = 0.1
) -> None:
    ids = round_ids(number)
    files = {"detection": detection(ids, value), "classification": classes(ids)}
    served.post_results(result_files=files, test_id=test, round_id=number, session_id=session)


@pytest.mark.parametrize(
    "name",
    ["harness_calls", "condda_mock_given", "condda_mock_system", "ond_precomputed_system"],
)
def test_recorded_exchanges_replay(name: str, tmp_path: Path) -> None:
    data = shared_path("sailon/sail-on-client/data")
    served = harness(data, store=tmp_path / "events.sqlite")
    compared = replay(served, shared_path(f"sailon/recorded/{name}.jsonl"))
    assert len(compared) >= 15
    for request, expected, got in compared:
        assert got == expected, request


def test_recorded_ond_run_gives_the_published_metrics(tmp_path: Path) -> None:
    served = harness(shared_path("sailon/sail-on-client/data"), store=tmp_path / "events.sqlite")
    replay(served, shared_path("sailon/recorded/ond_precomputed_system.jsonl"))
    [session] = served.store.sessions()
    test = "OND.10.90001.2100554"
    metrics = served.evaluate(test_id=test, session_id=session)
    expected = json.loads(
        shared_path(
            "sailon/expected_metrics/OND.10.90001.2100554_activity_recognition.json"
        ).read_text()
    )
    for ours in ("m_num", "m_num_stats", "m_ndp", "m_ndp_pre", "m_ndp_post", "m_acc"):
        assert metrics[ours] == expected[f"{ours}_values"], ours
    assert metrics["m_acc_failed"] == expected["m_ndp_failed_values"]
    assert served.results(session, test, "classification").height == 332


def test_a_restarted_harness_answers_the_same(data: Path) -> None:
    first = harness(data)
    session = opened(first, hints=["feedback_max_ids=1"])
    first.dataset_request(test_id=TEST, round_id=0, session_id=session)
    post_round(first, session, 0, value=0.9)
    asked = {"feedback_type": "detection", "test_id": TEST, "session_id": session}
    told = first.get_feedback_request(feedback_ids=None, **asked)
    assert told == f"{IDS[0]},0\n".encode()
    first.store.close()

    again = harness(data)
    with pytest.raises(ProtocolRefusal, match="FeedbackBudgetExceeded"):
        again.get_feedback_request(feedback_ids=None, **asked)
    score = again.get_feedback_request(
        feedback_ids=None, feedback_type="score", test_id=TEST, session_id=session
    )
    assert score == f"accuracy,{2 / 3}\n".encode()
    with pytest.raises(ProtocolRefusal, match="DetectionRepost"):
        post_round(again, session, 0, value=0.2)
    assert again.resume_test(session_id=session, test_id=TEST)["next_round"] == 1
    assert again.get_test_metadata(session_id=session, test_id=TEST)["feedback_max_ids"] == 1


def test_two_harnesses_on_one_store_see_each_other(data: Path) -> None:
    one, two = harness(data), harness(data)
    session = opened(one)
    one.dataset_request(test_id=TEST, round_id=0, session_id=session)
    post_round(two, session, 0)
    with pytest.raises(ProtocolRefusal, match="DetectionRepost"):
        post_round(one, session, 0, value=0.3)
    two.terminate_session(session_id=session)
    with pytest.raises(ProtocolRefusal, match="SessionEnded"):
        one.get_test_metadata(session_id=session, test_id=TEST)


def test_restart_wipes_results_in_compat(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    served.dataset_request(test_id=TEST, round_id=0, session_id=session)
    post_round(served, session, 0)
    served.dataset_request(test_id=TEST, round_id=0, session_id=session)
    assert served.results(session, TEST, "detection").is_empty()
    post_round(served, session, 0)
    assert served.results(session, TEST, "detection")["instance_id"].to_list() == list(IDS[:3])


def test_strict_offers_resume_instead_of_a_restart(data: Path) -> None:
    served = harness(data, EVALUATION)
    session = opened(served)
    served.dataset_request(test_id=TEST, round_id=0, session_id=session)
    post_round(served, session, 0)
    served.dataset_request(test_id=TEST, round_id=1, session_id=session)
    again = harness(data, EVALUATION)
    where = again.resume_test(session_id=session, test_id=TEST)
    assert (where["next_round"], where["rounds"], where["posted"]) == (1, 3, [])
    served.dataset_request(test_id=TEST, round_id=0, session_id=session)
    assert again.results(session, TEST, "detection").height == 3


def test_results_keep_text_and_ragged_lines(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    body = f"{IDS[0]},.25,1e-3\n{IDS[1]}\n{IDS[2]},nope\n".encode()
    served.post_results(
        result_files={"detection": body}, test_id=TEST, round_id=0, session_id=session
    )
    frame = served.results(session, TEST, "detection")
    assert frame["values"].to_list() == [[0.25, 0.001], [], None]
    assert frame["cells"].to_list() == [None, None, ["nope"]]


def test_evaluate_needs_completion_and_all_instances(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    with pytest.raises(ProtocolRefusal, match="TestInProcess"):
        served.evaluate(test_id=TEST, session_id=session)
    post_round(served, session, 0)
    with pytest.raises(ProtocolRefusal, match="lacks 5 of the 8"):
        served.evaluate(test_id=TEST, session_id=session, devmode=True)
    post_round(served, session, 1)
    post_round(served, session, 2)
    served.complete_test(session_id=session, test_id=TEST)
    baseline = opened(served)
    run_test(served, baseline)
    metrics = served.evaluate(test_id=TEST, session_id=session, baseline_session_id=baseline)
    assert metrics["m_num_stats"]["GT_indx"] == 5
    assert metrics["m_acc"]["full_top1"] == round(LABELS.count(1) / len(LABELS), 5)
    assert set(metrics) >= {"m_num", "m_ndp", "m_acc_failed", "m_is_cdt_and_is_early", "m_nrp"}
    accuracy = served.evaluate_round_wise(test_id=TEST, round_id=0, session_id=session)
    assert accuracy["top1_accuracy_round_0"] == pytest.approx(2 / 3, abs=1e-5)


def test_evaluation_takes_the_last_answer_in_the_order_of_the_test(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    about = {"test_id": TEST, "session_id": session}
    backwards = IDS[::-1]
    right = [max(label, 0) for label in LABELS]
    first = {"detection": detection(backwards), "classification": classes(IDS, 0)}
    served.post_results(result_files=first, round_id=0, **about)
    last = {"classification": classes(backwards, right[::-1])}
    served.post_results(result_files=last, round_id=1, **about)
    served.complete_test(**about)
    known = sum(label > 0 for label in LABELS) / len(LABELS)
    assert served.evaluate(**about)["m_acc"]["full_top1"] == known


def test_condda_without_classification_cannot_be_evaluated(data: Path) -> None:
    served = harness(data)
    session = opened(served, test_ids=[CONDDA], protocol="CONDDA")
    served.post_results(
        result_files={"detection": detection(IDS)},
        test_id=CONDDA,
        round_id=0,
        session_id=session,
    )
    served.complete_test(session_id=session, test_id=CONDDA)
    with pytest.raises(ProtocolRefusal) as refusal:
        served.evaluate(test_id=CONDDA, session_id=session)
    assert (refusal.value.status, refusal.value.reason) == (500, "result_file_not_found")


def test_status_lists_sessions_and_tests(data: Path) -> None:
    start = datetime(2024, 5, 1, tzinfo=UTC)
    ticks = count()
    names = iter("abcd")
    served = harness(
        data,
        clock=lambda: start + timedelta(hours=next(ticks)),
        new_id=lambda: next(names),
    )
    first = opened(served, novelty_detector_version="z-1")  # hour 0
    second = opened(served)  # hour 1
    post_round(served, first, 0)  # hour 2
    served.complete_test(session_id=first, test_id=TEST)  # hour 3
    served.terminate_session(session_id=first)  # hour 4
    hour = [(start + timedelta(hours=h)).isoformat() for h in range(10)]
    open_line, ended_line = f"b,agent-1,{hour[1]},Incomplete", f"a,z-1,{hour[0]},{hour[4]}"
    assert served.session_status() == f"{open_line}\n{ended_line}"
    assert served.session_status(after=hour[5]) == open_line
    assert served.session_status(after="2024-05-01T04:00:00") == f"{open_line}\n{ended_line}"
    assert served.session_status(session_id=second) == open_line
    assert served.session_status(detector="z-1", include_tests=True) == (
        f"a,z-1,{TEST},{hour[2]},{hour[4]}"
    )
    served.dataset_request(test_id=TEST, round_id=1, session_id=second)  # hour 5
    post_round(served, second, 0)  # hour 6
    served.dataset_request(test_id=TEST, round_id=0, session_id=second)  # hour 7: restart
    post_round(served, second, 0)  # hour 8
    served.complete_test(session_id=second, test_id=TEST)  # hour 9
    assert served.session_status(session_id=second, include_tests=True) == (
        f"b,agent-1,{TEST},{hour[8]},Incomplete"
    )
    with pytest.raises(ProtocolRefusal, match="not a time"):
        served.session_status(after="yesterday")


def test_zip_holds_logs_and_results(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    run_test(served, session)
    served.terminate_session(session_id=session)
    with zipfile.ZipFile(io.BytesIO(served.session_zip(session_id=session))) as file:
        assert {member.compress_type for member in file.infolist()} == {zipfile.ZIP_BZIP2}
        csv = file.read(f"OND/{DOMAIN}/{session}.{TEST}_detection.csv").decode()
        log = json.loads(file.read(f"{session}.json"))
        test_log = json.loads(file.read(f"{session}.{TEST}.json"))
    assert [line.split(",")[0] for line in csv.splitlines()] == list(IDS)
    assert log["tests"]["completed_tests"] == [TEST] and "termination" in log
    assert test_log["post_results"]["last round"] == "2"
    assert test_log["post_results"]["rounds"]["0"]["types"] == ["detection", "classification"]
    with zipfile.ZipFile(
        io.BytesIO(served.session_zip(session_id=session, test_ids=["other"]))
    ) as file:
        assert file.namelist() == [f"{session}.json"]


def test_hints_do_not_leak_between_sessions(data: Path) -> None:
    served = harness(data)
    hinted = opened(served, hints=["round_size=1", "red_light"])
    plain = opened(served)
    assert served.get_test_metadata(session_id=hinted, test_id=TEST)["round_size"] == 1
    shown = served.get_test_metadata(session_id=plain, test_id=TEST)
    assert shown["round_size"] == 3 and "red_light" not in shown


def test_an_answer_handed_out_does_not_reach_the_library(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    served.get_test_metadata(session_id=session, test_id=TEST)["round_size"] = 1
    assert served.get_test_metadata(session_id=session, test_id=TEST)["round_size"] == 3


def test_session_limit(data: Path) -> None:
    served = harness(data, limits=Limits(sessions=2))
    opened(served), opened(served)
    with pytest.raises(ProtocolRefusal, match="TooManySessions"):
        opened(served)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"test_ids": TEST}, "InvalidParams"),
        ({"test_ids": [1]}, "InvalidParams"),
        ({"hints": [None]}, "InvalidParams"),
        ({"novelty_detector_version": 3}, "InvalidParams"),
        ({"detection_threshold": "high"}, "InvalidThreshold"),
        ({"detection_threshold": None}, "InvalidThreshold"),
    ],
    ids=["one text", "number", "hint", "version", "threshold text", "no threshold"],
)
def test_a_session_of_wrong_kinds_is_refused(data: Path, options: dict, reason: str) -> None:
    served = harness(data)
    with pytest.raises(ProtocolRefusal) as refusal:
        opened(served, **options)
    assert (refusal.value.status, refusal.value.reason) == (400, reason)


@pytest.mark.parametrize("number", ["abc", "", None, "1.5", float("inf")], ids=str)
def test_a_round_that_is_no_number(data: Path, number: object) -> None:
    served = harness(data)
    session = opened(served)
    about = {"test_id": TEST, "round_id": number, "session_id": session}
    for call in (
        lambda: served.dataset_request(**about),
        lambda: served.post_results(result_files={"detection": b"a,1\n"}, **about),
        lambda: served.evaluate_round_wise(**about),
    ):
        with pytest.raises(ProtocolRefusal) as refusal:
            call()
        assert (refusal.value.status, refusal.value.reason) == (500, "ValueError")


def test_a_damaged_test_or_store_refuses_the_request(data: Path) -> None:
    served = harness(data)
    session = opened(served)
    (data / "OND" / DOMAIN / f"{TEST}_metadata.json").write_text("{")
    with pytest.raises(ProtocolRefusal, match="SourceError") as refusal:
        served.dataset_request(test_id=TEST, round_id=0, session_id=session)
    assert refusal.value.status == 500
    served.store.close()
    with pytest.raises(ProtocolRefusal, match="LakeError") as refusal:
        served.terminate_session(session_id=session)
    assert refusal.value.status == 500


def test_unknown_sessions_leave_nothing_in_memory(data: Path) -> None:
    served = harness(data)
    for number in range(50):
        served.terminate_session(session_id=f"nobody-{number}")
        for name in (f"nobody-{number}", "../x", "a b", "\ud800", "x" * 1000, ""):
            with pytest.raises(ProtocolRefusal, match="session_id_invalid"):
                served.get_test_metadata(session_id=name, test_id=TEST)
    assert not served._entries and not served.store.sessions()


def test_few_cached_sessions_are_enough(data: Path) -> None:
    served = harness(data, limits=Limits(cached_sessions=2))
    sessions = [opened(served) for _ in range(5)]
    for number in range(3):
        for session in sessions:
            served.dataset_request(test_id=TEST, round_id=number, session_id=session)
            post_round(served, session, number)
    assert len(served._entries) <= 2
    assert all(served.results(session, TEST, "detection").height == 8 for session in sessions)


def test_fifty_sessions_in_threads(data: Path) -> None:
    served = harness(data, EVALUATION)
    sessions = [opened(served) for _ in range(50)]

    def play(session: str) -> None:
        for number in range(3):
            served.dataset_request(test_id=TEST, round_id=number, session_id=session)
            post_round(served, session, number)
            post_round(served, session, number)
        served.complete_test(session_id=session, test_id=TEST)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(play, sessions))
    for session in sessions:
        assert served.results(session, TEST, "detection")["instance_id"].to_list() == list(IDS)
        assert served.resume_session(session_id=session) == [TEST]


def test_threads_that_race_for_one_session_post_once(data: Path) -> None:
    harnesses = [harness(data), harness(data)]
    session = opened(harnesses[0])

    def post(turn: int) -> str:
        try:
            post_round(harnesses[turn % 2], session, 0, value=0.1 * (turn % 4))
        except ProtocolRefusal as refusal:
            return refusal.reason
        return "OK"

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(32)))
    # Eight threads post each value; one value wins and its repeats are the same file again.
    assert answers.count("OK") == 8 and answers.count("DetectionRepost") == 24
    assert harnesses[0].results(session, TEST, "detection").height == 3


CHILD = """
import sys
from pathlib import Path
from tasks.condda.harness import Harness
from tasks.condda.commands import PUBLISHED
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary

data, store, session, first = sys.argv[1:]
served = Harness(TestLibrary(Path(data)), EventStore(Path(store)), PUBLISHED)
for number in range(int(first), 1_000_000):
    body = f"img_0.png,0.{number:07d}\\n".encode()
    served.post_results(
        result_files={"detection": body, "classification": body},
        test_id="OND.1.1.1", round_id=number, session_id=session,
    )
    print(number, flush=True)
"""


def test_kill_9_loses_and_doubles_nothing(data: Path) -> None:
    store = data.parent / "events.sqlite"
    session = opened(harness(data))
    root = Path(__file__).parents[2]
    acknowledged = -1
    for _ in range(3):
        # The last answer may have been lost with the process: the next one posts it again.
        command = [sys.executable, "-c", CHILD, str(data), str(store), session]
        child = subprocess.Popen(
            [*command, str(max(acknowledged, 0))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            cwd=root,
        )
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, "the child died before its first post"
        time.sleep(0.4)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")
        child.wait()
        # A torn last line was not acknowledged.
        acknowledged = int([first.strip(), *rest[:-1]][-1])
    served = harness(data)
    for kind in ("detection", "classification"):
        rounds = served.results(session, TEST, kind)["round"].to_list()
        assert rounds == list(range(len(rounds))) and len(rounds) > 3
        assert acknowledged + 1 <= len(rounds) <= acknowledged + 2


def test_results_frame_is_empty_with_its_columns(data: Path) -> None:
    served = harness(data)
    frame = served.results(opened(served), TEST, "detection")
    assert frame.is_empty() and frame.schema["values"] == pl.List(pl.Float64)
