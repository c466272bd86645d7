"""Shards in processes of their own share cores and GPUs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.engine.slots import Slots, gpu_count


def most_at_once(slots: Slots, shards: int, **wanted) -> tuple[int, list[str]]:
    """The most of these shards that were under way together, and the device of each."""
    inside, most, devices, lock = 0, 0, [], threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with slots.taken(**wanted) as device:
            with lock:
                inside += 1
                most = max(most, inside)
                devices.append(device)
            threading.Event().wait(0.01)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(work, range(shards)))
    return most, devices


@pytest.mark.parametrize(
    ("threads", "at_once", "limit"),
    [(1, None, 4), (2, None, 2), (9, None, 1), (1, 3, 3), (4, 2, 2)],
)
def test_threads_share_the_cores(threads, at_once, limit):
    most, devices = most_at_once(Slots(4, 0), 12, device="auto", threads=threads, at_once=at_once)
    assert most <= limit
    assert devices == ["cpu"] * 12


def test_each_gpu_has_its_share():
    most, devices = most_at_once(Slots(64, 2), 12, device="auto", threads=1, per_gpu=1)
    assert most <= 2
    assert set(devices) <= {"cuda:0", "cuda:1"}


def test_the_gpu_with_the_fewest_shards_is_next():
    slots = Slots(8, 2)
    with slots.taken("cuda", per_gpu=2) as one, slots.taken("cuda", per_gpu=2) as two:
        assert {one, two} == {"cuda:0", "cuda:1"}
        with slots.taken("cuda", per_gpu=2) as three:
            assert three in (one, two)


def test_a_cpu_that_is_asked_for_is_taken_where_there_is_a_gpu():
    with Slots(2, 1).taken("cpu") as device:
        assert device == "cpu"


def test_a_place_comes_free_when_the_work_fails():
    slots = Slots(1, 0)
    with pytest.raises(ZeroDivisionError), slots.taken("cpu"):
        raise ZeroDivisionError
    with slots.taken("cpu"):
        pass


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("0", 1), ("0,3", 2), ("-1", 0)])
def test_visible_gpus_are_counted(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count
