"""Builds publish, `gc` removes, eight readers read by every documented way: no error, no mix."""

import multiprocessing
import queue
import threading
import time
from pathlib import Path

import pytest

from flows.cli import main
from storage.snapshots import history
from tests.storage.reading import read_until_told
from tests.toy import build_toy, write_raw

READERS = (("path", (0, 1, 2)), ("api", (3, 4, 5)), ("catalogue", (6,)), ("catalogue", (7,)))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("publications", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_readers_see_no_error_and_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publications: int
) -> None:
    """Every reader reads between two publications, and `gc` keeps the last three: so what a reader
    holds is never older than `gc` promises, however slow the machine.
    """
    lake, raw = tmp_path / "lake", tmp_path / "raw"
    write_raw(raw, files=3, lines=8)
    build_toy(lake, raw)
    monkeypatch.setenv("NOVELTY_LOCK_WAIT", "120")
    context = multiprocessing.get_context("spawn")
    counts, stop, problems = context.Array("i", 8), context.Value("b", 0), context.Queue()
    readers = [
        context.Process(target=read_until_told, args=(lake, way, numbers, counts, stop, problems))
        for way, numbers in READERS
    ]
    collected = [0]

    def collect() -> None:
        words = ["gc", "--yes", "--grace", "-1", "--keep", "3", "--lake", str(lake)]
        while not stop.value:
            collected[0] += main(words) == 0

    collector = threading.Thread(target=collect)
    for process in (*readers, collector):
        process.start()
    try:
        for number in range(publications):
            before = [*counts, collected[0]]
            deadline = time.monotonic() + 120
            while any(now <= old for now, old in zip([*counts, collected[0]], before, strict=True)):
                assert time.monotonic() < deadline and all(r.is_alive() for r in readers)
                time.sleep(0.01)
            build_toy(lake, raw, scale=1 + number / 128)
    finally:
        stop.value = 1
        for process in (*readers, collector):
            process.join(120)
    with pytest.raises(queue.Empty):
        pytest.fail(problems.get(timeout=0.1))
    numbers = [snapshot.number for snapshot in history(lake, "toy")]
    assert numbers[-1] == publications and len(numbers) <= 4  # all but the last were removed
