"""The service of this machine: a Prefect server on loopback, a worker, reports, the deployments.

Enters: `service.yaml` (flows/deployments.py). Leaves: three background processes, known by files in
the state folder, and an account of them on the terminal. Where PREFECT_API_URL names another
server, that one is used and only the worker and the server of reports run here.
"""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from flows.deployments import (
    Service,
    declared_deployments,
    deploy,
    plan_deployments,
    read_service,
)
from flows.lost_runs import RUN_ID, clear_runs, lost_runs, unfinished_runs
from flows.notify import NOTIFY, addresses, notify
from flows.processes import Background, end_all, processes_with, wait_until
from flows.report_server import REPORTS_LAKE, REPORTS_URL
from flows.tracked import named_address
from schemas.errors import ConfigError, NoveltyError
from storage.layout import content_key, lake_root
from tasks.report import REPORTS

log = logging.getLogger(__name__)

HEALTHY_SECONDS = 240.0
STOP_SECONDS = 5.0
LAST_RUNS = 50
LATE_SECONDS = 300.0
"""A run that has not begun so long after its time is late: a worker asks every 15 seconds."""
MINUTE = "%Y-%m-%d %H:%M"


class ServiceError(NoveltyError):
    """A process of the service did not start or ended by itself."""


def own_address(service: Service) -> str:
    return f"http://127.0.0.1:{service.port}/api"


def api_address(service: Service) -> str:
    """PREFECT_API_URL if it is set, else the server that `start` starts."""
    return os.environ.get("PREFECT_API_URL") or own_address(service)


def is_own(service: Service) -> bool:
    return api_address(service) == own_address(service)


def reports_address(service: Service) -> str:
    """Where the reports of the service's lake are served."""
    return f"http://127.0.0.1:{service.report_port or service.port + 1}"


def worker_name(service: Service) -> str:
    """The same after a restart; each state folder has its own, on a shared server each machine."""
    place = "" if is_own(service) else f"{socket.gethostname()}-"
    return f"novelty-{place}{content_key(str(service.state))[:6]}"


def environment(service: Service) -> dict[str, str]:
    """Environment of the server and the worker: all files of theirs lie in the state folder."""
    settings = {
        "PREFECT_API_URL": api_address(service),
        "PREFECT_LOGGING_LEVEL": "INFO",
        REPORTS_URL: reports_address(service),
        REPORTS_LAKE: str(service.lake),
    }
    if service.notify:
        settings[NOTIFY] = " ".join(service.notify)
    if not is_own(service):
        return os.environ | settings  # its keys and certificates are in the user's own settings
    folder = service.state
    return (
        os.environ
        | settings
        | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": (
                service.database or f"sqlite+aiosqlite:///{folder / 'prefect.db'}"
            ),
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # SQLite has one writer; others wait for it
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        }
    )


def parts(service: Service) -> tuple[Background, Background, Background]:
    """The server, the worker, and the server of reports."""
    server, worker, reports = (
        Background(name, service.state) for name in ("server", "worker", "reports")
    )
    return server, worker, reports


def _own_parts(service: Service) -> list[Background]:
    """Those that run here: no server where another one is named."""
    server, *others = parts(service)
    return [server, *others] if is_own(service) else others


def _require_alive(part: Background, title: str) -> None:
    if part.pid() is None:
        raise ServiceError(f"{title} ended; {part.log} ends with:\n{part.last_words()}")


@contextlib.contextmanager
def connected(service: Service) -> Iterator[Any]:
    """A client of the service's server; everything inside speaks to that one."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    _no_proxy_on_loopback()
    with temporary_settings({PREFECT_API_URL: api_address(service)}):
        with get_client(sync_client=True) as client:
            if client.api_healthcheck() is not None:
                raise ServiceError(
                    f"no Prefect server answers at {api_address(service)}; start one with `make "
                    "server`, or name a running one with PREFECT_API_URL"
                )
            yield client


def _no_proxy_on_loopback() -> None:
    """A company's proxy cannot reach 127.0.0.1 of this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


