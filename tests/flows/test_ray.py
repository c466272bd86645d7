"""Stages on a real Ray cluster: nodes of this machine, each with one worker process.

Ray is not in the lock file (docs/cluster.md says how to install it), so this skips without it.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import engine
from flows.processes import end_all, processes_with
from schemas.errors import ConfigError, NativeError
from tasks.engine.flow_run import FlowRun
from tasks.engine.stage import Shard
from tests.cluster_stages import (
    die,
    end_worker,
    fail,
    fail_beside,
    meet_three,
    read_after_a_death,
    tell_process,
    tell_worker,
    wait_for,
)
from tests.flows.test_cluster import ROOT, build_lines, in_flow, run_stage, table_bytes
from tests.toy import write_raw

pytest.importorskip("ray", reason="ray is not installed: .venv/bin/python -m pip install ray")
pytestmark = pytest.mark.slow

MARK = "NOVELTY_TEST_RAY"
SETTINGS = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
}


class RealRay:
    """A head node and more, until `stop`. The folder's name is short: it holds sockets."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.address = ""
        said = self.add_node("--head", "--port", "0", "--include-dashboard", "false")
        self.address = said.split("--address='")[1].split("'")[0]

    def add_node(self, *options: str) -> str:
        joins = ("--address", self.address) if self.address else ()
        where = ("--node-ip-address", "127.0.0.1", "--temp-dir", str(self.folder))
        small = ("--num-cpus", "1", "--object-store-memory", "100000000")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        done = subprocess.run(
            [*command, *joins, *where, *small, *options],
            env=os.environ | SETTINGS | {MARK: str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def stop(self) -> None:
        started = [p for p, known in processes_with(MARK) if known[MARK] == str(self.folder)]
        end_all(started, 5.0)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RealRay]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ray"))
    cluster = None
    try:
        cluster = RealRay(folder)
        cluster.add_node()
        yield cluster
    finally:
        if cluster:
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_ray(two_nodes, monkeypatch) -> RealRay:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NOVELTY_RUNNER", "ray")
    monkeypatch.setenv("NOVELTY_CLUSTER", two_nodes.address)
    return two_nodes


def test_the_same_bytes_as_here(tmp_path, on_ray):
    write_raw(tmp_path / "raw")
    here = build_lines(tmp_path / "here", tmp_path / "raw")
    made = []
    in_flow(lambda: made.append(build_lines(tmp_path / "there", tmp_path / "raw")))
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    assert [p.shard for p in made[0].pieces] == [p.shard for p in here.pieces]


def test_a_worker_killed_in_the_middle(tmp_path, on_ray):
    write_raw(tmp_path / "raw")
    told = tmp_path / "process"

    def run(lake: Path) -> None:
        build_lines(lake, tmp_path / "raw", read_after_a_death, str(tmp_path))

    def kill() -> None:
        wait_for(lambda: told.exists() and told.read_text() != "")
        os.kill(int(told.read_text()), signal.SIGKILL)
        (tmp_path / "killed").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    in_flow(lambda: run(tmp_path / "there"))
    killer.join()
    run(tmp_path / "here")
    assert int(told.read_text()) != os.getpid()
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    assert not list((tmp_path / "there").rglob("*.tmp"))


def test_a_shard_that_kills_every_worker_is_said(tmp_path, on_ray):
    with pytest.raises(NativeError, match=r"end_worker/x: 4 workers died while they made it"):
        in_flow(lambda: run_stage(tmp_path, end_worker, [Shard("x")]) and None)


def test_processes_of_their_own_on_workers(tmp_path, on_ray):
    shards = [Shard(str(n), about=str(tmp_path)) for n in range(2)]
    in_flow(lambda: run_stage(tmp_path / "lake", tell_process, shards) and None)
    told = [path.read_text().split() for path in tmp_path.glob("[0-9]")]
    assert len({own for own, _ in told}) == 2
    assert str(os.getpid()) not in {parent for _, parent in told}


@pytest.mark.parametrize(
    ("chosen", "name", "kind"),
    [(fail, "user", ConfigError), (fail, "ours", ValueError), (die, "native", NativeError)],
    ids=["user", "defect", "native"],
)
def test_errors_are_the_same_sentences(tmp_path, on_ray, monkeypatch, chosen, name, kind):
    with pytest.raises(kind) as there:
        in_flow(lambda: run_stage(tmp_path, chosen, [Shard(name)]) and None)
    monkeypatch.setenv("NOVELTY_RUNNER", "local")
    monkeypatch.delenv("NOVELTY_CLUSTER")
    with pytest.raises(kind) as here:
        in_flow(lambda: run_stage(tmp_path, chosen, [Shard(name)]) and None)
    assert str(there.value) == str(here.value)


def test_an_error_beside_a_shard_under_way_ends_the_flow(tmp_path, on_ray):
    shards = [Shard(name, about=str(tmp_path)) for name in ("waits", "fails")]
    with pytest.raises(ConfigError, match="fails as it should"):
        in_flow(lambda: run_stage(tmp_path / "lake", fail_beside, shards) and None)


def test_a_late_node_gets_work_and_the_gpu_its_stages(tmp_path, on_ray):
    """The third node alone declares a GPU: every shard of a `gpu` stage goes there."""
    shards = [Shard(str(n), about=str(tmp_path / "met")) for n in range(4)]
    (tmp_path / "met").mkdir()

    def join() -> None:
        wait_for(lambda: len(os.listdir(tmp_path / "met")) == 2)
        on_ray.add_node("--num-gpus", "1")

    joiner = threading.Thread(target=join)
    joiner.start()
    in_flow(lambda: run_stage(tmp_path / "lake", meet_three, shards) and None)
    joiner.join()
    assert len(os.listdir(tmp_path / "met")) == 3

    (tmp_path / "gpu").mkdir()
    shards = [Shard(str(n), about=str(tmp_path / "gpu")) for n in range(4)]
    in_flow(lambda: run_stage(tmp_path / "lake", tell_worker, shards) and None)
    used = {path.read_text() for path in (tmp_path / "gpu").iterdir()}
    assert len(used) == 1


def test_without_an_address_a_flow_brings_its_own_workers(tmp_path, monkeypatch, capfd):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NOVELTY_RUNNER", "ray")
    monkeypatch.delenv("NOVELTY_CLUSTER", raising=False)
    write_raw(tmp_path / "raw")
    build_lines(tmp_path / "here", tmp_path / "raw")
    in_flow(lambda: build_lines(tmp_path / "there", tmp_path / "raw") and None)
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    assert "workers on this machine for this flow" in capfd.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "head"])
def test_an_address_where_nobody_is(monkeypatch, address):
    monkeypatch.setenv("NOVELTY_RUNNER", "ray")
    monkeypatch.setenv("NOVELTY_CLUSTER", address)
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
        with engine.open_run(FlowRun):
            pass
