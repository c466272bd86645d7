"""Stages on a real Dask cluster: a scheduler and two workers, each a process of its own.

The same bytes as here, also when a worker is killed; a late worker gets work; errors are the same
sentences; shards that want a process of their own get one.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from flows import engine, gc
from flows.tracked import tracked_flow
from schemas.config import Settings
from schemas.errors import ConfigError, LakeError, LockedError, MissingDependency, NativeError
from storage.layout import lake_root
from storage.locks import all_locked
from tasks.engine import places
from tasks.engine.flow_run import FlowRun
from tasks.engine.stage import Build, Shard
from tests import s3
from tests.cluster_stages import (
    PATIENCE_SECONDS,
    die,
    fail,
    meet_three,
    read_after_a_death,
    read_after_a_word,
    tell_process,
    tell_worker,
    train_apart,
    wait_for,
)
from tests.toy import ReadSettings, add_up, read_lines, write_raw

ROOT = Path(__file__).parents[2]


class RealCluster:
    def __init__(self, folder: Path):
        self.file, self.processes = folder / "scheduler.json", []
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        wait_for(self.file.exists)

    def _start(self, kind: str, *options: str, **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dask", kind, "--scheduler-file", str(self.file)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
        with (self.file.parent / f"{kind}{len(self.processes)}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *options],
                cwd=self.file.parent,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def add_worker(self, *options: str, **more: str) -> subprocess.Popen:
        own = ("--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard", *options)
        return self._start("worker", *own, **more)

    @property
    def address(self) -> str:
        import json

        return json.loads(self.file.read_text())["address"]

    def stop(self) -> None:
        for process in reversed(self.processes):
            os.killpg(process.pid, signal.SIGKILL)  # a nanny with its worker
            process.wait()


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory) -> Iterator[RealCluster]:
    cluster = RealCluster(tmp_path_factory.mktemp("dask"))
    try:
        for _ in range(2):  # under a nanny, as Dask does by default: daemons, restarted when killed
            cluster.add_worker()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def on_cluster(two_workers, monkeypatch) -> RealCluster:
    from distributed import Client

    with Client(two_workers.address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=PATIENCE_SECONDS)
    monkeypatch.setenv("NOVELTY_RUNNER", "dask")
    monkeypatch.setenv("NOVELTY_CLUSTER", two_workers.address)
    return two_workers


def in_flow(function: Callable[[], None]) -> None:
    with engine.open_run(FlowRun):
        function()


def in_tracked_flow(function: Callable[[], None]) -> None:
    tracked_flow("cluster", lambda config: function())({})


def run_stage(lake: Path, chosen, shards: list[Shard], settings: Settings | None = None) -> Build:
    with Build("cluster", lake, max_reject_share=1.0) as build:
        build.run(chosen, shards, settings or Settings())
    return build


def build_lines(lake: Path, raw: Path, first=read_lines, about: str | None = None) -> Build:
    """The toy's two stages as another benchmark: other tests count the toy's task runs."""
    with Build("cluster", lake) as build:
        source = build.source(raw)
        shards = [
            Shard(file.name, files=(file,), source=source.root, about=about)
            for file in source.files()
        ]
        build.run(first, shards, ReadSettings())
        build.run(add_up, [Shard("all", parts=build.table("readings"))], Settings())
    return build


def table_bytes(lake: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(lake)): p.read_bytes() for p in lake.glob("*/*/current/*")}
    assert len(found) >= 8 + 6
    return found


@pytest.mark.parametrize("way", [in_flow, in_tracked_flow], ids=["direct", "tracked"])
def test_the_same_bytes_as_here(tmp_path, on_cluster, prefect_api, way):
    write_raw(tmp_path / "raw")
    here = build_lines(tmp_path / "here", tmp_path / "raw")
    made = []
    way(lambda: made.append(build_lines(tmp_path / "there", tmp_path / "raw")))
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    assert [(p.shard, p.made_now) for p in made[0].pieces] == [
        (p.shard, p.made_now) for p in here.pieces
    ]


def test_a_worker_killed_in_the_middle(tmp_path, on_cluster):
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


def test_a_late_worker_gets_work_and_the_gpu_its_stages(tmp_path, on_cluster):
    """The third worker alone declares a GPU: every shard of a `gpu` stage goes there."""
    shards = [Shard(str(n), about=str(tmp_path / "met")) for n in range(4)]
    (tmp_path / "met").mkdir()

    def join() -> None:
        wait_for(lambda: len(os.listdir(tmp_path / "met")) == 2)
        on_cluster.add_worker("--no-nanny", "--resources", "GPU=1")

    joiner = threading.Thread(target=join)
    joiner.start()
    try:
        in_flow(lambda: run_stage(tmp_path / "lake", meet_three, shards) and None)
        joiner.join()
        assert len(os.listdir(tmp_path / "met")) == 3

        (tmp_path / "gpu").mkdir()
        shards = [Shard(str(n), about=str(tmp_path / "gpu")) for n in range(4)]
        in_flow(lambda: run_stage(tmp_path / "lake", tell_worker, shards) and None)
        used = {path.read_text() for path in (tmp_path / "gpu").iterdir()}
    finally:
        joiner.join()
        late = on_cluster.processes.pop()
        late.terminate()
        late.wait(20)
    assert used == {str(late.pid)}


def test_a_gpu_stage_runs_anywhere_where_none_is_declared(tmp_path, on_cluster):
    shards = [Shard("0", about=str(tmp_path))]
    in_flow(lambda: run_stage(tmp_path / "lake", tell_worker, shards) and None)
    assert int((tmp_path / "0").read_text()) != os.getpid()


def test_processes_of_their_own_on_workers(tmp_path, on_cluster):
    from distributed import Client

    with Client(on_cluster.address, set_as_default=False) as client:
        workers = set(client.run(os.getpid).values())
        children = client.run(lambda: multiprocessing.parent_process() is not None).values()
    assert list(children) == [True, True]  # of their nannies
    shards = [Shard(str(n), about=str(tmp_path)) for n in range(2)]
    in_flow(lambda: run_stage(tmp_path / "lake", tell_process, shards) and None)
    told = [path.read_text().split() for path in tmp_path.glob("[0-9]")]
    own, parents = ({int(pair[place]) for pair in told} for place in (0, 1))
    assert len(own) == 2
    assert not own & workers
    assert parents <= workers


@pytest.mark.parametrize(
    ("chosen", "name", "kind"),
    [(fail, "user", ConfigError), (fail, "ours", ValueError), (die, "native", NativeError)],
    ids=["user", "defect", "native"],
)
def test_errors_are_the_same_sentences(tmp_path, on_cluster, monkeypatch, chosen, name, kind):
    with pytest.raises(kind) as there:
        in_flow(lambda: run_stage(tmp_path, chosen, [Shard(name)]) and None)
    monkeypatch.setenv("NOVELTY_RUNNER", "local")
    monkeypatch.delenv("NOVELTY_CLUSTER")
    with pytest.raises(kind) as here:
        in_flow(lambda: run_stage(tmp_path, chosen, [Shard(name)]) and None)
    assert str(there.value) == str(here.value)


@pytest.mark.slow
def test_without_an_address_a_flow_brings_its_own_workers(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("NOVELTY_RUNNER", "dask")
    monkeypatch.delenv("NOVELTY_CLUSTER", raising=False)
    write_raw(tmp_path / "raw")
    build_lines(tmp_path / "here", tmp_path / "raw")
    in_flow(lambda: build_lines(tmp_path / "there", tmp_path / "raw") and None)
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    said = capfd.readouterr().err
    assert "workers on this machine for this flow" in said
    assert "INFO" not in said


@pytest.mark.slow
def test_workers_with_caches_of_their_own_share_a_bucket(tmp_path, monkeypatch):
    write_raw(tmp_path / "raw")
    here = build_lines(tmp_path / "here", tmp_path / "raw")
    (tmp_path / "store").mkdir()
    with s3.moto(tmp_path / "store") as url:
        for name, value in s3.settings(url, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        cluster = RealCluster(tmp_path)
        monkeypatch.setenv("NOVELTY_RUNNER", "dask")
        monkeypatch.setenv("NOVELTY_CLUSTER", cluster.address)
        made = []
        try:
            for number in range(2):
                cluster.add_worker(NOVELTY_CACHE=str(tmp_path / f"worker{number}"))
            lake = lake_root(f"s3://{s3.BUCKET}/cluster")
            in_flow(lambda: made.append(build_lines(lake, tmp_path / "raw")))
        finally:
            cluster.stop()
        for name, version in made[0].versions.items():
            assert version.manifest.parts == here.versions[name].manifest.parts
            assert version.read().equals(here.versions[name].read())
    assert list(tmp_path.glob("worker[01]/lakes/*/.novelty/pieces/cluster/*"))


@pytest.mark.slow
def test_a_scheduler_that_dies_is_said(tmp_path, monkeypatch):
    cluster = RealCluster(tmp_path)
    monkeypatch.setenv("NOVELTY_RUNNER", "dask")
    monkeypatch.setenv("NOVELTY_CLUSTER", cluster.address)
    (tmp_path / "met").mkdir()

    def kill() -> None:
        wait_for(lambda: len(os.listdir(tmp_path / "met")) == 1)
        cluster.processes[0].kill()

    killer = threading.Thread(target=kill)
    try:
        cluster.add_worker()
        killer.start()
        shards = [Shard("0", about=str(tmp_path / "met"))]
        with pytest.raises(NativeError, match="the same command goes on"):
            in_flow(lambda: run_stage(tmp_path / "lake", meet_three, shards) and None)
    finally:
        killer.join()
        cluster.stop()


@pytest.mark.parametrize(
    ("runner", "address", "sentence"),
    [
        ("spark", "", "set it to one of: local, dask, ray"),
        ("", "tcp://127.0.0.1:1", "set NOVELTY_RUNNER=dask too"),
        ("dask", "tcp://127.0.0.1:1", "no Dask scheduler answers at tcp://127.0.0.1:1"),
    ],
    ids=["unknown", "no-runner", "nobody"],
)
def test_wrong_settings_are_said(monkeypatch, runner, address, sentence):
    monkeypatch.setenv("NOVELTY_RUNNER", runner)
    monkeypatch.setenv("NOVELTY_CLUSTER", address)
    monkeypatch.setattr(engine, "CONNECT_SECONDS", 1)
    with pytest.raises(ConfigError, match=sentence), engine.open_run(FlowRun):
        pass


def test_ray_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setenv("NOVELTY_RUNNER", "ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match="pip install ray"), engine.open_run(FlowRun):
        pass


class Forgetful:
    """A cluster whose workers write where we do not look."""

    def __init__(self, **declared: float) -> None:
        self.declared, self.asked = declared, []

    def run(self, name: str, needs: Any, function: Callable[..., None], *arguments: object) -> None:
        self.asked.append(dict(needs))

    def most(self, resource: str) -> float:
        return self.declared.get(resource, 0)


def test_a_lake_that_is_not_shared_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SEEN_WITHIN_SECONDS", 0.0)
    with pytest.raises(LakeError, match=r"x was made on the cluster, but .* does not show it"):
        places.make_on_cluster(Forgetful(), fail, tmp_path, "toy", Shard("x"), Settings())


class Training(Settings):
    device: str = Field("auto", exclude=True)
    trainings_per_gpu: int = Field(1, exclude=True)


@pytest.mark.parametrize(
    ("chosen", "settings", "declared", "needs"),
    [
        (train_apart, Training(), {"GPU": 1, "CORES": 8}, {"GPU": 1}),
        (train_apart, Training(), {"GPU": 4}, {"GPU": 1}),
        (train_apart, Training(trainings_per_gpu=2), {"GPU": 1}, {"GPU": 0.5}),
        (train_apart, Training(device="cpu"), {"GPU": 1, "CORES": 8}, {"CORES": 3}),
        (train_apart, Training(), {"CORES": 2}, {"CORES": 2}),
        (train_apart, Training(), {}, {}),
        (tell_process, Settings(), {"GPU": 1, "CORES": 8}, {"CORES": 3}),
        (fail, Settings(), {"GPU": 1, "CORES": 8}, {}),
    ],
)
def test_a_shard_asks_for_what_it_uses(tmp_path, monkeypatch, chosen, settings, declared, needs):
    monkeypatch.setattr(places, "SEEN_WITHIN_SECONDS", 0.0)
    cluster = Forgetful(**declared)
    with pytest.raises(LakeError):
        shard = Shard("x", threads=3)
        places.make_on_cluster(cluster, chosen, tmp_path, "toy", shard, settings)
    assert cluster.asked == [needs]


def test_two_workers_with_different_resources(tmp_path, monkeypatch):
    """One has a GPU, one has cores: trainings go to the GPU one by one, or by device to the cores;
    the tables are those of a build here."""
    cluster = RealCluster(tmp_path)
    try:
        pids = {}
        for name, resources in (("gpu", "GPU=1"), ("cores", "CORES=2")):
            options = ("--no-nanny", "--nthreads", "2", "--resources", resources)
            pids[name] = cluster.add_worker(*options).pid
        from distributed import Client

        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=PATIENCE_SECONDS)
        used: dict[str, set[int]] = {}
        for place, device in (("gpu", "auto"), ("cores", "cpu")):
            folder = tmp_path / place
            folder.mkdir()
            shards = [Shard(str(n), about=str(folder), threads=2) for n in range(3)]
            monkeypatch.setenv("NOVELTY_RUNNER", "dask")
            monkeypatch.setenv("NOVELTY_CLUSTER", cluster.address)
            settings = Training(device=device)
            with engine.open_run(FlowRun):
                run_stage(tmp_path / "there", train_apart, shards, settings)
            used[place] = {int(path.read_text()) for path in folder.glob("parent-*")}
            assert not list(folder.glob("shared-*"))
            monkeypatch.setenv("NOVELTY_RUNNER", "local")
            monkeypatch.delenv("NOVELTY_CLUSTER")
            run_stage(tmp_path / "here", train_apart, shards, Training(device="cpu"))
    finally:
        cluster.stop()
    assert used == {place: {pid} for place, pid in pids.items()}
    here, there = (
        {p.name: p.read_bytes() for p in (tmp_path / lake).glob("cluster/*/current/*")}
        for lake in ("here", "there")
    )
    assert here and here == there


def test_nothing_is_removed_while_a_cluster_builds(tmp_path, on_cluster, capsys):
    """`gc` without any grace leaves it all to the next time; the build then has all its pieces."""
    write_raw(tmp_path / "raw")
    before, lake = tmp_path / "before", tmp_path / "there"
    failed: list[BaseException] = []

    def build() -> None:
        try:
            in_flow(lambda: build_lines(lake, tmp_path / "raw", read_after_a_word, str(tmp_path)))
        except BaseException as error:
            failed.append(error)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        wait_for(before.exists)
        gc.build.fn(gc.Cleanup(lake=lake, grace=0.0, keep=1))
        assert "left to the next time" in capsys.readouterr().out
    finally:
        (tmp_path / "go on").touch()
        builder.join()
    assert not failed
    build_lines(tmp_path / "here", tmp_path / "raw", read_after_a_word, str(tmp_path))
    assert table_bytes(lake) == table_bytes(tmp_path / "here")


def test_a_shard_that_outlives_its_flow_is_no_leftover(tmp_path):
    write_raw(tmp_path / "raw")
    build_lines(tmp_path / "lake", tmp_path / "raw")
    shard = Shard("x", about=str(tmp_path))
    key = read_after_a_word.key("cluster", shard, ReadSettings())
    what = (read_after_a_word.code, str(tmp_path / "lake"), "cluster", shard, ReadSettings(), key)
    worker = threading.Thread(target=places._make_on_worker, args=what)
    worker.start()
    try:
        wait_for((tmp_path / "before").exists)
        with pytest.raises(LockedError), all_locked(tmp_path / "lake"):
            pass
    finally:
        (tmp_path / "go on").touch()
        worker.join()
    with all_locked(tmp_path / "lake"):
        pass


def test_a_worker_with_other_code_is_refused(tmp_path):
    what = (fail.code, str(tmp_path), "toy", Shard("x"), Settings(), "the key of another version")
    with pytest.raises(ConfigError, match=r"has another version of tests\.cluster_stages:fail"):
        places._make_on_worker(*what)
