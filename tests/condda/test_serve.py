"""Starting a server: tokens, one server on a state folder, retention; mistakes are one sentence."""

import threading
from pathlib import Path
from typing import Any

import pytest

from flows.cli import _parser, main, predictors, run_config
from schemas.condda import Config
from schemas.errors import ConfigError, LockedError
from tasks.condda.build import chosen_agents
from tasks.condda.commands import EVALUATION, Caller, Policy
from tasks.condda.retention import retire, retire_daily
from tasks.condda.server.serve import Token, make_harness, read_tokens, running
from tasks.condda.store import EVENTS, EventStore
from tasks.predictors import predictor_names
from tests.condda.small import DOMAIN, TEST, write_test

ALICE, BOB = "agent alice 0123456789abcdef-a", "operator bob 0123456789abcdef-b"


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a command ends."""
    assert main(words) == 2
    printed = capsys.readouterr()
    (line,) = (line for line in printed.err.splitlines() if not line.startswith("no Prefect"))
    assert line.startswith("novelty: ") and "serving" not in printed.out
    return line


def serve_words(folder: Path, *options: str) -> list[str]:
    places = ["--tests", str(folder / "data"), "--state", str(folder / "state")]
    return ["condda", "serve", *places, "--port", "0", *options]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there is no token in "),
        (b"\xef\xbb\xbf# nobody yet\r\n\r\n", "no token in "),
        (f"{ALICE}\nagent carl {ALICE.split()[2]}\n".encode(), "line 2 of "),
        (f"{ALICE}\n{ALICE}\n".encode(), "has a token of an earlier line"),
        (
            f"{ALICE}\noperator alice another-token-of-hers\n".encode(),
            "alice is agent and operator",
        ),
        (b"agent jos\xe9 0123456789abcdef-a\n", "it is not UTF-8 text"),
        (b"agent alice short\n", "a token has 5 characters"),
        (b"agent alice\n", "line 1 of "),
    ],
    ids=["empty", "comments", "owners", "twice", "roles", "latin-1", "short", "words"],
)
def test_tokens_that_let_in_the_wrong_ones_are_refused(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(tmp_path / "data")
    (tmp_path / "tokens").write_bytes(content)
    words = serve_words(tmp_path, "--tokens", str(tmp_path / "tokens"))
    assert said in refused(words, capsys)
    assert not (tmp_path / "state").exists()


def test_an_option_without_a_value_does_not_let_everyone_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell gives it where a variable is not set; it would be the folder where one is."""
    for option in ("--tokens", "--state", "--tests"):
        with pytest.raises(SystemExit) as end:
            main(["condda", "serve", f"{option}="])
        assert end.value.code == 2
        assert f"argument {option}: it is empty; name a" in capsys.readouterr().err


def test_wrong_folders_are_a_sentence_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a folder" in refused(serve_words(tmp_path), capsys)
    assert not (tmp_path / "state").exists()
    write_test(tmp_path / "data")
    for state in (tmp_path / "data" / "OND" / DOMAIN / f"{TEST}_single_df.csv", Path("/proc/x")):
        words = [*serve_words(tmp_path)[:4], "--port", "0", "--state", str(state)]
        assert f"cannot make the state folder {state}" in refused(words, capsys)


def test_tokens_of_other_systems_and_with_comments_are_read(tmp_path: Path) -> None:
    lines = f"# who\r\n\r\n{ALICE}\r\n  # more\r\n{BOB}\r\nagent alice 0123456789abcdef-c"
    (tmp_path / "tokens").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    callers = [token.caller for token in read_tokens(tmp_path / "tokens")]
    assert [(caller.role, caller.owner) for caller in callers] == [
        *(("agent", "alice"), ("operator", "bob"), ("agent", "alice"))
    ]


def test_a_state_folder_has_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_test(tmp_path / "data")
    with running(tmp_path / "data", tmp_path / "state"):
        said = refused(serve_words(tmp_path, "--policy", "evaluation"), capsys)
        assert f"{tmp_path / 'state'} is served by process" in said and "stop it" in said
        with pytest.raises(LockedError), running(tmp_path / "data", tmp_path / "state"):
            pass
        # What reads the store, or moves sessions out of it, goes on beside a server.
        assert main(["condda", "retire", "--state", str(tmp_path / "state"), "--days", "1"]) == 0
        make_harness(tmp_path / "data", tmp_path / "state", EVALUATION).store.close()
    with running(tmp_path / "data", tmp_path / "state"):
        pass


AGENT = Token("0123456789abcdef-a", Caller("alice", "agent"))


