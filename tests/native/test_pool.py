"""The runner survives whatever a worker does, blames the right item and loses no other."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import NativeError
from tasks.ingest.native import sandbox
from tasks.ingest.native.pool import ROOT, Limits, Outcome, run_batch
from tests.native.misbehaving import sample_arrays

HERE = "tests.native.misbehaving"
WORK = f"{HERE}:work"
SMALL = Limits(memory_bytes=256 << 20)
SHORT = Limits(seconds_per_item=1)


def items_with(poison: dict[int, str], count: int) -> list[dict[str, Any]]:
    return [{"n": n, "do": poison.get(n)} for n in range(count)]


def run_poisoned(
    poison: dict[int, str], count: int, limits: Limits = SMALL, **options: Any
) -> dict[int, Outcome]:
    """Runs, checks that every other item came out right, and gives the poisoned outcomes."""
    outcomes = list(run_batch(WORK, items_with(poison, count), limits=limits, **options))
    assert [outcome.item for outcome in outcomes] == list(range(count))
    for outcome in outcomes:
        if outcome.item not in poison:
            check_good(outcome)
    return {n: outcomes[n] for n in poison}


def check_good(outcome: Outcome) -> None:
    assert (outcome.rule, outcome.message) == (None, None)
    assert outcome.value is not None
    assert outcome.value["square"] == outcome.item**2
    assert outcome.value["raw"] == bytes(outcome.item)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Any, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("do", "rule", "found"),
    [
        ("segfault", "native_crash", "signal 11"),
        ("abort", "native_crash", "signal 6"),
        ("kill_itself", "native_crash", "killed from outside"),
        ("exit_badly", "native_crash", "exit code 9"),
        ("exit_silently", "native_no_result", "exit code 0"),
        ("sys_exit", "native_error", "raised SystemExit: no more"),
        ("eat_memory_in_python", "native_memory", "MemoryError"),
        ("raise_value_error", "native_error", "ValueError: bad header in <object object at 0x…>"),
        ("raise_record_error", "frame_count", "0 frames decoded, expected 1 or more"),
    ],
)
def test_poisoned_item_is_blamed_and_the_others_are_kept(do: str, rule: str, found: str):
    outcome = run_poisoned({2: do}, 5)[2]
    assert (outcome.value, outcome.rule) == (None, rule)
    assert outcome.message is not None and found in outcome.message


@pytest.mark.parametrize("do", ["hang_with_gil", "hang_in_regex", "flood_for_ever"])
def test_hang_is_killed_by_the_wall_clock(do: str, tmp_path: Path):
    outcome = run_poisoned({1: do}, 3, SHORT, scratch=tmp_path)[1]
    assert outcome.rule == "native_timeout"
    assert outcome.message == (
        f"{WORK} failed twice; alone in a process it gave no result within 1 s and was killed"
    )
    assert len(outcome.output.encode()) <= SHORT.output_bytes
    assert not list(tmp_path.iterdir())


def test_each_item_has_its_own_clock():
    outcomes = run_batch(f"{HERE}:slow", [0.4] * 4, limits=SHORT)
    assert [outcome.rule for outcome in outcomes] == [None] * 4


def test_flooded_output_is_drained_and_its_tail_kept():
    limits = Limits(output_bytes=1000)
    items = items_with({0: "flood_and_return", 1: "flood_and_segfault"}, 3)
    flooded, crashed, last = run_batch(WORK, items, limits=limits)
    check_good(flooded)
    check_good(last)
    assert crashed.rule == "native_crash"
    assert "flood\n" in crashed.output and "in flood_and_segfault" in crashed.output
    assert len(crashed.output) <= 1000


def test_crash_message_holds_what_was_printed_and_repeats():
    first, second = (run_poisoned({0: "segfault"}, 1)[0] for _ in range(2))
    assert first.message is not None
    assert "about to read address zero" in first.message
    assert "in segfault" in first.output
    assert first.message == second.message


@pytest.mark.parametrize("do", ["segfault_on_exit", "exit_code_on_exit", "hang_on_exit"])
def test_bad_exit_after_good_results_is_of_no_account(do: str):
    began = time.monotonic()
    outcomes = list(run_batch(WORK, items_with({1: do}, 3)))
    for outcome in outcomes:
        check_good(outcome)
    assert len({outcome.value["pid"] for outcome in outcomes if outcome.value}) == 1
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("function", ["forge", "damage_part"])
def test_result_that_disagrees_with_its_hash_is_refused(function: str):
    first, bad, last = run_batch(f"{HERE}:{function}", [0, 1, 2])
    assert first.value in ({"item": 0}, {"raw": b"intact!"})
    assert last.value in ({"item": 2}, {"raw": b"intact!"})
    assert (bad.value, bad.rule) == (None, "native_no_result")
    assert bad.message is not None and "does not agree with its hash" in bad.message


def test_poisoned_items_cost_two_processes_each_not_a_search():
    poison = {20: "segfault", 77: "exit_silently"}
    outcomes = list(run_batch(WORK, items_with(poison, 100), limits=SMALL, batch=100))
    processes = [outcome.value["pid"] for outcome in outcomes if outcome.value]
    assert len(processes) == 98
    assert [processes.count(pid) for pid in dict.fromkeys(processes)] == [20, 56, 22]


def test_first_last_and_only_item_poisoned():
    rules = {n: o.rule for n, o in run_poisoned({0: "segfault", 3: "exit_badly"}, 4).items()}
    assert rules == {0: "native_crash", 3: "native_crash"}
    assert run_poisoned({0: "segfault"}, 1)[0].rule == "native_crash"


def test_item_that_fails_only_in_company_is_not_lost():
    outcomes = list(run_batch(WORK, items_with(dict.fromkeys(range(4), "fail_in_company"), 4)))
    for outcome in outcomes:
        check_good(outcome)


def test_memory_leaked_by_others_is_not_held_against_an_item():
    items = items_with(dict.fromkeys(range(12), "leak"), 12)
    for outcome in run_batch(WORK, items, limits=SMALL):
        check_good(outcome)


def test_crash_for_want_of_memory_is_told_from_another_crash():
    peak_here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limits = Limits(memory_bytes=peak_here + (256 << 20))
    outcomes = run_poisoned({0: "eat_memory_in_c", 1: "segfault"}, 3, limits)
    assert [outcomes[n].rule for n in (0, 1)] == ["native_memory", "native_crash"]


def test_memory_of_the_parent_is_not_held_against_the_child():
    held = bytearray(b"x") * (300 << 20)
    assert len(held) > SMALL.memory_bytes
    assert run_poisoned({0: "segfault"}, 1)[0].rule == "native_crash"


def test_file_larger_than_the_memory_limit_is_refused():
    sizes = [1 << 20, 257 << 20]
    small, large = run_batch(f"{HERE}:write_large_file", sizes, limits=SMALL)
    assert small.value == {"bytes": 1 << 20}
    assert large.rule == "native_error"
    assert large.message is not None and "File too large" in large.message


def test_workers_and_batch_do_not_change_the_outcomes():
    poison = {2: "segfault", 3: "raise_record_error", 6: "eat_memory_in_python", 10: "exit_badly"}

    def run(workers: int, batch: int) -> list[tuple]:
        known: list[int] = []
        outcomes = run_batch(
            WORK,
            items_with(poison, 11),
            limits=SMALL,
            workers=workers,
            batch=batch,
            on_outcome=lambda outcome: known.append(outcome.item),
        )
        table = []
        for outcome in outcomes:
            if outcome.item not in poison:
                check_good(outcome)
            table.append((outcome.item, outcome.value is None, outcome.rule, outcome.message))
        assert sorted(known) == list(range(11))
        return table

    whole = run(workers=1, batch=100)
    assert [row[0] for row in whole] == list(range(11))
    assert {row[0] for row in whole if row[1]} == set(poison)
    assert run(workers=3, batch=100) == whole
    assert run(workers=1, batch=1) == whole
    assert run(workers=3, batch=2) == whole


def test_no_items_and_bad_arguments():
    assert list(run_batch(WORK, [])) == []
    with pytest.raises(ValueError, match="workers=0"):
        run_batch(WORK, [], workers=0)
    with pytest.raises(ValueError, match="JSON"):
        run_batch(WORK, [float("nan")])
    with pytest.raises(TypeError, match="JSON"):
        run_batch(WORK, [Path("a")])


@pytest.mark.parametrize(
    ("do", "found"),
    [
        ("raise_import_error", "no_such_library_anywhere"),
        ("raise_missing_dependency", "apt-get install libmesh"),
        ("fill_the_disk", "No space left on device"),
    ],
)
def test_fault_of_the_machine_stops_the_run(do: str, found: str):
    with pytest.raises(NativeError, match=found):
        list(run_batch(WORK, items_with({1: do}, 3)))


@pytest.mark.parametrize(
    ("function", "options", "found"),
    [
        ("tests.native.absent:f", {}, "No module named 'tests.native.absent'"),
        (f"{HERE}:absent", {}, "has no attribute 'absent'"),
        (WORK, {"imports": ["absent_library"]}, "No module named 'absent_library'"),
        (WORK, {"limits": Limits(memory_bytes=1 << 20)}, "is not the fault of a record"),
    ],
)
def test_child_that_cannot_start_stops_the_run(function: str, options: dict, found: str):
    with pytest.raises(NativeError, match=found):
        list(run_batch(function, [{"n": 1}], **options))


def test_import_that_hangs_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hangs_on_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = Limits(seconds_start=1)
    with pytest.raises(NativeError, match="did not start within 1 s"):
        list(run_batch(WORK, [{"n": 1}], imports=["hangs_on_import"], limits=limits))


def test_result_that_cannot_be_handed_over():
    found = {
        "nan": "'x' cannot be handed over (Out of range float",
        "infinity": "'x' cannot be handed over (Out of range float",
        "set": "Object of type set is not JSON serializable",
        "numpy_scalar": "Object of type float32 is not JSON serializable",
        "objects": "Object arrays cannot be saved",
        "masked": "Object of type MaskedArray is not JSON serializable",
        "nested_array": "Object of type ndarray is not JSON serializable",
        "list": "returned list, expected a dict with string keys",
        "none": "returned NoneType, expected a dict with string keys",
        "integer_key": "returned dict, expected a dict with string keys",
    }
    *bad, good = run_batch(f"{HERE}:returned", [*found, "good"])
    assert good.value == {"x": 1.5}
    for outcome, expected in zip(bad, found.values(), strict=True):
        assert (outcome.value, outcome.rule) == (None, "native_error")
        assert outcome.message is not None and expected in outcome.message
        assert outcome.message.startswith(f"{HERE}:returned returned")


def test_arrays_and_bytes_come_back_exactly():
    (outcome,) = run_batch(f"{HERE}:arrays", [None])
    value = outcome.value
    assert value is not None
    assert list(value) == ["before", *sample_arrays(), "raw", "after"]
    assert (value["before"], value["after"]) == ([1, "a"], {"deep": None})
    assert value["raw"] == bytes(range(256))
    for name, expected in sample_arrays().items():
        assert type(value[name]) is np.ndarray
        assert (value[name].dtype, value[name].shape) == (expected.dtype, expected.shape)
        assert value[name].tobytes() == expected.tobytes()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(items=st.lists(JSON, min_size=5, max_size=40))
def test_items_may_be_any_json(items: list[Any]):
    outcomes = list(run_batch(f"{HERE}:echo", items))
    assert [outcome.value for outcome in outcomes] == [{"item": item} for item in items]


def test_surroundings_of_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (outcome,) = run_batch(
        f"{HERE}:surroundings", [0], scratch=scratch, threads=2, imports=["wave"]
    )
    value = outcome.value
    assert value is not None
    assert "wave" in value["modules"]
    assert value["environment"]["OMP_NUM_THREADS"] == "2"
    assert value["environment"]["PYTHONHASHSEED"] == "0"
    assert Path(value["temporary"]).is_relative_to(scratch)
    assert Path(value["out_dir"]).is_relative_to(scratch)
    assert value["empty"]
    assert value["core"] == [0, 0]
    assert value["data"] == [Limits().memory_bytes] * 2
    assert not list(scratch.iterdir())


def test_worker_imports_nothing_heavy():
    code = "import sys, tasks.ingest.native.worker; print(*sys.modules)"
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    roots = {name.partition(".")[0] for name in listed}
    assert "schemas" in roots
    assert not roots & {"prefect", "numpy", "polars", "pyarrow", "pydantic", "torch", "asyncio"}


def test_grandchildren_die_with_the_group():
    outcome = run_poisoned({0: "hang_with_grandchild"}, 1, SHORT)[0]
    assert outcome.output.startswith("grandchild ")
    assert wait_until(lambda: not alive(int(outcome.output.split()[1])))


def test_closing_the_generator_kills_the_children(tmp_path: Path):
    items = items_with(dict.fromkeys((1, 2, 3), "hang_with_gil"), 4)
    others = set(children_of(os.getpid()))  # what earlier tests of this process left to end
    outcomes = run_batch(WORK, items, workers=2, batch=1, scratch=tmp_path)
    check_good(next(outcomes))
    assert set(children_of(os.getpid())) - others
    outcomes.close()
    assert not set(children_of(os.getpid())) - others
    assert not list(tmp_path.iterdir())


def children_of(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for path in tasks for child in path.read_text().split()]


PARENT = """
import os, sys, time
from pathlib import Path
from tasks.ingest.native import sandbox
from tasks.ingest.native.pool import run_batch

