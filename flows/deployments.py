"""What runs when: `service.yaml` of the user and `prefect.yaml` of the project to deployments.

Enters: the user's file (sources, lake, schedules, place of the server). Leaves: one Prefect
deployment per flow. A benchmark that the file does not name is deployed paused, and its
description says what to write. The file is the truth: a change made in the UI lasts until the next
deploy.
"""

import contextlib
import importlib
import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from pydantic import Field, model_validator

from flows.notify import check_addresses
from flows.options import check_paths
from schemas.config import Settings, make_config, read_config_file
from schemas.errors import ConfigError
from schemas.similar import did_you_mean
from storage.layout import lake_root

DECLARED = Path(__file__).with_name("prefect.yaml")
SERVICE_FILE = "service.yaml"
GC = "gc"
REMOTE = re.compile(r"[a-z0-9]+:/")  # s3://bucket, which a Path turns into s3:/bucket


class Rhythm(Settings):
    """When something runs."""

    cron: str | None = None
    """When, such as "0 3 * * 1" (default: weekly, see flows/prefect.yaml)."""
    every: float | None = Field(None, ge=1)
    """Seconds from run to run, instead of cron."""
    timezone: str | None = None
    """Time zone of the cron line (default: that of the service)."""
    paused: bool = False
    """Deployed, but not run by its schedule."""

    @model_validator(mode="after")
    def _one_rhythm(self) -> Self:
        if self.cron and self.every:
            raise ValueError("cron and every exclude each other; keep one")
        return self


class Schedule(Rhythm):
    """One benchmark of the service."""

    config: dict[str, Any] = Field({})
    """Settings of the build, as in `novelty build BENCHMARK --config FILE`."""


class Collection(Rhythm):
    """`novelty gc` by a schedule."""

    grace: float = Field(24.0, ge=0)
    """Hours that replaced snapshots and dropped things stay, and objects in a bucket."""
    keep: int = Field(5, ge=1)
    """Snapshots that stay however old."""


class Service(Settings):
    """A Prefect server on this machine, its worker, and what they run."""

    lake: Path | None = None
    """Lake of every run, a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    state: Path = Path(".novelty/service")
    """Folder of the server's database, logs and process ids."""
    port: int = Field(4200, ge=1, le=65535)
    """Port of the server on 127.0.0.1."""
    report_port: int | None = Field(None, ge=1, le=65535)
    """Port of the reports on 127.0.0.1 (default: the one after `port`)."""
    database: str | None = None
    """postgresql+asyncpg://USER:PASSWORD@HOST/NAME (default: SQLite in the state folder)."""
    timezone: str = "UTC"
    """Time zone of every cron line."""
    notify: tuple[str, ...] = ()
    """Who hears of failures and recoveries: https://… (a webhook), mailto://…, any of apprise."""
    benchmarks: dict[str, Schedule] = Field({})
    """Benchmark to its sources and schedule."""
    gc: Collection | None = None
    """When the lake is cleaned, such as {every: 604800}; left out: never by itself."""


def read_service(service_file: str | Path | None = None, *, check: bool = True) -> Service:
    """The user's file: the argument, else NOVELTY_SERVICE, else ./service.yaml if it is there.

    Relative paths count from the folder of the file: a worker runs the flows somewhere else.
    Without `check` the builds' settings stay as they are written: to stop or look at a service
    no source need be there.
    """
    file = service_file or os.environ.get("NOVELTY_SERVICE")
    path = Path(file or SERVICE_FILE).expanduser().absolute()
    values = read_config_file(path) if file or path.exists() else {}
    service = make_config(Service, values)
    if service.database and not service.database.startswith("postgresql+asyncpg://"):
        raise ConfigError("database must begin with postgresql+asyncpg://; leave it out for SQLite")
    lake = _lake(service.lake, path.parent)
    state = _whole(service.state, path.parent)
    service = service.model_copy(update={"lake": lake, "state": state})
    if not check:
        return service
    check_addresses(service.notify)
    benchmarks = {
        name: entry.model_copy(update={"config": _checked(name, entry.config, path.parent, lake)})
        for name, entry in service.benchmarks.items()
    }
    return service.model_copy(update={"benchmarks": benchmarks})


def _lake(path: Path | None, folder: Path) -> Path:
    if path is not None:
        return _whole(path, folder)
    address = os.environ.get("NOVELTY_LAKE", "")
    return Path(address) if REMOTE.match(address) else lake_root()


def _checked(benchmark: str, values: dict[str, Any], folder: Path, lake: Path) -> dict[str, Any]:
    """The settings as JSON with whole paths, refused now rather than in the first run."""
    benchmarks = [each.flow for each in declared_deployments() if each.flow != GC]
    if benchmark not in benchmarks:
        names = f"{', '.join(benchmarks)}{did_you_mean(benchmark, benchmarks)}"
        raise ConfigError(f"unknown benchmark {benchmark!r}; there are: {names}")
    model = importlib.import_module(f"schemas.{benchmark}").Config
    try:
        config = with_whole_paths(make_config(model, {"lake": lake} | values), folder)
        check_paths(config)
    except ConfigError as error:
        raise ConfigError(f"benchmarks.{benchmark}.config: {error}") from None
    return config.model_dump(mode="json", exclude_unset=True)


def with_whole_paths(config: Settings, folder: Path) -> Settings:
    """The same settings for a process that runs elsewhere: relative paths count from `folder`."""
    return make_config(type(config), _whole(config.model_dump(exclude_unset=True), folder))


def _whole(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _whole(part, folder) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(part, folder) for part in value]
    if not isinstance(value, Path) or REMOTE.match(str(value)):
        return value
    return folder / value.expanduser()


