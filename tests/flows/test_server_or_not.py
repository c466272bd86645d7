"""A flow with a Prefect server and without: the same tables; a server never fails a build."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import yaml

from flows import service
from flows.processes import Background, processes_with, wait_until
from flows.runner import run_directly
from flows.tracked import named_address, run_tracked, tracked_flow
from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine import flow_run
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.sample.condda import write_condda
from tests.toy import READINGS, build_toy, parquet_bytes, write_raw

ROOT = Path(__file__).parents[2]
MARK = "NOVELTY_TEST_MARK"
PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _no_server_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("NOVELTY_SERVICE", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.chdir(tmp_path)


def python(code: str, *words: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def doorway(address: str) -> Iterator[tuple[str, threading.Event]]:
    """A way to the server at that address, and an event that closes it for good."""
    host, _, port = address.removeprefix("http://").removesuffix("/api").partition(":")
    closed, open_sockets = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    guest, _ = door.accept()
                    home = socket.create_connection((host, int(port)))
                    open_sockets.extend((guest, home))
                    for pair in ((guest, home), (home, guest)):
                        threading.Thread(target=carry, args=pair, daemon=True).start()

        def shut() -> None:
            closed.wait()
            for end in (door, *open_sockets):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

        workers = [threading.Thread(target=work, daemon=True) for work in (serve, shut)]
        for worker in workers:
            worker.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}/api", closed
        finally:
            closed.set()
            for worker in workers:
                worker.join()


@pytest.fixture
def address(prefect_api) -> str:
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value()


# --- both ways ------------------------------------------------------------------------------------

BUILD = """
import sys
from flows.cli import main
code = main(["build", "condda", "--tests", sys.argv[1], "--lake", sys.argv[2], "--predictors",
             "threshold", "--protocols", "OND", "--run.red-light", "without"])
print("prefect" in sys.modules)
sys.exit(code)
"""


def tables(lake: Path) -> dict[str, bytes]:
    assert (lake / "reports" / "condda.html").exists()
    return {str(p.relative_to(lake)): p.read_bytes() for p in lake.glob("condda/*/current/*")}


DIRECT = """
import sys
from pathlib import Path
from flows import cli, condda, runner, tracked
from tests.toy import build_toy
assert tracked.server_address() is None
root = Path(sys.argv[1])
runner.run_directly("toy", lambda config: build_toy(root / "direct", root / "raw"), {})
sys.exit("prefect" in sys.modules)
"""


def test_both_ways_give_the_same_bytes(tmp_path, address):
    """The short form: the toy's two stages."""
    write_raw(tmp_path / "raw")
    process = python(DIRECT, tmp_path)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    tracked = tracked_flow("toy", lambda config: build_toy(tmp_path / "there", tmp_path / "raw"))
    run_tracked(tracked, {}, address)
    assert parquet_bytes(tmp_path / "direct") == parquet_bytes(tmp_path / "there")


@pytest.mark.slow
def test_a_benchmark_both_ways_and_only_one_knows_prefect(tmp_path, address):
    write_condda(tmp_path / "tests", rows=192)
    said = {}
    for name, environment in {"direct": {}, "tracked": {"PREFECT_API_URL": address}}.items():
        process = python(BUILD, tmp_path / "tests", tmp_path / name, **environment)
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        said[name] = (out.splitlines()[-1], errors.splitlines())
    assert said["direct"][0] == "False" and said["tracked"][0] == "True"
    hints = [line for line in said["direct"][1] if "Prefect" in line]
    assert len(hints) == 1 and "make server" in hints[0] and "PREFECT_API_URL" in hints[0]
    stages = {way: [line for line in said[way][1] if " shards made, " in line] for way in said}
    assert len(stages["direct"]) == 9 and stages["direct"] == stages["tracked"]
    direct = tables(tmp_path / "direct")
    assert len(direct) > 20 and direct == tables(tmp_path / "tracked")


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/api", "http://[::1"])
def test_an_address_where_nobody_answers_is_a_sentence_at_the_start(tmp_path, address):
    write_condda(tmp_path / "tests", rows=192)
    process = python(BUILD, tmp_path / "tests", tmp_path / "lake", PREFECT_API_URL=address)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert errors.startswith(f"novelty: no Prefect server answers at {address}; ")
    assert errors.count("\n") == 1 and not (tmp_path / "lake").exists()


