"""The event store: order, conflicts, doubled results, export, damage."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import LakeError
from tasks.condda.commands import Event
from tasks.condda.store import Conflict, EventStore, _Append

OPENED = Event("opened", "2024-05-01", detail={"tests": ["a"]})


def posted(kind: str = "detection", number: int = 0, sha: str = "x", attempt: int = 0) -> Event:
    return Event(
        "posted", "2024-05-01", "a", attempt, number, kind, sha, {"rows": [0]}, b"\x00,1\xff\n"
    )


@pytest.fixture
def store(tmp_path: Path) -> EventStore:
    return EventStore(tmp_path / "events.sqlite")


def test_what_went_in_comes_out(store: EventStore) -> None:
    assert store.append("s", 0, [OPENED, posted()]) == 2
    loaded = store.load("s", bodies=True)
    assert [stored.event for stored in loaded] == [OPENED, posted()]
    assert [stored.seq for stored in loaded] == [1, 2]
    assert store.load("s")[1].event.body is None
    assert [stored.seq for stored in store.load("s", 1)] == [2]
    assert store.load("s", kind="posted", test="a", round=0, type="detection", attempt=0)
    assert not store.load("s", test="b") and not store.load("other")
    with pytest.raises(ValueError, match="no filter"):
        store.load("s", colour="red")


def test_a_stale_writer_is_told_and_writes_nothing(store: EventStore) -> None:
    store.append("s", 0, [OPENED])
    store.append("s", 1, [posted()])
    for expected in (0, 1, 3):
        with pytest.raises(Conflict):
            store.append("s", expected, [posted(number=1)])
    assert len(store.load("s")) == 2


@pytest.mark.parametrize(
    ("second", "allowed"),
    [
        (posted(), False),
        (posted(sha="y"), False),
        (posted(sha="y", attempt=1), True),
        (posted(attempt=1), True),
        (posted(number=1), True),
        (posted("classification"), True),
    ],
    ids=["same", "other detection", "restarted", "restarted same", "other round", "other type"],
)
def test_a_doubled_result_is_impossible(store: EventStore, second: Event, allowed: bool) -> None:
    store.append("s", 0, [OPENED, posted()])
    if allowed:
        assert store.append("s", 2, [second]) == 3
        return
    with pytest.raises(Conflict):
        store.append("s", 2, [posted(number=7), second])
    assert len(store.load("s")) == 2, "half of a refused append was kept"


def test_other_types_may_be_posted_twice_with_other_content(store: EventStore) -> None:
    store.append("s", 0, [OPENED, posted("classification"), posted("classification", sha="y")])
    with pytest.raises(Conflict):
        store.append("s", 3, [posted("classification", sha="y")])


def test_sessions_of_all_and_of_an_owner(store: EventStore) -> None:
    for name in ("s", "t"):
        store.append(name, 0, [OPENED])
    store.append("s", 1, [posted()])
    assert store.sessions() == ["s", "t"] and store.session_count() == 2
    mine = Event("opened", "2024-05-01T00:00:01+00:00", detail={"owner": "alice"})
    store.append("u", 0, [mine])
    assert [stored.session for stored in store.opened("alice")] == ["u"]
    assert [stored.session for stored in store.opened("")] == ["s", "t"]
    assert store.load("s", bodies=True)[1].event.body == b"\x00,1\xff\n"
    assert store.last_time("u") == mine.time
    assert [stored.session for stored in store.of_kinds(["opened"])] == ["s", "t", "u"]


def test_events_are_on_the_disk_before_append_returns(store: EventStore) -> None:
    mode = store._connection.execute("pragma journal_mode").fetchone()[0]
    synchronous = store._connection.execute("pragma synchronous").fetchone()[0]
    assert (mode, synchronous) == ("wal", 2)


def test_nothing_is_ever_changed_or_deleted() -> None:
    text = (Path(__file__).parents[2] / "tasks" / "condda" / "store.py").read_text().lower()
    assert not any(word in text for word in ("update events", "delete from", "insert or", "drop "))


def test_writers_of_one_session_take_turns(tmp_path: Path) -> None:
    stores = [EventStore(tmp_path / "events.sqlite") for _ in range(4)]
    stores[0].append("s", 0, [OPENED])
    won: list[int] = []

    def write(store: EventStore) -> None:
        for number in range(40):
            try:
                won.append(store.append("s", len(store.load("s")), [posted(number=number)]))
            except Conflict:
                continue

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seqs = [stored.seq for stored in stores[0].load("s")]
    assert seqs == list(range(1, len(won) + 2)) and sorted(won) == seqs[1:]
    rounds = [stored.event.round for stored in stores[0].load("s", kind="posted")]
    assert len(set(rounds)) == len(rounds)


def test_appends_that_wait_share_one_commit(store: EventStore) -> None:
    commits: list[str] = []
    store.append("s", 0, [OPENED])
    store.append("t", 0, [OPENED])
    store._connection.set_trace_callback(
        lambda statement: commits.append(statement) if statement == "commit" else None
    )
    answers: dict[str, object] = {}

    def write(session: str, *events: Event) -> None:
        try:
            answers[session] = store.append(session, 1, events)
        except Conflict as error:
            answers[session] = error

    # The last one is refused by an index: half of it must not be kept, the others must.
    writes = [("s", posted()), ("t", posted()), ("u", posted()), ("v", OPENED)]
    threads = [threading.Thread(target=write, args=each) for each in writes]
    threads.append(threading.Thread(target=write, args=("t2", posted(), posted())))
    with store._lock:
        for thread in threads:
            thread.start()
        while len(store._waiting) < len(threads):
            pass
    for thread in threads:
        thread.join()
    assert len(commits) == 1
    assert (answers["s"], answers["t"]) == (2, 2)
    for session in ("u", "v", "t2"):
        assert isinstance(answers[session], Conflict) and not store.load(session)
    assert [len(store.load(session)) for session in ("s", "t")] == [2, 2]


def test_one_of_a_batch_is_undone_alone(store: EventStore) -> None:
    batch = [_Append("s", 0, []), _Append("t", 0, [])]
    row = ("s", 1, "2024", "opened", None, 0, None, None, None, "{}", None)
    twice = ("t", 1, "2024", "posted", "a", 0, 0, "detection", "x", "{}", b"")
    batch[0].rows, batch[1].rows = [row], [twice, ("t", 2, *twice[2:])]
    store._commit(batch)
    assert batch[0].error is None and isinstance(batch[1].error, Conflict)
    assert len(store.load("s")) == 1 and not store.load("t")


def test_an_interrupted_commit_tells_all_that_waited(store: EventStore) -> None:
    class Rows(list[tuple]):
        def __iter__(self) -> Iterator[tuple]:
            raise KeyboardInterrupt

    row = ("s", 1, "2024", "opened", None, 0, None, None, None, "{}", None)
    batch = [_Append("s", 0, [row]), _Append("t", 0, Rows())]
    with pytest.raises(KeyboardInterrupt):
        store._commit(batch)
    assert all(isinstance(each.error, LakeError) and each.done for each in batch)
    assert not store.load("s") and store.append("s", 0, [OPENED]) == 1


def test_readers_wait_for_no_writer(store: EventStore) -> None:
    store.append("s", 0, [OPENED])
    with store.writing() as connection:
        connection.execute(
            "insert into events (session, seq, time, kind, attempt, detail) "
            "values ('t', 1, '2024', 'opened', 0, '{}')"
        )
        answer: list[int] = []
        reader = threading.Thread(target=lambda: answer.append(store.session_count()))
        reader.start()
        reader.join(30)
        assert answer == [1], "it waited, or saw what was not committed"
    assert store.session_count() == 2


def test_a_file_that_is_no_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "events.sqlite").write_bytes(b"not a database, but long enough to be read" * 100)
    with pytest.raises(LakeError, match="cannot open the event store"):
        EventStore(tmp_path / "events.sqlite")
    with pytest.raises(LakeError, match="cannot open the event store"):
        EventStore(tmp_path / "missing" / "events.sqlite")


def test_a_full_disk_is_said_and_the_store_goes_on(store: EventStore) -> None:
    store.append("s", 0, [OPENED])
    pages = store._connection.execute("pragma page_count").fetchone()[0]
    store._connection.execute(f"pragma max_page_count = {pages}")
    big = Event("posted", "t", "a", 0, 0, "detection", "x", {}, b"1" * 1_000_000)
    with pytest.raises(LakeError, match="cannot write the event store"):
        store.append("s", 1, [big])
    store._connection.execute("pragma max_page_count = 1000000")
    assert store.append("s", 1, [big]) == 2


def test_a_reader_sees_whole_appends_only(store: EventStore) -> None:
    with sqlite3.connect(store.path) as reader:
        store.append("s", 0, [OPENED, posted(), posted(number=1)])
        assert reader.execute("select count(*) from events").fetchone()[0] == 3
