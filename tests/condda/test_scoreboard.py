"""The scoreboard: no begun test is missing from it, whatever became of its session."""

from pathlib import Path

import polars as pl

from schemas.condda import CHARACTERIZATION, SESSION_MEASURES, SESSIONS
from tasks.condda.commands import CALLER, PUBLISHED, Caller, Policy
from tasks.condda.export import session_frames
from tasks.condda.harness import Harness
from tasks.condda.measures import UNMEASURED, begun_tests, scoreboard
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
from tests.condda.small import DOMAIN, TEST, classes, detection, round_ids, write_test


def make_harness(folder: Path, policy: Policy) -> Harness:
    write_test(folder / "data")
    store = EventStore(folder / "events.sqlite")
    return Harness(TestLibrary(folder / "data"), store, policy)


def play(
    harness: Harness, agent: str, rounds: int, *, detects: bool = True, ends: bool = True,
    hints: tuple[str, ...] = (), chosen: int = 1,
) -> None:  # fmt: skip
    session = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version=agent, hints=hints
    )
    about = {"session_id": session, "test_id": TEST}
    for number in range(rounds):
        ids = round_ids(number)
        harness.dataset_request(round_id=number, **about)
        files = {"classification": classes(ids, chosen)}
        if detects:
            files["detection"] = detection(ids)
        harness.post_results(result_files=files, round_id=number, **about)
    if rounds == 3:
        harness.complete_test(**about)
    if ends:
        harness.terminate_session(session_id=session)


def of_lake(harness: Harness, baseline: str = "none") -> list[dict]:
    """The same scoreboard out of the tables."""
    kept: dict[str, list[pl.DataFrame]] = {}
    for session in harness.sessions():
        for test in harness.store.tests(session) or [""]:
            frames, _ = session_frames(harness, session, test, None)
            for name, frame in frames.items():
                kept.setdefault(name, []).append(frame)
    tables = [
        pl.concat(kept[table.name]) if table.name in kept else table.empty()
        for table in (SESSIONS, SESSION_MEASURES, CHARACTERIZATION)
    ]
    return scoreboard(begun_tests(*tables), baseline)


def test_giving_up_hides_nothing(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, Policy(red_light=True))
    play(harness, "brave", 3)
    for rounds in (1, 2):
        play(harness, "brave", rounds)
    play(harness, "quits", 2)
    play(harness, "leaves", 1, ends=False)
    play(harness, "looks", 0)  # opened, nothing served
    play(harness, "told", 3, detects=False, hints=("red_light",))
    board = scoreboard(list(harness.begun()), "none")
    counts = {row["agent"]: [row["tests"], *(row[name] for name in UNMEASURED)] for row in board}
    assert counts == {
        "brave": [1, 2, 0, 0],
        "leaves": [0, 0, 1, 0],
        "quits": [0, 1, 0, 0],
        "told": [1, 0, 0, 0],
    }
    rows = {row["agent"]: row for row in board}
    assert rows["brave"]["no_cdt"] == 100 and rows["quits"]["M1"] is None
    assert rows["told"]["post_top1_given"] == rows["brave"]["post_top1_system"] == 0.25
    assert [list(row.values()) for row in of_lake(harness)] == [list(row.values()) for row in board]
    harness.store.close()


def test_results_without_measures_are_counted_too(tmp_path: Path) -> None:
    """The policy `published` takes what cannot be measured, and a baseline without detection."""
    harness = make_harness(tmp_path, PUBLISHED)
    play(harness, "baseline", 3, detects=False)
    session = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="short"
    )
    about = {"session_id": session, "test_id": TEST}
    files = {"detection": detection(round_ids(0))}
    harness.post_results(result_files=files, round_id=0, **about)
    harness.complete_test(**about)
    for board in (scoreboard(list(harness.begun()), "none"), of_lake(harness)):
        [row] = board
        assert (row["agent"], row["tests"], row["no_measures"]) == ("short", 0, 1)
    harness.store.close()


def test_who_names_itself_as_another_spoils_nothing(tmp_path: Path) -> None:
    """Rows are of an owner, and only the operator runs the baseline."""
    harness = make_harness(tmp_path, Policy())
    play(harness, "threshold-3", 3)
    for owner in ("alice", "mallory"):
        token = CALLER.set(Caller(owner, "agent"))
        try:
            if owner == "alice":
                play(harness, "agent 1", 3)
            else:
                play(harness, "agent 1", 1)
                harness.policy = Policy(attempts=9)
                play(harness, "threshold-3", 3, chosen=0)
        finally:
            CALLER.reset(token)
    for board in (
        scoreboard(list(harness.begun()), "threshold"),
        of_lake(harness, "threshold"),
    ):
        rows = {(row["owner"], row["agent"]): row for row in board}
        assert rows.keys() == {
            *(("", "threshold-3"), ("alice", "agent 1")),
            *(("mallory", "agent 1"), ("mallory", "threshold-3")),
        }
        assert [rows[who, "agent 1"]["given_up"] for who in ("alice", "mallory")] == [0, 1]
        assert rows["alice", "agent 1"]["M5"] == rows["", "threshold-3"]["M5"] == 0.5
    harness.store.close()
