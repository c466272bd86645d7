"""Processes that make one shard after another."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from schemas.errors import NativeError, RecordError
from tasks.engine import workers
from tasks.engine.workers import Workers


@pytest.fixture
def pool():
    pool = Workers()
    yield pool
    pool.stop()


def here() -> tuple[int, str, str | None]:
    return os.getpid(), os.getcwd(), os.environ.get("NOVELTY_WORD")


def speak(text: str) -> None:
    print(text)
    print("oh", text, file=sys.stderr)


def refuse() -> None:
    raise RecordError("size", "too large")


def refuse_oddly() -> None:
    class Odd(Exception):
        """It cannot be pickled."""

    raise Odd("so it is")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def children() -> int:
    return subprocess.run([sys.executable, "-c", "print(4)"], capture_output=True).returncode


def test_one_process_makes_many_and_sees_the_world_of_the_caller(pool, tmp_path, monkeypatch):
    first = pool.run("one", here)
    monkeypatch.setenv("NOVELTY_WORD", "then")
    monkeypatch.chdir(tmp_path)
    second = pool.run("two", here)
    assert first[0] == second[0] != os.getpid()
    assert second[1:] == (str(tmp_path), "then")
    assert pool.run("three", children) == 0


def test_what_it_prints_comes_out_here(pool, capsys):
    pool.run("one", speak, "word")
    assert capsys.readouterr() == ("word\n", "oh word\n")


def chatter(lines: int) -> None:
    """Two threads print at once, to both streams; the last line is not ended."""

    def say(stream) -> None:
        for number in range(lines):
            print("x" * 2000, number, file=stream)

    threads = [threading.Thread(target=say, args=(s,)) for s in (sys.stdout, sys.stderr)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("end", end="")


def test_threads_of_a_worker_take_turns_and_no_line_is_lost(pool, capsys):
    pool.run("one", chatter, 300)
    out, err = capsys.readouterr()
    said = ["x" * 2000 + f" {number}" for number in range(300)]
    assert err.splitlines() == said and out.splitlines() == [*said, "end"]


def test_errors_cross_with_their_parts(pool):
    with pytest.raises(RecordError) as raised:
        pool.run("one", refuse)
    assert (raised.value.rule, raised.value.message) == ("size", "too large")
    with pytest.raises(RuntimeError, match="Odd: so it is"):
        pool.run("two", refuse_oddly)


def test_one_that_dies_is_named_and_another_takes_its_place(pool):
    first = pool.run("one", here)[0]
    with pytest.raises(NativeError, match="two: its process died"):
        pool.run("two", kill_self)
    assert pool.run("three", here)[0] != first


def test_one_that_ended_while_idle_is_replaced(pool):
    first = pool.run("one", here)[0]
    os.kill(first, signal.SIGKILL)
    assert pool.run("two", here)[0] != first


def test_a_large_one_makes_way(pool, monkeypatch):
    monkeypatch.setenv("NOVELTY_WORD", "large")
    first = pool.run("one", grow)
    assert pool.run("two", here)[0] != first


KEPT: list[bytes] = []


def grow() -> int:
    KEPT.append(os.urandom(1 << 20) * (workers.LARGE_BYTES >> 20))
    return os.getpid()


def test_none_outlives_a_killed_parent():
    code = """
import sys
from tasks.engine.workers import Workers
from tests.test_workers import here
print(Workers().run("one", here)[0], flush=True)
sys.stdin.read()
"""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **options) as parent:
        worker = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{worker}")
        parent.kill()
    deadline = time.monotonic() + 120
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{worker}")


def double_or_wait(number: int, folder: str) -> int:
    """Twice the number; what is not positive waits until it is killed."""
    if number > 0:
        return 2 * number
    Path(folder, str(os.getpid())).touch()
    signal.pause()
    return 0


def test_each_job_has_its_result(tmp_path):
    jobs = [(number, str(tmp_path)) for number in (5, 7, 9)]
    assert dict(Workers().run_each("job", double_or_wait, jobs, 2)) == {0: 10, 1: 14, 2: 18}


def test_whoever_stops_listening_ends_them_in_the_middle_of_their_work(tmp_path):
    jobs = [(0, str(tmp_path)), (5, str(tmp_path)), (0, str(tmp_path))]
    results = Workers().run_each("job", double_or_wait, jobs, 2)
    assert next(results) == (1, 10)
    while not (waiting := list(tmp_path.iterdir())):
        time.sleep(0.01)
    results.close()  # as an interrupt does; it comes back though two jobs would wait for ever
    for path in waiting:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)