@contextlib.contextmanager
def _alone(service: Service) -> Iterator[None]:
    """One start or stop at a time."""
    _check_user(service)
    service.state.mkdir(parents=True, exist_ok=True)
    with (service.state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(
                "the service is being started or stopped by another command; wait for it to end"
            ) from None
        yield


def _check_user(service: Service) -> None:
    """Another user cannot see whose processes live, so would take every run for lost."""
    if service.state.exists() and os.geteuid() not in (0, owner := service.state.stat().st_uid):
        raise ServiceError(f"the service belongs to user {owner}; run this command as that user")


def start(service: Service) -> None:
    """Server, crashed runs cleared, deployments, worker; waits for each and says where it is."""
    _no_proxy_on_loopback()
    plan_deployments(service)  # a mistake in the file is said before anything starts
    with _alone(service):
        server, worker, reports = parts(service)
        fresh = [part for part in _own_parts(service) if not part.pid()]
        if not fresh:
            print(f"already running: {_account(service)}")
            return
        if server in fresh:
            _check_database(service)
        try:
            if reports in fresh:
                _start_reports(service, reports)
            if server in fresh:
                _start_server(service, server)
            _start_worker(service, worker, fresh=worker in fresh)
        except BaseException:
            for part in reversed(fresh):
                part.stop()
            raise
    print(_account(service))


def running_address() -> str | None:
    """The server that `start` started and that lives; None also where the file is wrong."""
    with contextlib.suppress(ConfigError):
        service = read_service(check=False)
        if parts(service)[0].pid():
            _no_proxy_on_loopback()
            return own_address(service)
    return None


@contextlib.contextmanager
def temporary_server() -> Iterator[None]:
    """The server of `start` for as long as the block lasts, where none is named or runs.

    It uses the same database, so a later `start` shows what was run. If it does not start, that is
    said, and the block runs without it.
    """
    with contextlib.ExitStack() as stack:
        if not (named_address() or running_address()):
            try:
                service = read_service(check=False)
                stack.enter_context(_alone(service))
                _check_database(service)
                server = parts(service)[0]
                stack.callback(server.stop, STOP_SECONDS)
                _start_server(service, server, for_ever=False)
            except (NoveltyError, OSError) as error:
                stack.close()
                reason = str(error).partition("\n")[0].replace(" ends with:", " says why")
                log.info(f"no Prefect server follows these builds: {reason}")
        yield


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _start_reports(service: Service, reports: Background) -> None:
    port = int(reports_address(service).rpartition(":")[2])
    if _is_taken(port):
        raise ConfigError(
            f"port {port} is taken; set another `report_port` in service.yaml for the reports"
        )
    folder = lake_root(service.lake) / REPORTS
    command = [sys.executable, "-m", "flows.report_server", str(folder), str(port)]
    reports.start(command, environment(service))

    def serves() -> bool:
        _require_alive(reports, "the server of reports")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return True
        return False

    if not wait_until(serves, HEALTHY_SECONDS):
        raise ServiceError(f"the server of reports does not answer; see {reports.log}")


def _start_server(service: Service, server: Background, *, for_ever: bool = True) -> None:
    if _is_taken(service.port):
        raise ConfigError(
            f"port {service.port} is taken; set another `port` in service.yaml, or if a "
            "Prefect server runs there, set PREFECT_API_URL to its address"
        )
    print(f"starting the server on 127.0.0.1:{service.port} ...", flush=True)
    where = ["--host", "127.0.0.1", "--port", str(service.port)]
    command = [sys.executable, "-m", "prefect", "server", "start", *where]
    server.start(command, environment(service), for_ever=for_ever)
    for deployment in declared_deployments():  # a few seconds of imports, while the server starts
        __import__(f"flows.{deployment.flow}")

    def healthy() -> bool:
        _require_alive(server, "the server")
        with contextlib.suppress(ServiceError), connected(service):
            return True
        return False

    if not wait_until(healthy, HEALTHY_SECONDS):
        raise ServiceError(
            f"the server was not healthy after {HEALTHY_SECONDS:.0f} s; {server.log} ends with:\n"
            f"{server.last_words()}"
        )


def _check_database(service: Service) -> None:
    """Enter it as the server will: what refuses that is a sentence, not the end of its log."""
    if (address := service.database) is None:
        return
    from asyncpg import InterfaceError, PostgresError
    from sqlalchemy import exc, make_url
    from sqlalchemy.ext.asyncio import create_async_engine

    async def enter() -> None:
        engine = create_async_engine(address)
        try:
            async with engine.connect():
                pass
        finally:
            await engine.dispose()

    try:
        asyncio.run(enter())
    except (exc.ArgumentError, ValueError):
        raise ConfigError(
            "database: expected postgresql+asyncpg://USER:PASSWORD@HOST/NAME"
        ) from None
    except (OSError, TypeError, InterfaceError, PostgresError, exc.SQLAlchemyError) as error:
        shown = make_url(address).render_as_string()  # without the password
        how = "docs/operations.md says how to make one"
        raise ServiceError(f"the database {shown} lets nobody in ({error}); {how}") from None


def _start_worker(service: Service, worker: Background, *, fresh: bool) -> None:
    with connected(service) as client:
        if fresh:
            reason = "The worker died, and no process of the run is left."
            _clear(client, service, worker_lives=False, reason=reason)
        _say_deployed(service)
        if not fresh:
            return
        pool = declared_deployments()[0].pool
        names = ["--pool", pool, "--type", "process", "--name", worker_name(service)]
        worker.start(
            [sys.executable, "-m", "prefect", "worker", "start", *names], environment(service)
        )
        before = datetime.now(UTC)

        def online() -> bool:
            _require_alive(worker, "the worker")
            beats = {
                known.name: known.last_heartbeat_time
                for known in client.read_workers_for_work_pool(pool)
            }
            last = beats.get(worker_name(service))
            return last is not None and last >= before

        if not wait_until(online, HEALTHY_SECONDS):
            raise ServiceError(f"the worker gave no sign of life; see {worker.log}")


def _account(service: Service) -> str:
    server, worker, _ = parts(service)
    address = api_address(service).removesuffix("/api")
    ours = f"process {server.pid()}" if is_own(service) else "not ours"
    return (
        f"server {address} ({ours}), worker {worker_name(service)} (process {worker.pid()}), "
        f"reports {reports_address(service)}; logs and database in {service.state}"
    )


def stop(service: Service) -> None:
    """End the worker, the runs that it started, and the server, in this order, and nothing else."""
    with _alone(service):
        server, worker, reports = parts(service)
        if not (server.pid() or worker.pid() or reports.pid() or _run_processes(service)):
            print("not running")
            return
        children = worker.family()[1:]
        worker.ask_to_stop()  # it takes no new runs from here on
        end_all([*children, *_run_processes(service)], 20.0)
        worker.stop()
        try:
            with contextlib.suppress(ServiceError), connected(service) as client:
                reason = "The service was stopped; the next run goes on where this one was."
                _clear(client, service, worker_lives=False, reason=reason)
        finally:
            server.stop()
            reports.stop()
        print("stopped")


def _run_processes(service: Service) -> list[Any]:
    """Processes of runs that our worker started, also where the worker itself is gone."""
    return [
        process
        for process, known in processes_with(RUN_ID)
        if known.get("PREFECT__WORKER_NAME") == worker_name(service)
        and known.get("PREFECT_API_URL") == api_address(service)
    ]


def deploy_only(service: Service) -> None:
    """Create or update the deployments on a server that runs already."""
    with connected(service):
        _say_deployed(service)


def _say_deployed(service: Service) -> None:
    for deployment in deploy(service):
        if deployment.config is None:
            text = "paused: not in service.yaml"
        else:
            rhythm = deployment.schedule
            text = (
                f"every {rhythm['interval']:g} s"
                if "interval" in rhythm
                else f"{rhythm['cron']} {rhythm['timezone']}"
            )
            text += ", paused" if deployment.paused else ""
        print(f"  {deployment.flow}/{deployment.name}: {text}")


def _lost(client: Any, service: Service, worker_lives: bool) -> list[Any]:
    own_server = is_own(service)
    return lost_runs(client, worker_name(service), worker_lives=worker_lives, own_server=own_server)


def _clear(client: Any, service: Service, *, worker_lives: bool, reason: str) -> None:
    runs = _lost(client, service, worker_lives)
    os.environ.setdefault(NOTIFY, " ".join(service.notify))
    clear_runs(client, runs, reason)
    for run in runs:
        print(f"  run {run.name} ({run.id}) was {run.state.name}; cleared as Crashed")


def status(service: Service, clear: bool = False) -> int:
    """What runs, what is scheduled next, and what is amiss; 1 if something is."""
    _check_user(service)
    server, worker, _ = parts(service)
    for part in _own_parts(service):
        print(f"{part.name}: " + (f"process {part.pid()}" if part.pid() else "not running"))
    if is_own(service) and not server.pid():
        return 1
    with connected(service) as client:
        print(f"address: {api_address(service).removesuffix('/api')}")
        print(f"reports: {reports_address(service)}")
        lives = worker.pid() is not None
        if clear:
            _clear(client, service, worker_lives=lives, reason="No process of the run is left.")
        problems = _say_schedules(client)
        lost = _lost(client, service, lives)
        for run in unfinished_runs(client):
            is_lost = any(run.id == other.id for other in lost)
            mark = "its process is gone; clear it with `novelty service status --clear`"
            print(f"  run {run.name} ({run.id}): {run.state.name}{', ' + mark if is_lost else ''}")
    for problem in problems:
        print(f"AMISS: {problem}")
    return int(bool(lost or problems) or not all(part.pid() for part in _own_parts(service)))


def send_test(service: Service) -> int:
    """A message to every address of the file, to see that it arrives; 1 if one failed."""
    os.environ[NOTIFY] = " ".join(service.notify) or os.environ.get(NOTIFY, "")
    if not addresses():
        raise ConfigError("nobody to notify: write `notify: [address]` into service.yaml")
    failed = notify("novelty: test", f"The service in {service.state} can send messages.")
    for address in failed:
        print(f"not sent: {address}")
    print(f"sent to {len(addresses()) - len(failed)} of {len(addresses())}")
    return int(bool(failed))


def _say_schedules(client: Any) -> list[str]:
    """Print every deployment with its last run; what is amiss with them."""
    flows = {flow.id: flow.name for flow in client.read_flows()}
    pools = {deployment.pool for deployment in declared_deployments()}
    problems = []
    for deployment in client.read_deployments():
        if deployment.work_pool_name in pools:
            name = f"{flows[deployment.flow_id]}/{deployment.name}"
            state = "paused" if deployment.paused else "scheduled"
            last = last_run(client, deployment.id)
            last_state = (
                f"{last.state.name} at {last.state.timestamp:{MINUTE}} UTC" if last else "none"
            )
            print(f"  {name}: {state}, last run: {last_state}")
            faults = schedule_problems(client, deployment, last, datetime.now(UTC))
            problems += [f"{name}: {problem}" for problem in faults]
    return problems


def schedule_problems(client: Any, deployment: Any, last: Any, now: datetime) -> list[str]:
    """Why a deployment does not run as it should: it failed, it is late, or runs are missing.

    A paused one has no problem.
    """
    schedules = [schedule for schedule in deployment.schedules if schedule.active]
    if deployment.paused or not schedules:
        return []
    problems = []
    if last is not None and (last.state.is_failed() or last.state.is_crashed()):
        message = (last.state.message or "").partition("\n")[0]
        problems.append(f"its last run {last.state.name.lower()} ({last.id}): {message}")
    due = _scheduled_times(client, deployment.id)
    if late := [time for time in due if (now - time).total_seconds() > LATE_SECONDS]:
        problems.append(f"{len(late)} runs are late, the first was due at {late[0]:{MINUTE}} UTC")
    changed = max(schedule.updated or schedule.created for schedule in schedules)
    if not due:
        if (now - changed).total_seconds() > LATE_SECONDS:
            problems.append("no run is scheduled; see the server's log, and try `make deploy`")
        return problems
    # Two runs may lie no further apart than two times of the schedule.
    gaps = [after - before for before, after in itertools.pairwise(due)]
    since = max([changed, *([last.start_time] if last else [])])
    under_way = last is not None and not last.state.is_final()
    if gaps and not under_way and not late:
        silent = (now - since).total_seconds()
        if silent > max(gaps).total_seconds() + LATE_SECONDS:
            problems.append(f"runs are missing: none began since {since:{MINUTE}} UTC")
    return problems


def _scheduled_times(client: Any, deployment_id: Any) -> list[datetime]:
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    conditions = {
        "deployment_id": {"any_": [deployment_id]},
        "state": {"type": {"any_": ["SCHEDULED"]}},
    }
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(conditions),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=LAST_RUNS,
    )
    return [run.expected_start_time for run in runs if run.expected_start_time is not None]


def last_run(client: Any, deployment_id: Any) -> Any:
    """The run of a deployment that began last, if any."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    started = {"deployment_id": {"any_": [deployment_id]}, "start_time": {"is_null_": False}}
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(started),
        sort=FlowRunSort.START_TIME_DESC,
        limit=LAST_RUNS,
    )
    # One that came while another was under way is cancelled before it does anything.
    real_runs = [run for run in runs if not (run.state.is_cancelled() and not run.total_run_time)]
    return real_runs[0] if real_runs else None
