"""Flows that a Prefect server follows. What deployments name is here: `flows.tracked.<flow>`.

Prefect keeps the account and shows it; it never decides whether a build succeeds. A shard is made
by the same code as without a server, and when the server is lost, the rest is made without it.
Its own result cache is off: a path as argument gives stale data after the file changed, and what
was made is found in the lake before a shard is even submitted.
"""

import functools
import importlib
import logging
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.engine import open_run
from flows.hooks import note_end, note_success, write_failure
from schemas.config import make_config
from schemas.errors import NoveltyError
from storage.pieces import Piece
from tasks.engine.flow_run import RETRY_SECONDS, FlowRun, latest_run

log = logging.getLogger(__name__)

CLIENT_RETRIES = 3
"""How often a call to the server is repeated: for 14 seconds, then the server is lost."""


def __getattr__(name: str) -> Any:
    """The Prefect flow of the module `flows.<name>`."""
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        flow = importlib.import_module(f"flows.{name}").build
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from None
    return tracked_flow(flow.name, flow.fn, flow.model)


def tracked_flow(benchmark: str, function: Callable[[Any], None], model: Any = None) -> Any:
    """The function as a Prefect flow. A deployment sends its configuration as JSON."""
    from prefect import flow
    from prefect.context import FlowRunContext

    @functools.wraps(function)
    def run(config: Any) -> None:
        with open_run(TrackedRun) as opened:
            if (known := FlowRunContext.get()) is not None and known.flow_run is not None:
                opened.id = str(known.flow_run.id)
            function(make_config(model, config) if isinstance(config, dict) and model else config)

    run.__module__, run.__name__ = __name__, benchmark  # how a worker finds it again
    return flow(  # type: ignore[call-overload]
        run,
        name=benchmark,
        flow_run_name=benchmark,
        validate_parameters=False,
        on_failure=[write_failure],
        on_crashed=[write_failure],
        on_completion=[note_success],
    )


class TrackedRun(FlowRun):
    """A run that tells a Prefect server of every shard, as long as there is one."""

    ahead = 4  # a task of Prefect waits for the server now and then
    lost = False

    def attempt(self, benchmark: str, stage: Any, shard: str, make: Callable[[], Piece]) -> Piece:
        if self.lost:
            return super().attempt(benchmark, stage, shard, make)
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        outcome: list[Piece | Exception] = []

        def make_one(name: str) -> None:
            outcome.clear()  # Prefect calls again after a failure
            try:
                outcome.append(make())
            except Exception as error:
                outcome.append(error)
                raise

        try:
            task(  # type: ignore[call-overload]
                make_one,
                name=stage.name,
                description=stage.__doc__,
                task_run_name=f"{stage.name}/{{name}}",
                tags=[benchmark, *stage.tags],
                cache_policy=NO_CACHE,
                persist_result=False,
                retries=stage.retries,
                retry_delay_seconds=RETRY_SECONDS,
            )(shard)
        except Exception as error:
            if not outcome or isinstance(outcome[0], Piece):
                self.lose(error)
        if not outcome:
            return super().attempt(benchmark, stage, shard, make)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def note(self, key: str, markdown: str, description: str | None) -> None:
        from prefect.artifacts import create_markdown_artifact

        self._tell(create_markdown_artifact, key, markdown=markdown, description=description)

    def link(self, key: str, address: str, description: str) -> None:
        from prefect.artifacts import create_link_artifact

        self._tell(create_link_artifact, key, link=address, description=description)

    def _tell(self, create: Callable[..., Any], key: str, **values: Any) -> None:
        if self.lost:
            return
        try:
            create(key=key, **values)
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Go on without the server, and say so once."""
        if not self.lost:
            self.lost = True
            _drop_events()
            log.warning(
                f"warning: the Prefect server is lost ({type(error).__name__}); the build goes on, "
                "and the server does not see the rest of it"
            )


def _drop_events() -> None:
    """At its end a process would offer each waiting event to the server for seven seconds."""
    from prefect.events.worker import EventsWorker

    async def drop(worker: Any, event: Any) -> None:
        pass

    EventsWorker._handle = drop  # type: ignore[method-assign, assignment]


def run_tracked(flow: Any, config: Any, address: str) -> None:
    """Run a Prefect flow on the server at that address; errors of the flow come out."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        PREFECT_LOGGING_INTERNAL_LEVEL,
        temporary_settings,
    )

    # An error comes out of the call below; Prefect must not print it a second and third time.
    loggers = ("flow_runs", "task_runs", "engine", "events.clients")
    for name in (*(f"prefect.{each}" for each in loggers), "EventsWorker"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = latest_run()
    settings = {
        PREFECT_API_URL: address,
        PREFECT_CLIENT_MAX_RETRIES: CLIENT_RETRIES,
        PREFECT_LOGGING_INTERNAL_LEVEL: "CRITICAL",  # nor every event that it cannot send
    }
    with temporary_settings(settings):
        try:
            flow(config)
        except NoveltyError:
            raise
        except Exception as error:
            run = latest_run()
            if run is before or not isinstance(run, TrackedRun):
                raise NoServer(address, error) from None
            if error is run.error:
                raise
            # The server was not told how the run ended, so Prefect called no hook.
            note_end(flow.name, config, run, run.error)
            if run.error is not None:
                raise run.error from None
            run.lose(error)  # all is made


class NoServer(NoveltyError):
    """A Prefect server that was named does not answer, or does not take the run."""

    def __init__(self, address: str, error: Exception | None = None):
        reason = f" ({type(error).__name__})" if error is not None else ""
        super().__init__(
            f"no Prefect server answers at {address}{reason}; start it, or unset PREFECT_API_URL "
            "to build without one"
        )


def server_address() -> str | None:
    """The server that follows builds here: PREFECT_API_URL, else that of `make server`, else none.

    One that is named must answer; that of `make server` is left out while it does not.
    """
    if address := named_address():
        if not answers(address):
            raise NoServer(address)
        return address
    from flows.service import running_address

    fallback = running_address()
    return fallback if fallback and answers(fallback) else None


def named_address() -> str | None:
    """PREFECT_API_URL of the environment, else of Prefect's active profile."""
    if address := os.environ.get("PREFECT_API_URL"):
        return address
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    with suppress(OSError, ValueError, AttributeError):
        known = tomllib.loads(path.read_text())
        name = os.environ.get("PREFECT_PROFILE") or known.get("active")
        return known.get("profiles", {}).get(name, {}).get("PREFECT_API_URL")
    return None


def answers(address: str) -> bool:
    """Whether a Prefect server is there, by Prefect's own client: it knows keys and proxies."""
    try:
        urlsplit(address)
    except ValueError:
        return False  # Prefect would print a page about it when it is imported
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with suppress(Exception), temporary_settings({PREFECT_API_URL: address}):
        with get_client(sync_client=True) as client:
            return client.api_healthcheck() is None
    return False
