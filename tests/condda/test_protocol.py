"""The machine: what strict refuses, what compat answers (CONDDA rule 10), feedback, cost."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import SourceError
from tasks.condda.commands import (
    EVALUATION,
    PUBLISHED,
    CheckEvaluable,
    Command,
    CompleteTest,
    Dataset,
    Feedback,
    Latest,
    Limits,
    Metadata,
    OpenSession,
    Policy,
    Post,
    ProtocolRefusal,
    Resume,
    Status,
    Terminate,
)
from tasks.condda.harness import Harness
from tasks.condda.protocol import decide
from tasks.condda.session import SessionState, evolve, open_state
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
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

NOW = datetime(2024, 5, 1, tzinfo=UTC)


class Session:
    """A session driven through `decide` and `evolve` alone."""

    def __init__(self, root: Path, mode: Policy, **options: Any):
        self.library = TestLibrary(root)
        self.mode = mode
        self.limits = options.pop("limits", Limits())
        self.state: SessionState | None = None
        if options.pop("open", True):
            self.open(**options)

    def open(self, **options: Any) -> None:
        values = {"tests": (TEST,), "protocol": "OND", "domain": DOMAIN, "detector": "a", **options}
        [event] = self._decide(OpenSession(**values)).events
        self.state = open_state("s", event)

    def __call__(self, command: Command) -> Any:
        decision = self._decide(command)
        for event in decision.events:
            assert self.state is not None
            evolve(self.state, event)
        return decision.answer

    def _decide(self, command: Command):
        return decide(
            self.state,
            command,
            self.library,
            self.mode,
            NOW,
            limits=self.limits,
        )

    def refused(self, command: Command) -> tuple[int, str]:
        before = repr(self.state)
        with pytest.raises(ProtocolRefusal) as refusal:
            self(command)
        assert repr(self.state) == before, "a refusal changed the state"
        return refusal.value.status, refusal.value.reason

    def play(self, rounds: int = 3, test: str = TEST, value: float = 0.1) -> None:
        for number in range(rounds):
            self(Dataset(test, number))
            self.answer(number, test, value)

    def answer(self, number: int, test: str = TEST, value: float = 0.1) -> None:
        """What a round of an OND test needs before the next one."""
        ids = round_ids(number)
        files = {"detection": detection(ids, value)}
        if self.mode.strict:
            files["classification"] = classes(ids)
        self(Post(test, number, files))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_test(tmp_path)
    write_test(tmp_path, "OND.1.1.2")
    write_test(tmp_path, CONDDA, protocol="CONDDA")
    return tmp_path


@pytest.fixture
def strict(root: Path) -> Session:
    return Session(root, EVALUATION)


@pytest.fixture
def compat(root: Path) -> Session:
    return Session(root, PUBLISHED)


# Strict


def test_a_whole_strict_run(strict: Session) -> None:
    assert strict(Dataset(TEST, 0)) == b"img_0.png\nimg_1.png\nimg_2.png\n"
    ids = round_ids(0)
    strict(Post(TEST, 0, {"detection": detection(ids), "classification": classes(ids)}))
    strict(Dataset(TEST, 1))
    strict(Post(TEST, 1, {"detection": detection(round_ids(1))}))
    strict(Post(TEST, 1, {"classification": classes(round_ids(1))}))
    assert strict(Dataset(TEST, 2)) == b"img_6.png\nimg_7.png\n"
    strict.answer(2)
    for _ in range(5):
        assert strict.refused(Dataset(TEST, 3)) == (204, "EndOfDataset")
    strict(Post(TEST, 0, {"characterization": classes(IDS)}))
    strict(CompleteTest(TEST))
    assert strict(Latest()) == {"finished_tests": [TEST]}
    strict(Terminate())
    assert strict(Status())["terminated"] == NOW.isoformat()


@pytest.mark.parametrize("number", [1, 2, 3, 99, -1])
def test_strict_refuses_rounds_out_of_order(strict: Session, number: int) -> None:
    assert strict.refused(Dataset(TEST, number)) == (400, "RoundOrder")


def test_strict_wants_results_before_the_next_round(strict: Session) -> None:
    strict(Dataset(TEST, 0))
    assert strict.refused(Dataset(TEST, 1)) == (400, "RoundOrder")
    assert strict(Dataset(TEST, 0)) == strict(Dataset(TEST, 0))


def test_strict_serves_an_old_round_again_and_wipes_nothing(strict: Session) -> None:
    strict.play(2)
    strict(Dataset(TEST, 0))
    assert strict(Resume(TEST))["next_round"] == 2
    assert strict.refused(Post(TEST, 0, {"classification": classes(round_ids(0), 2)})) == (
        400,
        "ResultRepost",
    )


FORBIDDEN_POSTS = {
    "not served": (1, "detection", detection(round_ids(1)), "RoundNotServed"),
    "negative round": (-1, "detection", detection(round_ids(0)), "RoundNotServed"),
    "foreign id": (0, "detection", detection((*IDS[:2], "x.png")), "ForeignIds"),
    "future id": (0, "detection", detection(IDS[:4]), "ForeignIds"),
    "missing id": (0, "detection", detection(IDS[:2]), "MissingIds"),
    "repeated id": (0, "detection", detection((*IDS[:3], IDS[0])), "RepeatedIds"),
    "order": (0, "detection", detection(IDS[2::-1]), "WrongOrder"),
    "empty": (0, "detection", b"", "MissingIds"),
    "no value": (0, "detection", "".join(f"{i}\n" for i in IDS[:3]).encode(), "WrongColumns"),
    "three values": (0, "detection", classes(IDS[:3]), "WrongColumns"),
    "ragged": (0, "detection", b"img_0.png,1\nimg_1.png,1,0\nimg_2.png,1\n", "WrongColumns"),
    "nan": (0, "detection", b"img_0.png,nan\nimg_1.png,1\nimg_2.png,1\n", "NotFinite"),
    "infinite": (0, "detection", b"img_0.png,inf\nimg_1.png,1\nimg_2.png,1\n", "NotFinite"),
    "text": (0, "detection", b"img_0.png,a\nimg_1.png,1\nimg_2.png,1\n", "NotANumber"),
    "above one": (0, "detection", detection(IDS[:3], 1.5), "OutOfRange"),
    "below zero": (0, "detection", detection(IDS[:3], -0.5), "OutOfRange"),
    "K-1 classes": (0, "classification", classes(IDS[:3], columns=1), "WrongColumns"),
    "K+2 classes": (0, "classification", classes(IDS[:3], columns=4), "WrongColumns"),
    "unknown type": (0, "dreams", detection(IDS[:3]), "UnknownResultType"),
    "early characterization": (0, "characterization", classes(IDS), "RoundOrder"),
    "bad type name": (0, "../x", detection(IDS[:3]), "InvalidName"),
}


@pytest.mark.parametrize("case", FORBIDDEN_POSTS)
def test_strict_refuses_a_post(strict: Session, case: str) -> None:
    number, kind, body, reason = FORBIDDEN_POSTS[case]
    strict(Dataset(TEST, 0))
    assert strict.refused(Post(TEST, number, {kind: body})) == (400, reason)


def test_all_files_of_a_post_or_none(strict: Session) -> None:
    strict(Dataset(TEST, 0))
    files = {"detection": detection(IDS[:3]), "classification": classes(IDS[:2])}
    assert strict.refused(Post(TEST, 0, files)) == (400, "MissingIds")
    strict(Post(TEST, 0, {"detection": detection(IDS[:3], 0.7)}))


def test_strict_classification_keeps_its_columns(strict: Session) -> None:
    strict(Dataset(TEST, 0))
    ids = round_ids(0)
    files = {"detection": detection(ids), "classification": classes(ids, columns=2)}
    strict(Post(TEST, 0, files))
    strict(Dataset(TEST, 1))
    post = Post(TEST, 1, {"classification": classes(round_ids(1), columns=3)})
    assert strict.refused(post) == (400, "WrongColumns")


def test_condda_clusters_only_grow_and_no_refusal_tells_how_many_there_are(root: Path) -> None:
    session = Session(root, EVALUATION, tests=(CONDDA,), protocol="CONDDA")

    def post(number: int, columns: int) -> Post:
        ids = round_ids(number)
        files = {"detection": detection(ids), "characterization": classes(ids, columns=columns)}
        return Post(CONDDA, number, files)

    session(Dataset(CONDDA, 0))
    # known_classes is 2 here, of which images count one as unknown.
    assert session.refused(post(0, 1)) == (400, "WrongColumns")
    session(post(0, 4))
    session(Dataset(CONDDA, 1))
    assert session.refused(post(1, 3)) == (400, "WrongColumns")
    session(post(1, 40))  # max_novel_classes is 2


@pytest.mark.parametrize("mode", [EVALUATION, PUBLISHED], ids=["evaluation", "published"])
def test_the_same_post_again_is_one_result(root: Path, mode: Policy) -> None:
    session = Session(root, mode)
    session(Dataset(TEST, 0))
    ids = round_ids(0)
    post = Post(TEST, 0, {"detection": detection(ids), "classification": classes(ids)})
    session(post)
    assert session.state is not None
    before = session.state.seq
    for _ in range(3):
        session(post)
    assert session.state.seq == before
    other = Post(TEST, 0, {"detection": detection(ids, 0.2)})
    assert session.refused(other) == (400, "DetectionRepost")
    if mode == EVALUATION:
        other = Post(TEST, 0, {"classification": classes(ids, 2)})
        assert session.refused(other) == (400, "ResultRepost")


def test_strict_retry_of_the_last_post_after_the_next_round_was_served(strict: Session) -> None:
    strict.play(1)
    strict(Dataset(TEST, 1))
    strict(Post(TEST, 0, {"detection": detection(round_ids(0))}))


@pytest.mark.parametrize(
    "command",
    [
        Metadata("OND.1.1.2"),
        Dataset("OND.1.1.2", 0),
        Post("OND.1.1.2", 0, {"detection": b""}),
        Feedback("OND.1.1.2", "score"),
        CompleteTest("OND.1.1.2"),
        CheckEvaluable("OND.1.1.2"),
        Resume("OND.1.1.2"),
    ],
    ids=lambda command: type(command).__name__,
)
def test_strict_knows_only_the_tests_of_the_session(strict: Session, command: Command) -> None:
    assert strict.refused(command) == (400, "test_not_in_session")


@pytest.mark.parametrize(
    "command",
    [
        Metadata(TEST),
        Dataset(TEST, 0),
        Post(TEST, 0, {}),
        Feedback(TEST, "score"),
        CompleteTest(TEST),
        CheckEvaluable(TEST),
        Latest(),
        Terminate(),
        Status(),
        Resume(TEST),
    ],
    ids=lambda command: type(command).__name__,
)
def test_strict_knows_only_open_sessions(root: Path, command: Command) -> None:
    session = Session(root, EVALUATION, open=False)
    assert session.refused(command) == (400, "session_id_invalid")


def test_strict_completes_only_whole_tests(strict: Session) -> None:
    assert strict.refused(CompleteTest(TEST)) == (400, "TestIncomplete")
    strict.play(2)
    assert strict.refused(CompleteTest(TEST)) == (400, "TestIncomplete")
    strict(Dataset(TEST, 2))
    assert strict.refused(CompleteTest(TEST)) == (400, "TestIncomplete")


def test_strict_feedback_only_on_served_ids(strict: Session) -> None:
    strict.play(1, value=0.9)
    ask = Feedback(TEST, "detection", (IDS[0], IDS[3]))
    assert strict.refused(ask) == (400, "FeedbackIdsNotServed")
    assert strict.refused(Feedback(TEST, "detection", ("nothing",))) == (
        400,
        "FeedbackIdsNotServed",
    )
    assert strict.refused(Feedback(TEST, "detection", (IDS[0],), round=1)) == (
        400,
        "NotLastRound",
    )
    assert strict(Feedback(TEST, "detection", (IDS[0],), round=0)) == b"img_0.png,0\n"


def test_strict_feedback_waits_for_results_of_its_type(root: Path) -> None:
    session = Session(root, EVALUATION, tests=(CONDDA,), protocol="CONDDA")
    ids = round_ids(0)
    session(Dataset(CONDDA, 0))
    ask = Feedback(CONDDA, "classification", ids[:2])
    assert session.refused(ask) == (400, "ResultsMissing")
    files = {"detection": detection(ids, 0.9), "characterization": classes(ids)}
    session(Post(CONDDA, 0, files))
    # A label told is a label of what the agent has not classified.
    assert session.refused(ask) == (400, "FeedbackIdsNotServed")
    assert session(Feedback(CONDDA, "detection", ids[:1])) == b"img_0.png,0\n"


def test_the_red_light_declares_for_whoever_posts_no_detection(root: Path) -> None:
    session = Session(root, Policy(red_light=True), hints=("red_light",))
    for number, told in ((0, b""), (1, b"img_3.png,2\n")):
        session(Dataset(TEST, number))
        session(Post(TEST, number, {"classification": classes(round_ids(number))}))
        assert session(Feedback(TEST, "classification", (round_ids(number)[0],))) == told


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tests": ()}, (400, "EmptyFile")),
        ({"tests": ("nothing",)}, (500, "test_id_invalid")),
        ({"tests": (f"../{DOMAIN}/{TEST}",)}, (500, "test_id_invalid")),
        ({"tests": (TEST, TEST)}, (400, "RepeatedTests")),
        ({"protocol": "CONDDA"}, (500, "test_id_invalid")),
        ({"domain": "../OND/image_classification"}, (500, "test_id_invalid")),
        ({"hints": ("round_size=abc",)}, (400, "HintNotAllowed")),
        ({"hints": ("round_size=8", "feedback_max_ids=8")}, (400, "HintNotAllowed")),
        ({"hints": ("red_light",)}, (400, "HintNotAllowed")),
        ({"threshold": float("nan")}, (400, "InvalidThreshold")),
        ({"threshold": -1.0}, (400, "InvalidThreshold")),
        ({"detector": "x" * 513}, (400, "TooLarge")),
    ],
    ids=[
        *("no tests", "unknown test", "path", "twice", "protocol", "domain", "hint"),
        *("all rows", "red light", "nan", "threshold", "long name"),
    ],
)
def test_strict_refuses_a_session(root: Path, options: dict, expected: tuple[int, str]) -> None:
    session = Session(root, EVALUATION, open=False)
    with pytest.raises(ProtocolRefusal) as refusal:
        session.open(**options)
    assert (refusal.value.status, refusal.value.reason) == expected


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        (Limits(post_bytes=10), detection(IDS[:3])),
        (Limits(post_rows=2), detection(IDS[:3])),
        (Limits(post_columns=2), classes(IDS[:3])),
        (Limits(id_length=9), detection(["x" * 10])),
    ],
    ids=["bytes", "rows", "columns", "id"],
)
@pytest.mark.parametrize("mode", [EVALUATION, PUBLISHED], ids=["evaluation", "published"])
def test_limits(root: Path, mode: Policy, limits: Limits, body: bytes) -> None:
    session = Session(root, mode)
    session.limits = limits
    if mode == EVALUATION:
        session(Dataset(TEST, 0))
    assert session.refused(Post(TEST, 0, {"detection": body})) == (400, "TooLarge")


# Compat: the table of errors


def test_compat_unknown_session(root: Path) -> None:
    nobody = Session(root, PUBLISHED, open=False)
    assert nobody.refused(Metadata(TEST)) == (400, "session_id_invalid")
    assert nobody.refused(Dataset(TEST, 0)) == (400, "session_id_invalid")
    assert nobody.refused(Post(TEST, 0, {"detection": b"a,1\n"})) == (500, "KeyError")
    assert nobody.refused(Latest()) == (500, "KeyError")
    assert nobody.refused(CheckEvaluable(TEST)) == (400, "TestInProcess")
    assert nobody(CompleteTest(TEST)) is None and nobody(Terminate()) is None
    assert nobody.state is None


def test_compat_unknown_test(compat: Session) -> None:
    assert compat.refused(Metadata("nothing")) == (500, "metadata_not_found")
    assert compat.refused(Dataset("nothing", 0)) == (500, "test_id_invalid")
    assert compat(Post("nothing", 0, {"detection": b"a,1\n"})) is None
    assert compat(CompleteTest("nothing")) is None


def test_compat_test_outside_the_session(compat: Session) -> None:
    compat(Metadata("OND.1.1.2"))
    compat(Dataset("OND.1.1.2", 0))
    compat(Post("OND.1.1.2", 0, {"detection": detection(IDS[:3], 0.9)}))
    assert compat(Feedback("OND.1.1.2", "detection", IDS[:1])) == b"img_0.png,0\n"
    compat(CompleteTest("OND.1.1.2"))


def test_compat_rounds(compat: Session) -> None:
    assert compat(Dataset(TEST, 2)) == b"img_6.png\nimg_7.png\n"
    assert compat(Dataset(TEST, 2)) == compat(Dataset(TEST, 2))
    assert compat(Dataset(TEST, 1)) == b"img_3.png\nimg_4.png\nimg_5.png\n"
    assert compat(Dataset(TEST, -1)) == b"\n"
    for _ in range(5):
        assert compat.refused(Dataset(TEST, 3)) == (204, "EndOfDataset")
    assert compat.refused(Dataset(TEST, 10**9)) == (204, "EndOfDataset")
    assert compat.refused(Post(TEST, 10**30, {"detection": b""})) == (400, "TooLarge")


@pytest.mark.parametrize("size", [None, 0, -3], ids=["absent", "zero", "negative"])
def test_round_size_is_needed(root: Path, size: int | None) -> None:
    write_test(root, round_size=size)
    session = Session(root, PUBLISHED)
    assert session.refused(Dataset(TEST, 0)) == (400, "no_defined_rounds")
    session(Post(TEST, 0, {"detection": detection(IDS)}))


def test_compat_takes_what_published_agents_post(compat: Session) -> None:
    compat(Post(TEST, 0, {"detection": classes(IDS, columns=6)}))
    compat(Post(TEST, 5, {"detection": "".join(f"{i}\n" for i in IDS).encode()}))
    compat(Post(TEST, 1, {"characterization": classes(IDS)}))
    compat(Post(TEST, 2, {"characterization": classes(IDS)}))
    compat(Post(TEST, 2, {"characterization": classes(IDS, 2)}))
    compat(Post(TEST, 2, {"whatever": b"not,a,number\nx\n"}))
    compat(Post(TEST, 3, {"detection": b"foreign,words\n"}))
    assert compat.refused(Post(TEST, 3, {})) == (400, "MissingParamsError")
    assert compat.refused(Post(TEST, 4, {"detection": b"\xff\xfe"})) == (500, "UnicodeDecodeError")
    huge = b'a,"' + b"x" * 200_000 + b'"\n'
    assert compat.refused(Post(TEST, 4, {"detection": huge})) == (400, "InvalidCsv")


def test_compat_completed_test(compat: Session) -> None:
    compat(CompleteTest(TEST))
    for command in (
        Dataset(TEST, 0),
        Post(TEST, 0, {"detection": b"a,1\n"}),
        CompleteTest(TEST),
        Feedback(TEST, "score"),
    ):
        assert compat.refused(command) == (400, "TestCompleted")
    assert compat(Metadata(TEST))["round_size"] == 3
    compat(CheckEvaluable(TEST))


@pytest.mark.parametrize("mode", [EVALUATION, PUBLISHED], ids=["evaluation", "published"])
def test_terminated_session(root: Path, mode: Policy) -> None:
    session = Session(root, mode)
    session(Dataset(TEST, 0))
    session(Terminate())
    for command in (
        Metadata(TEST),
        Dataset(TEST, 0),
        Post(TEST, 0, {"detection": b"a,1\n"}),
        Feedback(TEST, "score"),
        CompleteTest(TEST),
        Latest(),
        Terminate(),
    ):
        assert session.refused(command) == (400, "SessionEnded")
    session(CheckEvaluable(TEST, devmode=True))
    session(Status())


def test_latest_without_a_finished_test(compat: Session, strict: Session) -> None:
    assert compat.refused(Latest()) == (500, "KeyError")
    assert strict(Latest()) == {"finished_tests": []}


def test_evaluate_an_uncompleted_test(compat: Session) -> None:
    assert compat.refused(CheckEvaluable(TEST)) == (400, "TestInProcess")
    compat(CheckEvaluable(TEST, devmode=True))


def test_compat_bad_hint_opens_and_fails_later(root: Path) -> None:
    session = Session(root, PUBLISHED, hints=("round_size=abc",))
    assert session.refused(Metadata(TEST)) == (500, "ValueError")
    assert session.refused(Dataset(TEST, 0)) == (500, "ValueError")
    session(Post(TEST, 0, {"detection": detection(IDS)}))


def test_metadata_shows_the_allowed_keys_only(root: Path) -> None:
    shown = Session(root, PUBLISHED, hints=("seed=9", "known_classes=5", "odd"))(Metadata(TEST))
    assert shown == {
        "protocol": "OND",
        "known_classes": 5,
        "max_novel_classes": 2,
        "round_size": 3,
        "feedback_max_ids": 2,
    }
    hinted = Session(root, PUBLISHED, hints=("red_light",))(Metadata(TEST))
    assert hinted["red_light"] == IDS[4]


def test_hints_reach_shown_metadata_only(root: Path) -> None:
    hints = ("feedback_constrained=0", "seed=abc", "feedback_max_ids=100")
    session = Session(root, PUBLISHED, hints=hints)
    session.play(2, value=0.9)
    assert session(Feedback(TEST, "detection")).count(b"\n") == 3


def test_compat_round_zero_again_restarts(compat: Session) -> None:
    compat(Dataset(TEST, 0))
    compat(Dataset(TEST, 0))
    assert compat.state is not None and compat.state.test(TEST).attempt == 0
    compat(Post(TEST, 0, {"detection": detection(IDS[:3], 0.9)}))
    assert compat(Feedback(TEST, "detection")) != b""
    compat(Dataset(TEST, 0))
    test = compat.state.test(TEST)
    assert (test.attempt, test.served, test.posted, test.highest) == (1, {0}, {}, None)
    assert test.spent == {}
    compat(Post(TEST, 0, {"detection": detection(IDS[:3], 0.2)}))


# Feedback


def test_feedback_gate_in_order(compat: Session) -> None:
    compat(Dataset(TEST, 0))
    assert compat.refused(Feedback(TEST, "dreams")) == (400, "InvalidFeedbackType")
    assert compat.refused(Feedback(TEST, "score")) == (500, "KeyError")
    compat(Post(TEST, 0, {"classification": classes(IDS[:3])}))
    assert compat.refused(Feedback(TEST, "score")) == (400, "DetectionPostRequired")
    # The threshold itself is not above it.
    compat(Post(TEST, 0, {"detection": detection(IDS[:3], 0.5)}))
    assert compat(Feedback(TEST, "score")) == b""
    assert compat(Feedback(TEST, "detection", IDS[:1])) == b""
    assert compat(Feedback(TEST, "classification", IDS[:1])) == b"img_0.png,1\n"
    compat(Post(TEST, 1, {"detection": detection(IDS[3:4], 0.51)}))
    compat(Post(TEST, 2, {"detection": detection(IDS[4:5], 0.0)}))
    assert compat(Feedback(TEST, "score")) == f"accuracy,{2 / 3}\n".encode()


def test_feedback_budget_is_per_round_and_type(compat: Session) -> None:
    compat(Dataset(TEST, 0))
    compat(Post(TEST, 0, {"detection": detection(IDS[:3], 0.9)}))
    assert (
        compat(Feedback(TEST, "detection", IDS[2:0:-1] + IDS[:1])) == b"img_0.png,0\nimg_1.png,0\n"
    )
    assert compat.refused(Feedback(TEST, "detection", IDS[:1])) == (400, "FeedbackBudgetExceeded")
    assert compat(Feedback(TEST, "classification", IDS[:1])) == b"img_0.png,1\n"
    assert compat(Feedback(TEST, "classification", IDS[1:3])) == b"img_1.png,2\n"
    compat(Dataset(TEST, 1))
    compat(Post(TEST, 1, {"detection": detection(IDS[3:6], 0.9)}))
    assert compat(Feedback(TEST, "detection")) == b"img_3.png,0\nimg_4.png,1\n"


def test_detection_feedback_has_its_own_budget(root: Path) -> None:
    write_test(root, max_detection_feedback_ids=3)
    session = Session(root, PUBLISHED)
    session.play(1, value=0.9)
    assert session(Feedback(TEST, "detection")).count(b"\n") == 3


def test_a_test_without_budget_gives_no_budgeted_feedback(root: Path) -> None:
    write_test(root, feedback_max_ids=None)
    session = Session(root, PUBLISHED)
    session.play(1, value=0.9)
    assert session.refused(Feedback(TEST, "detection")) == (400, "FeedbackBudgetExceeded")


def test_given_detection_opens_the_gate_at_the_red_light(root: Path) -> None:
    session = Session(root, PUBLISHED, hints=("red_light",))
    session.play(1)
    assert session(Feedback(TEST, "detection")) == b""
    session(Dataset(TEST, 1))
    session(Post(TEST, 1, {"detection": detection(round_ids(1))}))
    told = session(Feedback(TEST, "detection"))
    assert told == b"img_3.png,0\nimg_4.png,1\nimg_5.png,1\n"
    # All of the round, whatever the budget; but then it is spent, as published.
    assert session.refused(Feedback(TEST, "detection")) == (400, "FeedbackBudgetExceeded")


def test_system_detection_does_not_open_at_the_red_light(compat: Session) -> None:
    compat.play(2)
    assert compat(Feedback(TEST, "detection")) == b""


def test_future_ids_are_left_out(compat: Session) -> None:
    compat.play(1, value=0.9)
    asked = (IDS[0], IDS[7], "nothing")
    assert compat(Feedback(TEST, "detection", asked)) == b"img_0.png,0\n"


def test_compat_feedback_on_posted_ids_without_a_data_request(compat: Session) -> None:
    compat(Post(TEST, 0, {"detection": detection(IDS[:5], 0.9)}))
    assert compat(Feedback(TEST, "detection", (IDS[4], IDS[6]))) == b"img_4.png,1\n"


def test_score_counts_the_last_answer_of_an_instance(compat: Session) -> None:
    compat(Post(TEST, 0, {"detection": detection(IDS, 0.9), "classification": classes(IDS, 1)}))
    first = LABELS.count(1) / len(LABELS)
    assert compat(Feedback(TEST, "score")) == f"accuracy,{first}\n".encode()
    compat(Post(TEST, 1, {"classification": classes(IDS, 2)}))
    second = LABELS.count(2) / len(LABELS)
    assert compat(Feedback(TEST, "score")) == f"accuracy,{second}\n".encode()


def test_a_line_without_values_is_not_the_right_answer(compat: Session) -> None:
    novel = LABELS.index(-1)
    body = f"{IDS[novel]}\n".encode()
    compat(Post(TEST, 0, {"detection": detection(IDS, 0.9), "classification": body}))
    assert compat(Feedback(TEST, "score")) == b"accuracy,0.0\n"


def test_unconstrained_feedback_covers_all_posted_lines(root: Path) -> None:
    write_test(root, feedback_constrained=False, feedback_max_ids=100)
    session = Session(root, PUBLISHED)
    session.play(2, value=0.9)
    assert session(Feedback(TEST, "detection")).count(b"\n") == 6


ACTIVITY = "vid,novel,detection,activity,spatial,temporal," + ",".join(
    f"kinetics_id_{n}" for n in range(5)
)


def test_activity_feedback(root: Path) -> None:
    rows = [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 1, 3)]
    truth = ACTIVITY + "\n"
    for row, (novel, changed, label) in enumerate(rows):
        names = ",".join(f"k{row}{n}" for n in range(5))
        truth += f"v{row},{novel},{changed},{label},0,0,{names}\n"
    options = {"domain": "activity_recognition", "truth": truth, "round_size": 4}
    write_test(root, "A", known_classes=3, **options)
    session = Session(root, PUBLISHED, tests=("A",), domain="activity_recognition")
    ids = [f"v{row}" for row in range(4)]
    session(Dataset("A", 0))
    body = classes(ids, [1, 0, 1, 0], columns=4)
    session(Post("A", 0, {"detection": detection(ids, 0.9), "classification": body}))
    assert session(Feedback("A", "classification", ("v2",))) == b"v2,k20,k21,k22,k23,k24\n"
    assert session(Feedback("A", "detection", ("v2", "v3"))) == b"v2,0\nv3,1\n"
    assert session(Feedback("A", "labels")) == b"v1,2\nv3,3\n"  # only those answered wrongly
    assert session(Feedback("A", "score")) == b"accuracy,0.5\n"


def test_activity_without_kinetics_names(root: Path) -> None:
    """As the public server answers for its own test without them: ids and nothing."""
    truth = "vid,novel,detection,activity\nv0,0,0,1\nv1,0,0,1\n"
    write_test(root, "A", domain="activity_recognition", truth=truth)
    session = Session(root, PUBLISHED, tests=("A",), domain="activity_recognition")
    session(Dataset("A", 0))
    session(Post("A", 0, {"detection": b"v0,1\nv1,1\n"}))
    assert session(Feedback("A", "classification", ("v1", "v0"))) == b"v0,\nv1,\n"


def test_transcription_feedback_is_an_edit_distance(root: Path) -> None:
    truth = "file,text,novel,representation,detection,writer_id\n"
    truth += "a.png,|one, two|,0,x,0,1\nb.png,|three|,1,x,1,9\n"
    write_test(root, "T", domain="transcripts", truth=truth, known_classes=4)
    session = Session(root, PUBLISHED, tests=("T",), domain="transcripts")
    session(Dataset("T", 0))
    files = {
        "detection": b"a.png,0.9\nb.png,0.9\n",
        "transcription": b'a.png,"one, tvo"\nb.png,tree\n',
    }
    session(Post("T", 0, files))
    assert session(Feedback("T", "transcription")) == b"a.png,1\nb.png,1\n"
    assert session(Feedback("T", "classification", ("b.png",))) == b"b.png,4\n"  # never above K


@pytest.mark.parametrize(
    ("posted", "distance"),
    [("one, two", 0), ("one; two", 1), ("one  two", 1), ("one, two.", 3), ("o-ne, two", 3)],
)
def test_transcriptions_are_compared_as_published(root: Path, posted: str, distance: int) -> None:
    truth = "file,text,novel,representation,detection,writer_id\n"
    truth += "a.png,|one, two|,0,x,0,1\nb.png,|three|,1,x,1,9\n"
    write_test(root, "T", domain="transcripts", truth=truth, round_size=1)
    session = Session(root, PUBLISHED, tests=("T",), domain="transcripts")
    session(Post("T", 0, {"detection": b"a.png,1\n", "transcription": b"b.png,x\n"}))
    session(Post("T", 1, {"transcription": f'a.png,"{posted}"\n'.encode()}))
    # Only the last round posted is told of, whatever is asked.
    answer = session(Feedback("T", "transcription", ("a.png", "b.png")))
    assert answer == f"a.png,{distance}\n".encode()


def write_nlt(root: Path, **metadata: Any) -> None:
    head = "instanceid,text,reported_writer_id,real_writer_id,sentiment,product,n,m,text_id\r\n"
    rows = (
        "i0,|a, b|,1,1,pos,p,0,0,t0\r\n",
        "i1,|c|,1,2,neg,p,1,1,t1\r\n",
        "i2,|d|,3,3,neg,p,1,0,t2\r\n",
        "i3,|e|,3,4,neg,p,1,1,t3\r\n",
    )
    metadata = {"round_size": 2, "feedback_max_ids": 2, **metadata}
    write_test(root, "N", domain="nlt", truth=head + "".join(rows), encoding="utf-16", **metadata)


def test_nlt_score_counts_flag_and_writer_at_each_question(root: Path) -> None:
    write_nlt(root, feedback_max_ids=3)
    session = Session(root, PUBLISHED, tests=("N",), domain="nlt")
    assert session(Dataset("N", 0)).decode("utf-16") == "i0,1,|a, b|,pos,p\ni1,1,|c|,neg,p\n"
    ids = ("i0", "i1")
    # Flag 1: the reported writer is the real one. Right: both of i0, the writer of i1.
    session(Post("N", 0, {"labels": b"i0,1,1\ni1,1,2\n", "detection": detection(ids, 0.9)}))
    assert session(Feedback("N", "score")) == b"current_score,3\n"
    assert session(Feedback("N", "score")) == b"current_score,6\n"
    assert session(Feedback("N", "labels", ("i0", "i1"))) == b"i0,1\ni1,2\n"  # two points
    assert session(Feedback("N", "score")) == b"current_score,7\n"
    assert session.refused(Feedback("N", "score")) == (400, "FeedbackBudgetExceeded")
    session(Post("N", 1, {"labels": b"i2,0,9\ni3,0,4\n"}))
    # The last round alone counts; without ids labels are told of those with a wrong writer.
    assert session(Feedback("N", "score")) == b"current_score,9\n"
    assert session(Feedback("N", "labels")) == b"i2,3\n"
    session(Post("N", 2, {"labels": b"i2,yes,3\n"}))
    assert session.refused(Feedback("N", "score")) == (400, "InvalidTuple")


@pytest.mark.parametrize("mode", [EVALUATION, PUBLISHED], ids=["evaluation", "published"])
def test_nlt_feedback_is_gated_and_budgeted(root: Path, mode: Policy) -> None:
    write_nlt(root)
    session = Session(root, mode, tests=("N",), domain="nlt")
    session(Dataset("N", 0))
    session(Post("N", 0, {"labels": b"i0,1,1\ni1,1,2\n"}))
    kinds = ("score", "labels", "detection")
    for kind in kinds:
        assert session.refused(Feedback("N", kind, ("i1",))) == (400, "DetectionPostRequired")
    lines = {"detection": b"i0,0.1,0.9\ni1,0.1,0.9\n"}
    session(Post("N", 0, {**lines, "classification": b"i0,0.1,0.9\ni1,0.1,0.9\n"}))
    assert [session(Feedback("N", kind, ("i1",))) for kind in kinds] == [b""] * 3
    session(Dataset("N", 1))
    lines = {"labels": b"i2,1,3\ni3,1,4\n", "detection": b"i2,0.9,0.9\ni3,0.9,0.9\n"}
    session(Post("N", 1, {**lines, "classification": b"i2,0.1,0.9\ni3,0.1,0.9\n"}))
    # Without ids: those whose second value is on the wrong side of 0.5.
    assert session(Feedback("N", "detection")) == b"i2,0\n"
    assert session(Feedback("N", "detection", ("i2", "i3"))).startswith(b"i2,0\n")
    assert session.refused(Feedback("N", "detection")) == (400, "FeedbackBudgetExceeded")
    assert session(Feedback("N", "labels", ("i0", "i1"))) == b"i0,1\ni1,2\n"
    assert session.refused(Feedback("N", "labels", ("i2",))) == (400, "FeedbackBudgetExceeded")


# What the operator decides


def test_evaluation_tells_neither_the_change_nor_the_number_of_classes(root: Path) -> None:
    write_test(root, pre_novelty_batches=1, pre_novelty_training=1)
    told = {"pre_novelty_batches", "pre_novelty_training", "max_novel_classes"}
    assert told <= set(Session(root, PUBLISHED)(Metadata(TEST)))
    shown = Session(root, EVALUATION)(Metadata(TEST))
    assert shown == {
        "protocol": "OND",
        "known_classes": 2,
        "round_size": 3,
        "feedback_max_ids": 2,
    }


def test_the_operator_fixes_rounds_budgets_and_hints(root: Path) -> None:
    policy = Policy(red_light=True, round_size=4, feedback_max_ids=1, detection_threshold=0.6)
    session = Session(root, policy, hints=("red_light",), threshold=0.6)
    shown = session(Metadata(TEST))
    assert (shown["round_size"], shown["feedback_max_ids"]) == (4, 1)
    assert shown["red_light"] == IDS[4]
    assert session(Dataset(TEST, 0)).decode().split() == list(IDS[:4])
    files = {"detection": detection(IDS[:4], 0.9), "classification": classes(IDS[:4])}
    session(Post(TEST, 0, files))
    assert session(Feedback(TEST, "detection")).count(b"\n") == 1  # with a red light, too
    session.mode = EVALUATION  # the operator changed her mind: the session goes on as it was opened
    assert session(Dataset(TEST, 1)).decode().split() == list(IDS[4:])


def test_evaluation_gives_no_image_labels_before_novelty_is_declared(root: Path) -> None:
    for mode, expected in ((PUBLISHED, b"img_0.png,1\n"), (EVALUATION, b"")):
        session = Session(root, mode)
        session(Dataset(TEST, 0))
        ids = round_ids(0)
        session(Post(TEST, 0, {"detection": detection(ids), "classification": classes(ids)}))
        assert session(Feedback(TEST, "classification", (IDS[0],))) == expected


# Metadata


def test_a_red_light_may_be_a_number(root: Path) -> None:
    truth = "id,detection,classification\n" + "".join(f"{n},{n >= 3:d},1\n" for n in range(8))
    write_test(root, truth=truth, red_light=3)
    session = Session(root, PUBLISHED, hints=("red_light",))
    assert session(Metadata(TEST))["red_light"] == 3
    session(Post(TEST, 0, {"detection": b"0,0.1\n"}))
    assert session(Feedback(TEST, "detection", ("0",))) == b""
    session(Post(TEST, 1, {"detection": b"3,0.1\n"}))
    assert session(Feedback(TEST, "detection", ("3",))) == b"3,1\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round_size", "many"),
        ("known_classes", 2.5),
        ("feedback_max_ids", [2]),
        ("max_novel_classes", True),
        ("red_light", {"row": 4}),
        ("feedback_constrained", "no"),
        ("known_class_names", "cat"),
        ("novel_class_names", ["dog"]),
    ],
)
def test_types_of_metadata_are_checked_when_read(root: Path, key: str, value: object) -> None:
    write_test(root, **{key: value})
    with pytest.raises(SourceError, match=f"{key} is .*, expected"):
        TestLibrary(root).load(TEST, "OND", DOMAIN)
    assert Session(root, PUBLISHED).refused(Metadata(TEST)) == (500, "SourceError")


def test_our_own_domain_has_both_flags(root: Path) -> None:
    truth = "instance_id,novel,detection,classification\na,0,0,1\nb,0,1,2\nc,1,1,-1\n"
    write_test(root, "V", domain="novelty", protocol="CONDDA", truth=truth)
    session = Session(root, EVALUATION, tests=("V",), domain="novelty", protocol="CONDDA")
    assert session(Dataset("V", 0)) == b"a\nb\nc\n"
    ids = ["a", "b", "c"]
    files = {
        "detection": detection(ids, 0.9),
        "classification": classes(ids, [1, 2, 0]),
        "characterization": classes(ids, [1, 2, 4], columns=5),
    }
    session(Post("V", 0, files))
    assert session(Feedback("V", "detection", ("b", "c"))) == b"b,0\nc,1\n"
    assert session(Feedback("V", "classification", ("c",))) == b"c,-1\n"
    session(CompleteTest("V"))


# Cost


def test_the_thousandth_post_is_as_much_work_as_the_first(tmp_path: Path) -> None:
    ids = [f"i{row}" for row in range(1_000)]
    truth = "id,detection,classification\n" + "".join(f"{name},0,1\n" for name in ids)
    write_test(tmp_path / "data", truth=truth, round_size=1)
    store = EventStore(tmp_path / "events.sqlite")
    store._connection.execute("pragma synchronous = off")
    harness = Harness(TestLibrary(tmp_path / "data"), store, EVALUATION)
    session = harness.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="a"
    )

    def turn(number: int) -> None:
        about = {"test_id": TEST, "round_id": number, "session_id": session}
        harness.dataset_request(**about)
        name = [ids[number]]
        files = {"detection": detection(name, 0.9), "classification": classes(name)}
        harness.post_results(result_files=files, **about)
        about.pop("round_id")
        harness.get_feedback_request(feedback_ids=None, feedback_type="score", **about)

    costs = {}
    for number in range(1_000):
        if number in (1, 999):
            costs[number] = work(store, lambda number=number: turn(number))
        else:
            turn(number)
    steps, calls = zip(costs[1], costs[999], strict=True)
    assert steps[0] > 50 and calls[0] > 50, "nothing was counted"
    assert steps[1] <= 1.05 * steps[0]
    assert calls[1] <= 1.05 * calls[0]


def work(store: EventStore, action: Callable[[], None]) -> tuple[int, int]:
    """Steps of SQLite's machine and calls of Python functions while `action` runs."""
    steps = calls = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        # The counting itself is called too.
        calls += event in ("call", "c_call") and frame.f_code is not step.__code__

    store._connection.set_progress_handler(step, 1)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        store._connection.set_progress_handler(None, 1)
    return steps, calls