def test_an_address_may_stand_in_the_active_profile_of_prefect(tmp_path, monkeypatch):
    assert named_address() is None
    (tmp_path / "prefect").mkdir()
    profiles = tmp_path / "prefect" / "profiles.toml"
    profiles.write_text(
        'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://a/api"\n[profiles.b]'
    )
    assert named_address() == "http://a/api"
    monkeypatch.setenv("PREFECT_PROFILE", "b")
    assert named_address() is None
    monkeypatch.setenv("PREFECT_API_URL", "http://c/api")
    assert named_address() == "http://c/api"
    profiles.write_text("not TOML")
    monkeypatch.delenv("PREFECT_API_URL")
    assert named_address() is None


LOST = """
import sys
from pathlib import Path
from flows import tracked
from tests.cluster_stages import wait_for
from tests.toy import build_toy
root = Path(sys.argv[1])
tracked.CLIENT_RETRIES = 0

def body(config):
    build_toy(root / "first", root / "raw")
    (root / "first-done").touch()
    wait_for((root / "closed").exists)
    build_toy(root / "second", root / "raw")
    if config.get("fails"):
        raise RuntimeError("a defect")

config = {"lake": str(root / "lake"), "fails": sys.argv[3] == "True"}
tracked.run_tracked(tracked.tracked_flow("toy", body), config, sys.argv[2])
"""


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_server_lost_in_the_middle_is_one_warning(tmp_path, address, fails):
    write_raw(tmp_path / "raw")
    with doorway(address) as (way, closed):
        process = python(LOST, tmp_path, way, fails)
        assert wait_until((tmp_path / "first-done").exists, PATIENCE_SECONDS)
        closed.set()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(way.split(":")[2].removesuffix("/api"))))
    (tmp_path / "closed").touch()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == fails, errors
    errors = errors.partition("nanobind: ")[0]  # DuckDB's own account of its memory, at the exit
    assert errors.count("warning: the Prefect server is lost") == 1
    notes = list((tmp_path / "lake" / "reports" / "failures").glob("*.md"))
    assert len(notes) == fails
    if fails:
        assert notes[0].read_text().startswith("# toy: failed\n\nRuntimeError: a defect\n")
        assert errors.endswith("\nRuntimeError: a defect\n")
    else:
        stages = ("toy/", "read_lines: ", "add_up: ")
        lines = [line for line in errors.splitlines() if not line.startswith(stages)]
        assert len(lines) == 1, errors
    assert parquet_bytes(tmp_path / "first") == parquet_bytes(tmp_path / "second")


# --- without a server -----------------------------------------------------------------------------


@stage(writes=(READINGS,), retries=2)
def fail_twice(shard: Shard, settings: Settings) -> Produced:
    """Fails until its file has two lines."""
    path = Path(shard.about)
    tries = path.read_text() if path.exists() else ""
    path.write_text(tries + "x")
    if len(tries) < int(shard.name):
        raise OSError("not yet")
    rows = pl.DataFrame([("f", 0, 1.0, "a")], schema=READINGS.polars_schema, orient="row")
    return Produced({"readings": rows}, 1)


def test_a_direct_run_honours_retries(tmp_path, monkeypatch):
    monkeypatch.setattr(flow_run, "RETRY_SECONDS", 0.0)

    def run(config: dict[str, str]) -> None:
        with Build("toy", tmp_path / "lake") as build:
            about = str(tmp_path / config["fails"])
            build.run(fail_twice, [Shard(config["fails"], about=about)], Settings())

    run_directly("toy", run, {"fails": "2"})
    assert (tmp_path / "2").read_text() == "xxx"
    with pytest.raises(OSError, match="not yet"):
        run_directly("toy", run, {"fails": "3"})
    assert (tmp_path / "3").read_text() == "xxx"


def test_a_direct_run_asks_for_the_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("NOVELTY_RUNNER", "spark")
    with pytest.raises(ConfigError, match="set it to one of: local, dask, ray"):
        run_directly("toy", lambda config: None, {"lake": str(tmp_path / "lake")})
    assert len(list((tmp_path / "lake" / "reports" / "failures").glob("*-toy.md"))) == 1


# --- nothing outlives a build ---------------------------------------------------------------------


@stage(writes=(READINGS,))
def wait_for_ever(shard: Shard, settings: Settings) -> Produced:
    """In a thread, which nobody can end."""
    Path(shard.about).touch()
    threading.Event().wait()
    raise AssertionError("it ended")


