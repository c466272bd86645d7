"""Sessions that ended long ago leave the state folder whole, for a store that can be read."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from schemas.errors import ConfigError, LakeError
from tasks.condda.commands import CALLER, EVALUATION, Caller, OpenSession, ProtocolRefusal
from tasks.condda.harness import Harness
from tasks.condda.retention import RETIRED, retire
from tasks.condda.server.page import scores
from tasks.condda.server.serve import make_harness
from tasks.condda.store import EVENTS, EventStore
from tests.condda.small import DOMAIN, IDS, TEST, detection, write_test

NOW = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    write_test(tmp_path / "data")
    return make_harness(tmp_path / "data", tmp_path / "state", EVALUATION)


def session(harness: Harness, ended: bool, days: float = 0) -> str:
    harness._clock = lambda: NOW - timedelta(days=days)
    name = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="a"
    )
    harness.dataset_request(test_id=TEST, round_id=0, session_id=name)
    files = {"detection": detection(IDS[:3])}
    harness.post_results(result_files=files, test_id=TEST, round_id=0, session_id=name)
    if ended:
        harness.terminate_session(session_id=name)
    return name


def test_only_old_ended_sessions_leave_and_they_leave_whole(harness: Harness) -> None:
    state = harness.store.path.parent
    old, new, running = (
        session(harness, True, 40),
        session(harness, True, 10),
        session(harness, False, 40),
    )
    events = [stored.event for stored in harness.store.load(old, bodies=True)]
    harness.session_progress(session_id=old)
    assert retire(state, 30, NOW) == [old] and retire(state, 30, NOW) == []
    assert harness.sessions() == [new, running]
    with pytest.raises(ProtocolRefusal) as refusal:
        harness.session_progress(session_id=old)  # it was in memory
    assert refusal.value.reason == "session_id_invalid"
    kept = EventStore(state / RETIRED / EVENTS)
    assert [stored.event for stored in kept.load(old, bodies=True)] == events
    assert harness.results(running, TEST, "detection").height == 3


def test_an_id_that_has_left_is_not_opened_again(harness: Harness) -> None:
    old = session(harness, True, 40)
    retire(harness.store.path.parent, 30, NOW)
    with pytest.raises(Exception, match="other events than expected"):
        harness.run(old, OpenSession([TEST], protocol="OND", domain=DOMAIN, detector="a"))


def test_leaving_gives_no_other_attempt(harness: Harness) -> None:
    token = CALLER.set(Caller("alice", "agent"))
    try:
        session(harness, True, 40)
        retire(harness.store.path.parent, 30, NOW)
        assert harness.sessions() == []
        with pytest.raises(ProtocolRefusal, match="AttemptsExceeded"):
            session(harness, True)
    finally:
        CALLER.reset(token)


def test_a_killed_run_is_finished_by_the_next(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, state = session(harness, True, 40), harness.store.path.parent
    append = EventStore.append

    def copied_then_killed(*arguments: Any) -> None:
        append(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EventStore, "append", copied_then_killed)
        with pytest.raises(KeyboardInterrupt):
            retire(state, 30, NOW)
    assert EventStore(state / RETIRED / EVENTS).sessions() == [old]
    assert harness.sessions() == [old] and harness.results(old, TEST, "detection").height == 3
    assert retire(state, 30, NOW) == [old] and harness.sessions() == []


def test_another_session_of_that_name_is_not_overwritten(harness: Harness) -> None:
    old, state = session(harness, True, 40), harness.store.path.parent
    (state / RETIRED).mkdir()
    other = harness.store.load(old)[0].event
    EventStore(state / RETIRED / EVENTS).append(old, 0, [other])
    with pytest.raises(LakeError, match="holds another session"):
        retire(state, 30, NOW)
    assert harness.sessions() == [old]


def test_the_scoreboard_says_where_retired_sessions_are(harness: Harness) -> None:
    state = harness.store.path.parent
    session(harness, True, 40)
    assert "retired" not in scores(harness)
    retire(state, 30, NOW)
    assert scores(harness)["retired"].startswith("1 retired sessions are not shown; novelty build")
    assert f"--state {state / RETIRED} " in scores(harness)["retired"]


def test_the_command(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    session(harness, True, 40)
    state = str(harness.store.path.parent)
    assert main(["condda", "retire", "--state", state, "--days", "0"]) in (0, None)
    assert "1 sessions moved" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="0 days or more"):
        retire(Path(state), -1)
    with pytest.raises(ConfigError, match="no state folder"):
        retire(Path(state) / "none", 1)