names = sys.argv[1:]
outcomes = run_batch("tests.native.misbehaving:mark_and_hang", names, workers=2, batch=1)
for outcome in outcomes:
    while len(list(Path(os.environ["TMPDIR"]).rglob("mark?"))) < 2:
        time.sleep(0.01)
    for mark in Path(os.environ["TMPDIR"]).rglob("mark?"):
        print(mark.read_text(), flush=True)
    raise SystemError("the consumer fails")
"""


def start_parent(names: list[str], scratch: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *names],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_die_with_a_killed_parent(number: signal.Signals, tmp_path: Path):
    parent = start_parent(["mark0", "mark1"], tmp_path)
    try:
        assert wait_until(lambda: len(list(tmp_path.rglob("mark?"))) == 2)
        children = [int(mark.read_text()) for mark in tmp_path.rglob("mark?")]
        assert all(alive(child) for child in children)
    finally:
        parent.send_signal(number)
        parent.communicate()
    assert parent.returncode == -number
    assert wait_until(lambda: not any(alive(child) for child in children))


def test_children_die_with_a_parent_that_fails_between_outcomes(tmp_path: Path):
    parent = start_parent(["", "mark0", "mark1"], tmp_path)
    children = [int(line) for line in parent.communicate(timeout=120)[0].split()]
    assert parent.returncode == 1 and len(children) == 2
    assert wait_until(lambda: not any(alive(child) for child in children))


# ---------------------------------------------------------------- what a child may do


def test_a_child_reaches_its_item_and_its_scratch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    for name in ("item", "other"):
        (tmp_path / name).write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        item = {"path": str(tmp_path / "item"), "other": f"file:{tmp_path / 'other'}", "port": port}
        (outcome,) = run_batch(f"{HERE}:reach", [item])
    value = outcome.value
    assert value is not None and value["secret"] is None
    assert value["item"] == value["scratch"] == "done"
    if sandbox.landlock_version():
        assert value["other"] == value["write"] == "EACCES"
        assert not (tmp_path / "written").exists()
    if sandbox.landlock_version() >= 4 or os.geteuid() == 0:
        assert value["network"] in ("EACCES", "ENETUNREACH")


def test_messages_name_no_place_of_the_installation_or_of_the_files(tmp_path: Path):
    crash = run_poisoned({0: "segfault"}, 1)[0]
    assert "Fatal Python error" in crash.output and "in segfault" in crash.output
    assert crash.message is not None
    assert "File " not in crash.message and str(ROOT) not in crash.message
    item = {"path": str(tmp_path / "x.ply")}
    (tmp_path / "x.ply").touch()
    (outcome,) = run_batch(f"{HERE}:quote_path", [item])
    assert outcome.message is not None
    assert outcome.message.endswith("ValueError: x.ply is bad, says <installed>/tests")