STUCK = """
import sys, types
from pathlib import Path
from flows import cli, runner
from schemas.config import Settings
from tasks.engine.stage import Build, Shard
from tests.flows.test_server_or_not import wait_for_ever
from tests.test_stop import train_forever
root = Path(sys.argv[1])

def body(config):
    shards = [Shard("all", about=str(root / "worker"))]
    with Build("toy", root / "lake", workers=1) as build:
        if sys.argv[2] == "thread":
            build.run(wait_for_ever, shards, Settings())
        build.run(train_forever, shards, Settings())

flow = types.ModuleType("flows.stuck")
flow.build = lambda config: runner.run_directly("stuck", body, config)
sys.modules["flows.stuck"] = flow
runner.STOP_SECONDS = 0.5
cli.stop_at_sigterm()
runner.run_flow("stuck", {"lake": str(root / "lake")})
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
@pytest.mark.parametrize("place", ["thread", "process"])
def test_no_process_outlives_a_killed_build(tmp_path, place, number):
    process = python(STUCK, tmp_path, place, **{MARK: str(tmp_path)})
    worker = tmp_path / "worker"
    try:
        at_work = worker.exists if place == "thread" else lambda: has_text(worker)
        assert wait_until(at_work, PATIENCE_SECONDS, every=0.05)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == (143 if number == signal.SIGTERM else -9)
        assert wait_until(lambda: not marked(tmp_path), PATIENCE_SECONDS, every=0.05)
    finally:
        process.kill()  # its worker dies with it
        process.communicate()
    notes = list((tmp_path / "lake" / "reports" / "failures").glob("*.md"))
    assert len(notes) == (number == signal.SIGTERM)
    if notes:
        assert "# stuck: crashed\n\nIt was told to stop." in notes[0].read_text()
        assert "shard: all (running)" in notes[0].read_text()


def has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


def marked(folder: Path) -> list[object]:
    return [process for process, known in processes_with(MARK) if known[MARK] == str(folder)]


# --- the server of the demo -----------------------------------------------------------------------


def service_file(folder: Path, port: int) -> Path:
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump({"state": "state", "port": port}))
    return path


def test_a_server_that_does_not_start_fails_nothing(tmp_path, capsys, monkeypatch):
    def end(*arguments, **options):
        raise service.ServiceError("the server ended; /a/server.log ends with:\nTraceback")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        service_file(tmp_path, taken.getsockname()[1])
        with service.temporary_server():
            assert service.running_address() is None
        assert "no Prefect server follows these builds: port" in capsys.readouterr().err
    (tmp_path / "service.yaml").write_text("nonsense: 1\n")
    with service.temporary_server():
        pass
    assert "no Prefect server follows these builds: wrong settings" in capsys.readouterr().err
    monkeypatch.setattr(service, "_start_server", end)
    service_file(tmp_path, 1)
    with service.temporary_server():
        pass
    said = capsys.readouterr().err
    assert "follows these builds: the server ended; /a/server.log says why\n" in said
    with pytest.raises(OSError, match="of the block"), service.temporary_server():
        raise OSError("an error of the block")


def test_a_server_that_lives_and_does_not_answer_is_left_out(tmp_path):
    from flows.tracked import server_address

    service_file(tmp_path, 1)
    part = Background("server", tmp_path / "state")
    part.start([sys.executable, "-c", "input()"], dict(os.environ), for_ever=False)
    part.stop(0.1)
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    part.start(waiting, dict(os.environ), for_ever=False)
    try:
        assert service.running_address() == "http://127.0.0.1:1/api"
        assert server_address() is None
    finally:
        part.stop(0.1)


BORROWED = """
import sys, threading
from flows.service import running_address, temporary_server
from flows.runner import run_directly
from flows.tracked import run_tracked, server_address, tracked_flow
with temporary_server():
    run_tracked(tracked_flow("toy", lambda config: None), {}, server_address())
    print(running_address(), flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_the_server_of_the_demo_dies_with_it_and_make_server_shows_its_runs(tmp_path, capsys):
    from flows.cli import main

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        path = service_file(tmp_path, probe.getsockname()[1])
    process = python(BORROWED, **{MARK: str(tmp_path)})
    try:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("http://") for line in lines)
        assert len(marked(tmp_path)) >= 2
    finally:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not marked(tmp_path), PATIENCE_SECONDS, every=0.05)
    assert main(["service", "start", "--file", str(path)]) == 0
    try:
        with service.connected(service.read_service(path)) as client:
            runs = {client.read_flow(run.flow_id).name for run in client.read_flow_runs()}
        assert runs == {"toy"}
    finally:
        main(["service", "stop", "--file", str(path)])