@pytest.mark.parametrize(
    ("served", "policy", "options", "said"),
    [
        (TEST, None, ["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (TEST, None, ["--url", "ftp://127.0.0.1"], "is no URL such as"),
        ("OND.1.1.2", EVALUATION, [], f"does not offer test OND/{DOMAIN}/{TEST}; serve the tests"),
        (TEST, EVALUATION, ["--red-light"], "allows no red light"),
        (TEST, Policy(detection_threshold=0.4), [], "threshold of http://127.0.0.1"),
        (TEST, AGENT, [], "refuses: no token; name one by --token"),
        (TEST, AGENT, ["--token", "x"], "refuses: this token; name one by --token"),
    ],
    ids=["nobody", "scheme", "test", "red light", "threshold", "no token", "token"],
)
def test_what_a_server_would_refuse_is_refused_before_any_work(
    served: str,
    policy: Policy | Token | None,
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_test(tmp_path / "served", served)
    write_test(tmp_path / "data")
    (tmp_path / "data" / "features").mkdir()
    (tmp_path / "data" / "features" / f"{TEST}.npz").touch()
    access: dict[str, Any] = {"policy": policy}
    if isinstance(policy, Token):
        access = {"tokens": [policy]}
    words = ["condda", "run", "--detector", "threshold", "--tests", str(tmp_path / "data")]
    words += ["--lake", str(tmp_path / "lake")]
    with running(tmp_path / "served", tmp_path / "state", **access) as url:
        url_words = [] if "--url" in options else ["--url", url]
        assert said in refused([*words, *url_words, *options], capsys)
    assert not (tmp_path / "lake" / "condda").exists()
    assert EventStore(tmp_path / "state" / EVENTS).sessions() == []


def test_a_state_that_is_none_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(tmp_path / "data")
    (tmp_path / "state").mkdir()
    places = ["--tests", str(tmp_path / "data"), "--lake", str(tmp_path / "lake")]
    words = ["build", "condda", *places, "--state", str(tmp_path / "state")]
    assert "holds no events.sqlite; name the state folder" in refused(words, capsys)
    (tmp_path / "state" / EVENTS).write_bytes(bytes(5000))
    assert "cannot open the event store" in refused(words, capsys)


def test_a_state_alone_is_exported_alone(tmp_path: Path) -> None:
    """Agents and scores over all tests took minutes before the sessions were looked at."""
    places = {"tests": tmp_path, "state": tmp_path}
    alone = Config(**places)
    assert (alone.predictors, alone.scores) == ({}, {})
    for more in ({"seeds": (1,)}, {"scores": {"nearest": {}}}, {"run": {"red_light": "with"}}):
        assert Config(**places, **more).predictors
    assert Config(**places, predictors={"evm": {}}).scores == {"all": {}}
    assert Config(tests=tmp_path).predictors


def test_agents_are_named_as_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predictors() == list(predictor_names())
    write_test(tmp_path / "data")
    words = ["condda", "run", "--tests", str(tmp_path / "data"), "--lake", str(tmp_path / "lake")]
    said = refused([*words, "--detector", "evm,clusterin"], capsys)
    assert "no predictor 'clusterin'; there are: ann, " in said and "clustering?" in said
    assert "names no agent; there are: ann, " in refused([*words, "--detector", "evm,"], capsys)
    for options, agents in (
        (["evm", "--detector", "clustering, ann"], {"ann", "clustering", "evm", "threshold"}),
        (["all"], set(predictor_names())),
        (["evm", "--url", "http://127.0.0.1:1"], {"evm"}),
    ):
        config = run_config(_parser().parse_args([*words, "--detector", *options]))
        assert {facts.model for facts in chosen_agents(config)} == agents


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_days_that_none_are_kept_for_are_refused_before_anything_starts(
    days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(tmp_path / "data")
    try:
        code = main(serve_words(tmp_path, f"--retain-days={days}"))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and "days" in said
    assert not (tmp_path / "state").exists()
    with pytest.raises(ConfigError, match="0 days or more"):
        retire(tmp_path / "state", float(days))


def test_a_retirement_that_fails_is_said_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_test(tmp_path / "data")
    harness = make_harness(tmp_path / "data", tmp_path / "state", EVALUATION)
    session = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="a"
    )
    harness.terminate_session(session_id=session)
    (tmp_path / "state" / "retired").write_text("in the way")
    stopped, days = threading.Event(), []

    def next_day(seconds: float) -> bool:
        """Each day comes at once: the first finds the file, the second does not."""
        days.append(list(harness.sessions()))
        if len(days) == 1:
            (tmp_path / "state" / "retired").unlink()
        return len(days) == 2

    monkeypatch.setattr(stopped, "wait", next_day)
    retire_daily(tmp_path / "state", 0, stopped).join()
    assert days == [[session], []]
    (record,) = caplog.records
    assert "were not retired and will be tomorrow" in record.message and record.exc_info is None
