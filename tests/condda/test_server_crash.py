"""A real server process killed with -9 under load: nothing lost, nothing doubled, clients go on."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import SourceError
from tasks.condda.commands import ProtocolRefusal
from tasks.condda.server.client import HttpHarness
from tasks.condda.server.serve import make_harness
from tests.condda.small import DOMAIN, TEST, write_test

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from pathlib import Path
from tasks.condda.server.serve import serve

folder, port = Path(sys.argv[1]), int(sys.argv[2])
serve(folder / "data", folder / "state", port=port)
"""
AGENTS = 4
ROUNDS_BETWEEN_KILLS = 8
KILLS = 3


class ServerProcess:
    """A server in a process of its own, on one port over its lives."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(self.folder), str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.url in line, f"the server did not start: {line!r}"

    def stop(self, how: int) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(how)
        self.process.stdout.close()
        return self.process.wait(timeout=20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_test(tmp_path / "data")
    started = ServerProcess(tmp_path)
    started.start()
    yield started
    if started.process is not None and started.process.poll() is None:
        started.stop(signal.SIGKILL)


def opened(client: HttpHarness) -> str:
    return client.session_request(
        test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="agent-1"
    )


def body(agent: int, number: int) -> bytes:
    return f"img_{agent}.png,0.{number:05d}\n".encode()


class Agent(threading.Thread):
    """Posts round after round, whatever happens to the server, until told to stop."""

    def __init__(self, url: str, agent: int):
        super().__init__()
        self.agent = agent
        self.client = HttpHarness(url, patience=60)
        self.session = opened(self.client)
        self.posted = 0
        self.enough = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.enough.is_set():
                self.client.post_results(
                    result_files={
                        "detection": body(self.agent, self.posted),
                        "characterization": body(self.agent, self.posted),
                    },
                    test_id=TEST,
                    round_id=self.posted,
                    session_id=self.session,
                )
                self.posted += 1
            self.client.complete_test(session_id=self.session, test_id=TEST)
        except Exception as error:
            self.error = error


def wait_for(agents: list[Agent], rounds: int) -> None:
    pause = threading.Event()
    while not all(agent.posted >= rounds for agent in agents):
        assert all(agent.is_alive() for agent in agents), [agent.error for agent in agents]
        pause.wait(0.01)


def test_kill_9_loses_and_doubles_nothing(server: ServerProcess) -> None:
    agents = [Agent(server.url, number) for number in range(AGENTS)]
    for agent in agents:
        agent.start()
    try:
        for kill in range(1, KILLS + 1):
            wait_for(agents, kill * ROUNDS_BETWEEN_KILLS)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            server.start()
        wait_for(agents, max(agent.posted for agent in agents) + 2)
    finally:
        for agent in agents:
            agent.enough.set()
        for agent in agents:
            agent.join(timeout=90)
    for agent in agents:
        assert agent.error is None
        assert agent.posted > KILLS * ROUNDS_BETWEEN_KILLS
        for kind in ("detection", "characterization"):
            frame = agent.client.results(agent.session, TEST, kind)
            assert frame["round"].to_list() == list(range(agent.posted))
            assert frame["instance_id"].unique().to_list() == [f"img_{agent.agent}.png"]
            values = frame["values"].list.first().to_list()
            assert values == [float(f"0.{number:05d}") for number in range(agent.posted)]
        assert agent.client.resume_session(session_id=agent.session) == [TEST]
        agent.client.close()
    assert {path.name for path in server.folder.iterdir()} == {"data", "state"}


def test_sigterm_ends_the_server_cleanly(server: ServerProcess) -> None:
    with HttpHarness(server.url, patience=0.2) as client:
        session = opened(client)
        assert server.stop(signal.SIGTERM) == 0
        with pytest.raises(SourceError, match="does not answer"):
            client.session_progress(session_id=session)
        # A clean end folds the write-ahead log into the file.
        assert not list((server.folder / "state").glob("*-wal"))
        server.start()
        assert client.session_progress(session_id=session)["terminated"] is None


def test_an_end_whose_answer_was_lost_counts_as_reached(server: ServerProcess) -> None:
    with HttpHarness(server.url, patience=30) as client:
        session = opened(client)
        client.complete_test(session_id=session, test_id=TEST)
        once_broken(client)
        client.complete_test(session_id=session, test_id=TEST)
        client.terminate_session(session_id=session)
        once_broken(client)
        client.terminate_session(session_id=session)


def once_broken(client: HttpHarness) -> None:
    """Let the client's next request fail as if its answer were lost."""
    import httpx

    send = client._http.request

    def broken(*given: object, **named: object) -> None:
        client._http.request = send  # type: ignore[method-assign]
        raise httpx.ReadError("connection reset")

    client._http.request = broken  # type: ignore[method-assign,assignment]


KILLED = """
import os, sys
from pathlib import Path
from tasks.condda.server.serve import make_harness
from tests.condda.small import DOMAIN, TEST

folder, moment = Path(sys.argv[1]), sys.argv[2]
harness = make_harness(folder / "data", folder / "state")
session = harness.session_request(
    test_ids=[TEST], protocol="OND", domain=DOMAIN, novelty_detector_version="a"
)
print(session, flush=True)
store = harness.store
if moment == "before":
    store._connection.set_trace_callback(
        lambda statement: os.kill(os.getpid(), 9) if statement == "commit" else None
    )
else:
    commit = store._commit
    store._commit = lambda batch: (commit(batch), os.kill(os.getpid(), 9))
harness.terminate_session(session_id=session)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_9_around_the_commit_of_an_end(tmp_path: Path, moment: str) -> None:
    """Before it the session goes on, after it the session has ended: no third case."""
    write_test(tmp_path / "data")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), moment],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    harness = make_harness(tmp_path / "data", tmp_path / "state")
    session = killed.stdout.strip()
    ended = harness.session_progress(session_id=session)["terminated"]
    assert (ended is None) == (moment == "before")
    if ended is None:
        harness.terminate_session(session_id=session)
    with pytest.raises(ProtocolRefusal, match="SessionEnded"):
        harness.terminate_session(session_id=session)
    assert [stored.seq for stored in harness.store.load(session)] == [1, 2]
    harness.store.close()
