"""Many clients and many rounds: every answer is right, every post is kept, memory stays flat."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import condda_server
from benchmarks.condda_server import Client, cpu_seconds, play, server, write_data
from tasks.condda.store import EVENTS, EventStore


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[str, int]]:
    write_data(tmp_path / "data")
    with server(tmp_path / "data", tmp_path / "state") as place:
        yield place


def resident_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.parametrize(
    ("clients", "rounds"), [(25, 2), pytest.param(200, 10, marks=pytest.mark.slow)]
)
def test_many_clients(started: tuple[str, int], tmp_path: Path, clients: int, rounds: int) -> None:
    url, pid = started
    speed, seconds = play(url, clients, rounds)
    assert speed > 0 and len(seconds) == 3 * clients * rounds and cpu_seconds(pid) > 0
    store = EventStore(tmp_path / "state" / EVENTS)
    sessions = store.sessions()
    assert len(sessions) == clients
    for session in sessions:
        events = [stored.event for stored in store.load(session)]
        kinds = ("served", "detection", "characterization")
        assert [(event.round, event.type or event.kind) for event in events[1:]] == [
            (number, kind) for number in range(rounds) for kind in kinds
        ]


@pytest.mark.parametrize("rounds", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(started: tuple[str, int], rounds: int) -> None:
    url, pid = started
    play(url, 4, 50)  # reads the test, fills what is kept of pages and threads
    before = resident_megabytes(pid)
    client = Client(url)
    for number in range(rounds):
        if number and number % condda_server.ROUNDS == 0:
            client.end()
            client = Client(url)
        client.play_round(number % condda_server.ROUNDS)
    client.end()
    assert resident_megabytes(pid) - before < 24