@dataclass(frozen=True)
class Deployment:
    """What Prefect is told of one flow."""

    flow: str
    """Name of the flow: a benchmark, or gc."""
    name: str
    entrypoint: str
    description: str
    tags: tuple[str, ...]
    schedule: dict[str, Any]
    limit: dict[str, Any]
    pool: str
    job_variables: dict[str, Any]
    paused: bool = True
    config: dict[str, Any] | None = None


def declared_deployments() -> list[Deployment]:
    """What flows/prefect.yaml says."""
    return [
        Deployment(
            flow=entry["entrypoint"].rpartition(".")[2],
            name=entry["name"],
            entrypoint=entry["entrypoint"],
            description=entry["description"],
            tags=tuple(entry["tags"]),
            schedule=entry["schedules"][0],
            limit=entry["concurrency_limit"],
            pool=entry["work_pool"]["name"],
            job_variables=entry["work_pool"]["job_variables"],
        )
        for entry in yaml.safe_load(DECLARED.read_text())["deployments"]
    ]


def plan_deployments(service: Service) -> list[Deployment]:
    """Every flow, with the user's sources and rhythm where the file names it."""
    return [_planned(declared, service) for declared in declared_deployments()]


def _planned(declared: Deployment, service: Service) -> Deployment:
    entry = service.gc if declared.flow == GC else service.benchmarks.get(declared.flow)
    if entry is None:
        missing = (
            f"Not configured: write `gc: {{}}` into {SERVICE_FILE}, then `make deploy`."
            if declared.flow == GC
            else f"Not configured: write benchmarks.{declared.flow}.config with its sources "
            f"(`novelty build {declared.flow} --help`) into {SERVICE_FILE}, then `make deploy`."
        )
        return replace(declared, description=f"{missing}\n\n{declared.description}")
    rhythm: dict[str, Any] = {"interval": entry.every}
    if not entry.every:
        cron = entry.cron or declared.schedule["cron"]
        rhythm = {"cron": cron, "timezone": entry.timezone or service.timezone}
    name = rhythm_name(rhythm)
    config = (
        {"lake": str(service.lake), "grace": entry.grace, "keep": entry.keep}
        if isinstance(entry, Collection)
        else entry.config
    )
    planned = replace(
        declared, name=name, schedule=rhythm | {"slug": name}, paused=entry.paused, config=config
    )
    _prefect_schedule(planned)  # a wrong line is said before any server starts
    return planned


def rhythm_name(rhythm: dict[str, Any]) -> str:
    """What a deployment is called: hourly, daily, weekly, monthly, yearly, or more exactly."""
    if seconds := rhythm.get("interval"):
        intervals = {3600: "hourly", 86400: "daily", 604800: "weekly"}
        if seconds in intervals:
            return intervals[seconds]
        for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
            if seconds % size == 0:
                return f"every-{seconds / size:g}-{unit}"
        return f"every-{seconds:g}-seconds"
    fields = rhythm["cron"].split()
    # Minute, hour, day of the month, month, day of the week: which are one value, which are any.
    shape = "".join(_shape(part) for part in fields)
    shapes = {"1****": "hourly", "11***": "daily", "11**1": "weekly", "111**": "monthly"}
    shapes["1111*"] = "yearly"
    return shapes.get(shape, "cron-" + re.sub(r"[^0-9A-Za-z]+", "-", rhythm["cron"]).strip("-"))


def _shape(part: str) -> str:
    return "*" if part == "*" else "1" if part.isalnum() else "?"


def deploy(service: Service) -> list[Deployment]:
    """Create or update the work pool and every deployment on the server that is set."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    planned = plan_deployments(service)
    with get_client(sync_client=True) as client:
        for pool in {deployment.pool for deployment in planned}:
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    for deployment in planned:
        _apply(deployment)
    _remove_renamed(planned)
    return planned


def _remove_renamed(planned: list[Deployment]) -> None:
    """Remove deployments of earlier schedules: a deployment is named after its schedule."""
    from prefect.client.orchestration import get_client

    names = {deployment.flow: deployment.name for deployment in planned}
    pools = {deployment.pool for deployment in planned}
    with get_client(sync_client=True) as client:
        flows = {flow.id: flow.name for flow in client.read_flows()}
        for old in client.read_deployments():
            name = names.get(flows[old.flow_id])
            if old.work_pool_name in pools and name not in (None, old.name):
                client.delete_deployment(old.id)


def _apply(deployment: Deployment) -> None:
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.types.entrypoint import EntrypointType

    module, function = deployment.entrypoint.rsplit(".", 1)
    runnable = getattr(importlib.import_module(module), function).to_deployment(
        name=deployment.name,
        description=deployment.description,
        tags=list(deployment.tags),
        parameters={"config": deployment.config} if deployment.config else {},
        schedules=[_prefect_schedule(deployment)],
        paused=deployment.paused,
        concurrency_limit=ConcurrencyLimitConfig(**deployment.limit),
        work_pool_name=deployment.pool,
        job_variables=deployment.job_variables,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    runnable.apply(work_pool_name=deployment.pool)


def _prefect_schedule(deployment: Deployment) -> Any:
    from prefect.schedules import Schedule as PrefectSchedule

    values = dict(deployment.schedule)
    try:
        if "interval" in values:
            values["interval"] = timedelta(seconds=values["interval"])
        else:
            ZoneInfo(values["timezone"])
        return PrefectSchedule(**values)
    except (ValueError, ZoneInfoNotFoundError) as error:
        place = GC if deployment.flow == GC else f"benchmarks.{deployment.flow}"
        raise ConfigError(f"{place}: wrong cron or timezone: {error}") from None
