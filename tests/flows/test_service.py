"""Scheduled runs: the service file, deployments, failure notes, lost runs, and the real service."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from flows.cli import benchmarks, main
from flows.deployments import declared_deployments, plan_deployments, read_service, rhythm_name
from flows.processes import Background, processes_with, start_mark, wait_until
from flows.service import connected, reports_address, start
from schemas.errors import ConfigError, LakeError, NoveltyError, SourceError
from storage.disk_use import disk_use
from storage.locks import all_locked
from storage.tables import current_version
from storage.upkeep import find_garbage
from tasks.sample.condda import write_condda
from tests import s3
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]
QUICK = {"predictors": ["threshold"], "protocols": ["OND"], "run": {"red_light": "without"}}


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch):
    for name in ("PREFECT_API_URL", "NOVELTY_SERVICE", "NOVELTY_LAKE", "NOVELTY_NOTIFY"):
        monkeypatch.delenv(name, raising=False)


def service_file(folder: Path, **values) -> Path:
    path = folder / "service.yaml"
    if "port" in values:
        values.setdefault("report_port", free_port())  # port + 1 may be taken
    path.write_text(yaml.safe_dump(values))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- the file -------------------------------------------------------------------------------------


def test_every_flow_is_declared_once_weekly_at_its_own_hour_one_at_a_time():
    declared = declared_deployments()
    assert sorted(entry.flow for entry in declared) == sorted([*benchmarks(), "gc"])
    hours = {entry.schedule["cron"] for entry in declared}
    assert len(hours) == len(declared)
    for entry in declared:
        assert entry.entrypoint == f"flows.tracked.{entry.flow}"
        assert entry.paused and entry.config is None
        assert entry.limit == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        _, hour, *_, weekday = entry.schedule["cron"].split()
        assert hour.isdigit() and weekday.isdigit()


def test_a_benchmark_that_is_not_named_is_paused_and_says_what_to_write(tmp_path):
    (tmp_path / "tests").mkdir()
    entry = {"config": {"tests": "tests"}, "cron": "30 4 * * 2", "timezone": "Europe/Berlin"}
    service = read_service(service_file(tmp_path, benchmarks={"condda": entry}))
    planned = {deployment.flow: deployment for deployment in plan_deployments(service)}
    condda, kowl = planned["condda"], planned["kowl"]
    assert not condda.paused
    assert condda.schedule == {
        "cron": "30 4 * * 2",
        "timezone": "Europe/Berlin",
        "slug": "weekly",
    }
    assert kowl.paused and kowl.config is None
    assert "benchmarks.kowl.config" in kowl.description and "make deploy" in kowl.description


def test_relative_paths_count_from_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    for name in ("raw", "c"):
        (tmp_path / name).mkdir()
    given = {
        "semantic": {"config": {"source": {"cifar10": "c"}, "seeds": [3]}},
        "novelcraft": {"config": {"source": str(tmp_path / "raw"), "lake": "s3://bucket/lake"}},
    }
    service = read_service(service_file(tmp_path, lake="here", benchmarks=given))
    assert service.state == tmp_path / ".novelty" / "service"
    assert service.benchmarks["semantic"].config == {
        "source": {"cifar10": str(tmp_path / "c")},
        "seeds": [3],
        "lake": str(tmp_path / "here"),
    }
    assert service.benchmarks["novelcraft"].config["lake"].startswith("s3:/")
    assert read_service(service_file(tmp_path)).lake == Path("/lake")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prot": 1}, "prot is not a setting"),
        ({"port": 0}, "port"),
        ({"database": "sqlite:///x"}, r"postgresql\+asyncpg://"),
        ({"benchmarks": {"kwol": {}}}, "unknown benchmark 'kwol'; there are: .*kowl"),
        ({"benchmarks": {"condda": {}}}, "benchmarks.condda.config: .*tests: field required"),
        ({"benchmarks": {"condda": {"config": {"tests": "no"}}}}, "no does not exist"),
        ({"benchmarks": {"condda": {"cron": "1 * * * *", "every": 5}}}, "exclude each other"),
        ({"benchmarks": {"condda": {"config": {"tests": "."}, "cron": "soon"}}}, "condda: .*cron"),
        ({"notify": ["nowhere://x"]}, "notify: an address that begins with nowhere: is not und"),
        ({"timezone": "Mars/Base", "benchmarks": {"condda": {"config": {"tests": "."}}}}, "Mars"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_the_file_is_a_sentence(tmp_path, values, said):
    with pytest.raises(ConfigError, match=said):
        plan_deployments(read_service(service_file(tmp_path, **values)))


def test_stop_and_status_need_no_source(tmp_path, capsys):
    entry = {"config": {"source": "unplugged/disk"}}
    path = service_file(tmp_path, port=free_port(), benchmarks={"novelcraft": entry})
    assert main(["service", "start", "--file", str(path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["service", "stop", "--file", str(path)]) == 0
    assert main(["service", "status", "--file", str(path)]) == 1
    assert capsys.readouterr().out == (
        "not running\nserver: not running\nworker: not running\nreports: not running\n"
    )


def test_make_takes_the_lake_of_the_environment(tmp_path):
    def lake(*words: str, **environment: str) -> str:
        command = ["make", "-s", "-f", "Makefile", "-f", "-", "say", *words]
        known = {name: value for name, value in os.environ.items() if name != "LAKE"}
        return subprocess.run(
            command,
            cwd=ROOT,
            env=known | environment,
            input="say:\n\t@echo $$NOVELTY_LAKE\n",
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert lake() == "lake"
    assert lake(NOVELTY_LAKE="/data/lake") == "/data/lake"
    assert lake("LAKE=/mine", NOVELTY_LAKE="/data/lake") == "/mine"


def test_a_named_file_must_be_there_and_none_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_service().benchmarks == {}
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        read_service("mine.yaml")


# --- processes ------------------------------------------------------------------------------------

STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('up', flush=True); time.sleep(600)"
)


def test_a_process_is_found_again_and_ended_with_its_children(tmp_path):
    part = Background("part", tmp_path)
    assert part.pid() is None and not part.stop()
    part.start([sys.executable, "-c", STUBBORN], dict(os.environ))
    try:
        assert wait_until(lambda: part.last_words() == "up", 20)
        family = Background("part", tmp_path).family()
        assert len(family) == 2 and family[0].pid == part.pid()
    finally:
        assert Background("part", tmp_path).stop(wait_seconds=0.5)
    assert not any(process.is_running() for process in family[1:])
    assert start_mark(family[0].pid) is None and part.pid() is None
    assert not part.record.exists()


def test_an_id_that_another_program_got_is_left_alone(tmp_path):
    part = Background("part", tmp_path)
    part.start(["sleep", "0"], dict(os.environ))
    assert wait_until(lambda: part.pid() is None, 10)
    part.record.write_text('{"pid": 1, "start": null, "command": []}')
    assert part.pid() is None
    with subprocess.Popen(["sleep", "600"]) as other:
        part.record.write_text(f'{{"pid": {other.pid}, "start": "boot/1", "command": []}}')
        assert part.pid() is None
        assert not part.stop()
        assert other.poll() is None
        other.kill()


def test_a_taken_port_and_a_missing_server_are_sentences(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = service_file(tmp_path, port=taken.getsockname()[1])
        assert main(["service", "start", "--file", str(path)]) == 2
        assert "is taken; set another `port`" in capsys.readouterr().err
    assert main(["service", "deploy", "--file", str(path)]) == 2
    assert "no Prefect server answers" in capsys.readouterr().err
    assert main(["service", "stop", "--file", str(path)]) == 0
    assert capsys.readouterr().out == "not running\n"
    assert main(["service", "status", "--file", str(path)]) == 1


# --- against an API -------------------------------------------------------------------------------


@pytest.fixture
def client(prefect_api):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def deployed(tmp_path, client):
    """CONDDA deployed for an empty source."""
    from flows.deployments import deploy

    (tmp_path / "tests").mkdir()
    entry = {"config": {"tests": "tests"}, "cron": "0 4 * * 2"}
    service = read_service(service_file(tmp_path, lake="lake", benchmarks={"condda": entry}))
    deploy(service)
    return tmp_path, service, client.read_deployment_by_name("condda/weekly")


def test_deployments_carry_schedule_settings_descriptions_and_the_limit(deployed, client):
    from flows.deployments import deploy

    root, _, made = deployed
    config = {"tests": str(root / "tests"), "lake": str(root / "lake")}
    assert made.parameters == {"config": config} and not made.paused
    assert [schedule.schedule.cron for schedule in made.schedules] == ["0 4 * * 2"]
    assert made.entrypoint == "flows.tracked.condda" and made.work_pool_name == "novelty"
    assert made.job_variables == {"env": {"PYTHONSAFEPATH": "1"}}
    assert made.global_concurrency_limit.limit == 1
    assert made.concurrency_options.collision_strategy == "CANCEL_NEW"
    shown = made.parameter_openapi_schema["definitions"]["Config"]["properties"]
    assert shown["tests"]["description"].startswith("Folder of PROTOCOL/domain/ test files")
    assert client.read_deployment_by_name("kowl/weekly").paused

    entry = {"config": {"tests": "tests"}, "every": 3600, "paused": True}
    deploy(read_service(service_file(root, lake="lake", benchmarks={"condda": entry})))
    again = client.read_deployment_by_name("condda/hourly")
    assert again.paused
    (schedule,) = again.schedules
    assert schedule.schedule.interval.total_seconds() == 3600
    flow = again.flow_id  # the one of the schedule before is gone
    assert [each.name for each in client.read_deployments() if each.flow_id == flow] == ["hourly"]


@pytest.mark.parametrize(
    ("rhythm", "name"),
    [
        ({"interval": 3600.0}, "hourly"),
        ({"interval": 604800.0}, "weekly"),
        ({"interval": 15.0}, "every-15-seconds"),
        ({"interval": 172800.0}, "every-2-days"),
        ({"cron": "5 * * * *"}, "hourly"),
        ({"cron": "0 3 * * *"}, "daily"),
        ({"cron": "0 3 * * mon"}, "weekly"),
        ({"cron": "0 3 1 * *"}, "monthly"),
        ({"cron": "0 3 1 6 *"}, "yearly"),
        ({"cron": "0 3 * * 1-5"}, "cron-0-3-1-5"),
    ],
)
def test_a_deployment_is_named_after_its_schedule(rhythm, name):
    assert rhythm_name(rhythm) == name


def test_gc_is_a_deployment_and_removes_what_nothing_needs(tmp_path, client):
    from flows import tracked
    from flows.deployments import deploy

    write_raw(tmp_path / "raw")
    lake = tmp_path / "lake"
    build_toy(lake, tmp_path / "raw")
    build_toy(lake, tmp_path / "raw", scale=2.0)
    service = read_service(
        service_file(tmp_path, lake="lake", gc={"grace": 0, "keep": 1, "cron": "0 2 1 * *"})
    )
    deploy(service)
    made = client.read_deployment_by_name("gc/monthly")
    assert not made.paused
    assert made.parameters == {"config": {"lake": str(lake), "grace": 0.0, "keep": 1}}

    versions = sorted(lake.glob("toy/*/versions/*"))
    before = disk_use(lake, find_garbage(lake, 0, 1))
    assert 0 < before.reclaimable < before.used
    with all_locked(lake):
        tracked.gc(made.parameters["config"])  # a build has the lake: left to the next time
    assert sorted(lake.glob("toy/*/versions/*")) == versions
    tracked.gc(made.parameters["config"])
    after = disk_use(lake, find_garbage(lake, 0, 1))
    assert len(list(lake.glob("toy/*/versions/*"))) < len(versions)
    assert after.reclaimable == 0 and before.used - before.reclaimable <= after.used < before.used


def test_the_note_of_gc_names_its_command(tmp_path):
    from flows.gc import Cleanup, build

    with pytest.raises(LakeError):
        build(Cleanup(lake=tmp_path / "lake"))
    (note,) = notes_in(tmp_path / "lake")
    assert f"    novelty gc --yes --lake {tmp_path / 'lake'}\n" in note.read_text()


# --- reports --------------------------------------------------------------------------------------


def test_reports_are_served_to_this_machine_only(tmp_path):
    from http.client import HTTPConnection

    folder, port = tmp_path / "reports", free_port()
    (folder / "failures").mkdir(parents=True)
    (folder / "condda.html").write_text("<p>report</p>")
    (folder / "failures" / "a.md").write_text("# note")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")

    def get(path: str, host: str = f"127.0.0.1:{port}") -> tuple[int, str, bytes]:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path, headers={"Host": host})
        reply = connection.getresponse()
        return reply.status, reply.getheader("Content-Type", ""), reply.read()

    server = Background("reports", tmp_path / "state")
    command = [sys.executable, "-m", "flows.report_server", str(folder), str(port)]
    server.start(command, dict(os.environ))
    try:

        def up() -> bool:
            with contextlib.suppress(OSError):
                return get("/")[0] == 200
            return False

        assert wait_until(up, 60), server.last_words()
        assert get("/condda.html") == (200, "text/html", b"<p>report</p>")
        assert get("/failures/a.md")[:2] == (200, "text/plain; charset=utf-8")
        for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/link.txt", "/none.html"):
            status, _, body = get(path)
            assert status == 404 and b"secret" not in body.replace(path.encode(), b"")
        assert get("/condda.html", host="evil.example")[0] == 403
    finally:
        server.stop()


def test_the_link_of_a_report(tmp_path, monkeypatch):
    from flows.share_report import report_link

    page = tmp_path / "lake" / "reports" / "kowl.html"
    assert report_link(tmp_path / "lake", "kowl", str(page)) == page.as_uri()
    monkeypatch.setenv("NOVELTY_REPORTS_URL", "http://127.0.0.1:4201")
    monkeypatch.setenv("NOVELTY_REPORTS_LAKE", str(tmp_path / "lake"))
    served = "http://127.0.0.1:4201/kowl.html"
    assert report_link(tmp_path / "lake", "kowl", str(page)) == served
    assert report_link(tmp_path / "other", "kowl", str(page)) == page.as_uri()


def test_a_wrong_setting_is_refused_by_the_server(deployed, client):
    from prefect.exceptions import PrefectHTTPStatusError

    with pytest.raises(PrefectHTTPStatusError, match=r"422|409"):
        client.create_flow_run_from_deployment(deployed[2].id, parameters={"config": {"tset": 1}})


@pytest.fixture
def existing_server(client, monkeypatch):
    """PREFECT_API_URL names a server that is not ours."""
    from prefect.settings import PREFECT_API_URL

    monkeypatch.setenv("PREFECT_API_URL", PREFECT_API_URL.value())
    return client


def test_the_last_run_is_not_one_that_was_cancelled_because_another_was_under_way(deployed, client):
    from prefect.states import Completed, Pending, Running

    from flows.service import last_run

    deployment = deployed[2]
    assert last_run(client, deployment.id) is None
    one, other = (client.create_flow_run_from_deployment(deployment.id) for _ in range(2))
    client.set_flow_run_state(one.id, Pending())
    client.set_flow_run_state(one.id, Running())
    client.set_flow_run_state(other.id, Pending())  # the one place is taken
    client.set_flow_run_state(one.id, Completed())
    late = client.read_flow_run(other.id)
    assert late.state.name == "Cancelled" and late.start_time is not None
    last = last_run(client, deployment.id)
    assert last.id == one.id and last.state.name == "Completed"


def test_status_finds_failed_late_and_missing_runs(deployed, client):
    from prefect.states import Completed, Failed, Running, Scheduled

    from flows.service import last_run, schedule_problems

    deployment, now = deployed[2], datetime.now(UTC)

    def problems(later: timedelta = timedelta(0)) -> list[str]:
        return schedule_problems(client, deployment, last_run(client, deployment.id), now + later)

    def due(*hours: int) -> None:
        for run in client.read_flow_runs():
            if run.deployment_id == deployment.id and run.state.is_scheduled():
                client.delete_flow_run(run.id)
        for hour in hours:
            at = now + timedelta(hours=hour)
            state = Scheduled(scheduled_time=at)
            client.create_flow_run_from_deployment(deployment.id, state=state)

    due()
    assert problems() == []  # it was deployed a moment ago
    assert problems(timedelta(hours=1)) == [
        "no run is scheduled; see the server's log, and try `make deploy`"
    ]
    due(24, 48)
    assert problems() == problems(timedelta(hours=23)) == []
    (late,) = problems(timedelta(hours=25))
    assert late.startswith("1 runs are late, the first was due at ")

    run = client.create_flow_run_from_deployment(deployment.id)
    client.set_flow_run_state(run.id, Running(), force=True)
    due(72, 96)
    assert problems(timedelta(hours=40)) == []  # it is still under way
    client.set_flow_run_state(run.id, Completed(), force=True)
    assert problems(timedelta(hours=23)) == []
    (missing,) = problems(timedelta(hours=40))
    assert missing.startswith("runs are missing: none began since ")

    client.set_flow_run_state(run.id, Failed(message="The disk is full.\nmore"), force=True)
    assert problems() == [f"its last run failed ({run.id}): The disk is full."]
    due()


def test_deployments_go_to_the_server_that_is_named(tmp_path, existing_server, capsys):
    entry = {"config": {"tests": "."}, "cron": "7 7 * * 7"}
    path = service_file(tmp_path, lake="lake", benchmarks={"condda": entry})
    assert main(["service", "deploy", "--file", str(path)]) == 0
    assert "condda/weekly: 7 7 * * 7 UTC\n" in capsys.readouterr().out
    made = existing_server.read_deployment_by_name("condda/weekly")
    assert [schedule.schedule.cron for schedule in made.schedules] == ["7 7 * * 7"]
    assert main(["service", "status", "--file", str(path)]) == 1  # no worker here
    said = capsys.readouterr().out
    assert said.startswith("worker: not running\n") and "condda/weekly: scheduled" in said
    assert main(["service", "stop", "--file", str(path)]) == 0
    assert existing_server.api_healthcheck() is None


@pytest.mark.slow
def test_with_an_existing_server_only_a_worker_starts_and_stops(tmp_path, existing_server, capsys):
    command = ["service", "--file", str(service_file(tmp_path, lake="lake", state="state"))]
    worker = Background("worker", tmp_path / "state")
    try:
        assert main([*command, "start"]) == 0
        assert "(not ours), worker novelty-" in capsys.readouterr().out
        assert worker.pid() and not (tmp_path / "state" / "server.json").exists()
        assert main([*command, "status"]) == 0
    finally:
        main([*command, "stop"])
    assert worker.pid() is None
    assert existing_server.api_healthcheck() is None


def run_of(client, deployment, state, worker: str | None):
    run = client.create_flow_run_from_deployment(deployment.id)
    client.set_flow_run_state(run.id, state, force=True)
    if worker:
        labels = {"prefect.worker.name": worker}
        client._client.patch(f"/flow_runs/{run.id}/labels", json=labels).raise_for_status()
    return run


def test_runs_without_a_process_are_cleared_and_no_others(deployed, client):
    from prefect import task
    from prefect.states import Pending, Running

    from flows.lost_runs import clear_runs, lost_runs

    root, _, deployment = deployed
    gone = run_of(client, deployment, Running(), "novelty-here")
    early = run_of(client, deployment, Pending(), None)
    alive = run_of(client, deployment, Running(), "novelty-here")
    elsewhere = run_of(client, deployment, Running(), "novelty-other-machine")
    shard = client.create_task_run(
        task(lambda: None, name="read_test"), gone.id, "0", name="read_test/OND.1", state=Running()
    )
    ours = {gone.id, early.id, alive.id, elsewhere.id}

    def lost(**how) -> set:
        return {run.id for run in lost_runs(client, "novelty-here", **how)} & ours

    environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(alive.id)}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            assert lost(worker_lives=True, own_server=True) == set()  # they are seconds old
            assert lost(worker_lives=False, own_server=False) == {gone.id}
            assert lost(worker_lives=False, own_server=True) == {gone.id, early.id}
            found = lost_runs(client, "novelty-here", worker_lives=False, own_server=True)
            clear_runs(client, [run for run in found if run.id in ours], "The worker died.")
            assert lost(worker_lives=False, own_server=True) == set()
        finally:
            process.kill()
    states = {id: client.read_flow_run(id).state.name for id in ours}
    assert states == {
        gone.id: "Crashed",
        early.id: "Crashed",
        alive.id: "Running",
        elsewhere.id: "Running",
    }
    assert "The worker died. It was Running since" in client.read_flow_run(gone.id).state.message
    assert client.read_task_run(shard.id).state.name == "Crashed"
    notes = [path.read_text() for path in sorted((root / "lake/reports/failures").glob("*.md"))]
    assert len(notes) == 2
    assert any("- Stage: read_test, shard: OND.1 (running)" in note for note in notes)
    for run in (alive, elsewhere):
        client.set_flow_run_state(run.id, Pending(), force=True)
        client.delete_flow_run(run.id)


# --- failure notes --------------------------------------------------------------------------------


def notes_in(lake: Path) -> list[Path]:
    return sorted((lake / "reports" / "failures").glob("*.md"))


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "direct"])
def test_the_note_of_a_failed_shard(tmp_path, client, tracked):
    from flows.runner import run_directly
    from flows.tracked import tracked_flow

    write_raw(tmp_path / "raw", files=3)
    (tmp_path / "raw" / "f1.txt").write_bytes(b"a,\xff\n")  # not UTF-8: a defect, so a traceback
    lake = tmp_path / "lake"

    def run(config):
        build_toy(lake, tmp_path / "raw")

    config = {"lake": str(lake), "scale": 2}
    with pytest.raises(UnicodeDecodeError):
        tracked_flow("toy", run)(config) if tracked else run_directly("toy", run, config)
    (note,) = notes_in(lake)
    text = note.read_text()
    assert text.startswith("# toy: failed\n\nUnicodeDecodeError: 'utf-8' codec can't decode")
    assert "- Stage: read_lines, shard: f1.txt (failed)" in text
    assert "shard: f0.txt" not in text
    assert "## Traceback" in text and "in read_lines" in text
    config = note.with_suffix(".yaml")
    assert f"    novelty build toy --config {config}\n" in text
    assert yaml.safe_load(config.read_text()) == {"lake": str(lake), "scale": 2}
    kept = [artifact.data for artifact in client.read_artifacts() if artifact.key == "toy-failure"]
    assert (text in kept) == tracked


def test_the_command_of_a_note_goes_on(tmp_path, monkeypatch):
    from flows.condda import build
    from schemas.condda import Config

    lake, tests = tmp_path / "lake", tmp_path / "tests"
    tests.mkdir()
    config = Config(tests=tests, lake=lake, **QUICK, max_reject_share=0.4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as failure:
        build(config.model_copy(update={"tests": Path("tests"), "lake": Path("lake")}))
    monkeypatch.chdir("/")
    (note,) = notes_in(lake)
    text = note.read_text()
    assert text.startswith(f"# condda: failed\n\n{failure.value}\n")
    assert "Traceback" not in text
    assert yaml.safe_load(note.with_suffix(".yaml").read_text()) == config.model_dump(mode="json")

    write_condda(tests, rows=192)
    (line,) = [line for line in text.splitlines() if line.startswith("    novelty ")]
    words = shlex.split(line)
    assert words[0] == "novelty" and main(words[1:]) == 0
    assert set(current_version(lake, "condda", "sessions").read()["protocol"]) == {"OND"}


def test_the_note_of_a_lake_in_a_bucket_stands_in_the_bucket(tmp_path, monkeypatch):
    from flows.condda import build
    from schemas.condda import Config
    from storage.layout import lake_root
    from storage.objects import bucket_of

    (tmp_path / "tests").mkdir()
    (tmp_path / "store").mkdir()
    with s3.moto(tmp_path / "store") as url:
        for name, value in s3.settings(url, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        address = f"s3://{s3.BUCKET}/notes"
        with pytest.raises(SourceError):
            build(Config(tests=tmp_path / "tests", lake=address, **QUICK))
        lake = lake_root(address)
        (note,) = notes_in(lake)
        there = bucket_of(lake)
        for path in (note, note.with_suffix(".yaml")):
            assert there.get(str(path.relative_to(lake))).data == path.read_bytes()


def test_long_lists_of_shards_are_cut(tmp_path):
    from flows.hooks import Ending, Note

    shards = [("render", f"episode_{number:03}", "failed") for number in range(50)]
    ending = Ending("fox, 1", "crashed", None, shards, "Killed.")
    lake = tmp_path / "a lake"
    text = Note.of("novelcraft", {"config": {"lake": str(lake)}}, ending).text
    assert text.startswith("# novelcraft: crashed\n\nKilled.\n")
    assert text.count("shard: episode_") == 20 and "- and 30 shards more" in text
    assert f"    novelty build novelcraft --config '{lake}/reports/failures/" in text


@contextlib.contextmanager
def webhook():
    """A server on loopback; gives its address and the messages that it got."""
    got: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("followed", [True, False], ids=["tracked", "direct"])
def test_failures_and_the_recovery_are_told_once_and_the_run_is_named_after_its_data(
    tmp_path, client, monkeypatch, followed
):
    from flows import condda, tracked
    from flows.hooks import data_version
    from schemas.condda import Config

    lake, tests = tmp_path / "lake", tmp_path / "tests"
    tests.mkdir()
    config = Config(tests=tests, lake=lake, **QUICK, max_reject_share=0.4)
    build = tracked.condda if followed else condda.build
    with webhook() as (address, got):
        monkeypatch.setenv("NOVELTY_NOTIFY", address)
        for _ in range(3):
            with pytest.raises(SourceError) as failure:
                build(config)
        (note,) = notes_in(lake)
        assert "- Failed like this: 3 times since 20" in note.read_text()
        assert [message["title"] for message in got] == ["novelty: condda failed"] * 2  # 1st, 2nd
        for said in (
            str(failure.value),
            f"novelty build condda --config {note.with_suffix('.yaml')}",
        ):
            assert said in got[0]["message"]

        with pytest.raises(SourceError):
            build(config.model_copy(update={"max_reject_share": 0.3}))  # another failure
        assert len(notes_in(lake)) == 2 and len(got) == 3

        write_condda(tests, rows=192)
        build(config)
        assert got[-1]["title"] == "novelty: condda works again" and len(got) == 4
        again = notes_in(lake)[-1].read_text().partition("\n")[0]
        assert again.startswith("It works again: run condda, ")
        if followed:
            run = client.read_flow_run(again.split(", ")[1])
            version = data_version(lake, "condda")
            assert len(version) == 8 and run.name == f"condda-{version}"
        build(config)
        assert len(got) == 4


def test_a_failure_counts_on_with_a_server_and_without(tmp_path, prefect_api):
    from flows.runner import run_directly
    from flows.tracked import tracked_flow

    def run(config):
        raise RuntimeError("the same defect")

    config = {"lake": str(tmp_path / "lake")}
    for build in (tracked_flow("toy", run), lambda config: run_directly("toy", run, config)):
        with pytest.raises(RuntimeError):
            build(config)
    (note,) = notes_in(tmp_path / "lake")
    assert "- Failed like this: 2 times since 20" in note.read_text()


def test_a_message_that_cannot_be_sent_stops_nothing_and_shows_no_password(
    monkeypatch, capsys, tmp_path, caplog
):
    from flows.notify import notify

    address = f"http://me:secret@127.0.0.1:{free_port()}/hook"
    monkeypatch.setenv("NOVELTY_NOTIFY", f"{address} nowhere://x:secret@y")
    assert len(notify("title", "body")) == 2
    assert "could not be sent" in caplog.text and "secret" not in caplog.text
    monkeypatch.delenv("NOVELTY_NOTIFY")
    with webhook() as (good, got):
        path = service_file(tmp_path, notify=[good, address])
        assert main(["service", "notify", "--file", str(path)]) == 1
        printed = capsys.readouterr()
        assert "sent to 1 of 2" in printed.out and "secret" not in printed.out + printed.err
        assert got[0]["title"] == "novelty: test"


# --- the whole service ----------------------------------------------------------------------------


def left_behind(state: Path) -> list[psutil.Process]:
    home = str(state / "prefect")
    return [p for p, known in processes_with("PREFECT_HOME") if known["PREFECT_HOME"] == home]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("127.0.0.1:{port}/novelty", "lets nobody in .*Connect call failed"),
        ("127.0.0.1:{port}/novelty?sslmode=disable", "lets nobody in .*sslmode"),
        ("127.0.0.1:x/novelty", "expected postgresql"),
    ],
)
def test_a_database_that_lets_nobody_in_is_a_sentence(tmp_path, place, said):
    address = f"postgresql+asyncpg://novelty:secret@{place.format(port=free_port())}"
    service = read_service(
        service_file(tmp_path, state="state", port=free_port(), database=address)
    )
    with pytest.raises(NoveltyError, match=said) as refusal:
        start(service)
    assert "secret" not in str(refusal.value) and "\n" not in str(refusal.value)
    assert left_behind(tmp_path / "state") == []


@contextlib.contextmanager
def postgresql(folder: Path):
    """A real PostgreSQL on loopback; it refuses to run as root, so another user starts it."""
    import pwd

    installed = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)  # Debian
    places = os.pathsep.join([os.environ["PATH"], *installed])
    programs = {name: shutil.which(name, path=places) for name in ("initdb", "pg_ctl")}
    if not all(programs.values()):
        pytest.skip("there is no PostgreSQL (initdb, pg_ctl) here: apt-get install postgresql")
    before: list[str] = []
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            user = pwd.getpwnam("nobody")
        before = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        if not shutil.which("setpriv"):
            pytest.skip("PostgreSQL does not run as root, and there is no setpriv to change user")
        os.chown(folder, user.pw_uid, user.pw_gid)
    port, data = free_port(), folder / "data"

    def call(program: str, *words: str) -> None:
        command = [*before, programs[program], *words]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    call("initdb", "-D", str(data), "-A", "trust", "-U", "novelty", "--no-sync")
    options = f"-h 127.0.0.1 -p {port} -k {folder}"
    call("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-o", options, "-w", "start")
    try:
        yield f"postgresql+asyncpg://novelty@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", str(data), "-m", "fast", "-w", "stop")


def scheduled_run(root: Path, capsys, **database) -> None:
    """From a fresh state: up, a scheduled run, its tables and report, down, no process left."""
    tests, lake, state = root / "tests", root / "lake", root / "state"
    write_condda(tests, rows=192)
    entry = {"config": {"tests": "tests", **QUICK}, "every": 15}
    path = service_file(
        root, lake="lake", state="state", port=free_port(), benchmarks={"condda": entry}, **database
    )
    command = ["service", "--file", str(path)]
    report = lake / "reports" / "condda.html"
    try:
        assert main([*command, "start"]) == 0
        said = capsys.readouterr().out
        assert "condda/every-15-seconds: every 15 s" in said and "kowl/weekly: paused" in said
        assert main([*command, "start"]) == 0
        assert capsys.readouterr().out.startswith("already running: server http://127.0.0.1:")

        assert wait_until(report.exists, 120), (state / "worker.log").read_text()
        assert current_version(lake, "condda", "sessions").read().height == 4
        assert main([*command, "status"]) == 0
        assert "condda/every-15-seconds: scheduled, last run: " in capsys.readouterr().out
        address = f"{reports_address(read_service(path))}/condda.html"

        def linked() -> bool:  # after the page is written
            with connected(read_service(path)) as client:
                links = [made for made in client.read_artifacts() if made.key == "condda-report"]
            return bool(links) and f"({address})" in links[0].data

        assert wait_until(linked, 120)
        assert httpx.get(address, trust_env=False).content == report.read_bytes()
    finally:
        main([*command, "stop"])
    assert capsys.readouterr().out.endswith("stopped\n")
    assert left_behind(state) == []
    assert not list(state.glob("*.json"))


def test_a_scheduled_run_from_a_fresh_state(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "2")
    scheduled_run(tmp_path, capsys)
    assert (tmp_path / "state" / "prefect.db").exists()


@pytest.mark.slow
def test_a_scheduled_run_on_postgresql(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "2")
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder, postgresql(Path(folder)) as address:
        scheduled_run(tmp_path, capsys, database=address)
        other = service_file(tmp_path, state="other", port=free_port(), database=f"{address}x")
        with pytest.raises(NoveltyError, match='"postgresx" does not exist'):
            start(read_service(other))
    assert not (tmp_path / "state" / "prefect.db").exists()


@pytest.mark.slow
def test_a_killed_run_and_a_killed_worker_leave_notes_and_the_next_run_goes_on(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "2")
    write_condda(tmp_path / "tests", rows=192)
    entry = {"config": {"tests": "tests", **QUICK}, "every": 15}
    path = service_file(
        tmp_path, lake="lake", state="state", port=free_port(), benchmarks={"condda": entry}
    )
    command = ["service", "--file", str(path)]
    worker = Background("worker", tmp_path / "state")
    lake = tmp_path / "lake"

    def engine() -> psutil.Process:
        def found() -> list[psutil.Process]:
            return [p for p in worker.family() if "prefect.engine" in " ".join(p.cmdline())]

        assert wait_until(lambda: bool(found()), 60)
        return found()[0]

    try:
        assert main([*command, "start"]) == 0
        engine().kill()
        assert wait_until(lambda: len(notes_in(lake)) == 1, 60), worker.last_words(60)
        assert "SIGKILL" in notes_in(lake)[0].read_text()

        run = engine()
        os.kill(worker.pid(), signal.SIGKILL)
        run.kill()
        assert main([*command, "status"]) == 1
        assert "its process is gone; clear it with" in capsys.readouterr().out
        assert main([*command, "start"]) == 0
        assert "cleared as Crashed" in capsys.readouterr().out
        assert "The worker died" in notes_in(lake)[1].read_text()
        assert wait_until((lake / "reports" / "condda.html").exists, 120)
    finally:
        main([*command, "stop"])
    assert left_behind(tmp_path / "state") == []
