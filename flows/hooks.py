"""What happens when a run of a flow fails or crashes: a note that says what failed, how to go on.

Enters: the benchmark, its settings and what ended the run, or Prefect's flow, run and state.
Leaves: `<lake>/reports/failures/<time>-<benchmark>.md`, a `.yaml` of the run's settings beside it,
and for a Prefect server the same text as an artifact. The note's command names that file, so it
repeats exactly this run, also one whose settings were changed in the UI. For a lake in a bucket
both stand there and, for the command, in the cache of this machine.
"""

import importlib
import shlex
import sys
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from flows.deployments import with_whole_paths
from schemas.config import make_config
from schemas.errors import ConfigError, NoveltyError
from storage.atomic import write_bytes
from storage.layout import lake_root
from storage.remote import push_file
from tasks.engine.flow_run import FlowRun, latest_run
from tasks.report import REPORTS

FAILURES = "failures"
MOST_SHARDS = 20


@dataclass(frozen=True)
class Ending:
    """How a run ended badly: "failed" or "crashed", why, and the shards that it concerns."""

    run: str
    state: str
    message: str
    error: BaseException | None
    shards: list[tuple[str, str, str]]
    """Stage, shard and state of those that failed, else of those that were under way."""


@dataclass(frozen=True)
class Note:
    """A note and the settings of the run, to stand beside each other in the lake."""

    lake: Path
    path: Path
    text: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, benchmark: str, parameters: dict[str, Any], ending: Ending) -> "Note":
        settings = run_settings(benchmark, parameters)
        lake = lake_root(settings.get("lake"))
        settings["lake"] = settings.get("lake") or str(lake)
        now = datetime.now(UTC)
        path = lake / REPORTS / FAILURES / f"{now:%Y-%m-%dT%H-%M-%S}.{now:%f}Z-{benchmark}.md"
        return cls(lake, path, failure_note(benchmark, ending, path.with_suffix(".yaml")), settings)

    def write(self) -> None:
        config = self.path.with_suffix(".yaml")
        write_bytes(config, yaml.safe_dump(self.settings).encode())
        write_bytes(self.path, self.text.encode())
        for path in (config, self.path):
            push_file(self.lake, path)


def note_failure(benchmark: str, config: Any, run: FlowRun | None, error: BaseException) -> None:
    """The note of a run in this process without a server. The error itself is the caller's."""
    crashed = not isinstance(error, Exception)
    ending = Ending(
        f"{benchmark}, {run.id}" if run else benchmark,
        "crashed" if crashed else "failed",
        "It was told to stop." if crashed else f"{type(error).__name__}: {error}",
        None if crashed else error,
        run.open_shards() if run else [],
    )
    try:
        Note.of(benchmark, {"config": config}, ending).write()
    except (OSError, NoveltyError) as problem:  # a full disk is a failure, too
        print(f"{benchmark}: there is no note of this failure: {problem}", file=sys.stderr)


def write_failure(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect's `on_failure` and `on_crashed` hook. A worker calls it with these names."""
    run = latest_run()
    here = run if run is not None and run.id == str(flow_run.id) else None
    ending = Ending(
        f"{flow_run.name}, {flow_run.id}",
        state.name.lower(),
        state.message or state.name,
        _error(state),
        here.open_shards() if here else open_shards(flow_run.id),
    )
    note = Note.of(flow.name, flow_run.parameters, ending)
    try:
        note.write()
    finally:
        _publish(flow.name, flow_run.id, note.text)  # a full disk is a failure, too


def run_settings(benchmark: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run as JSON with whole paths: the note is read in another folder."""
    given = parameters.get("config") or {}
    values = given.model_dump(mode="json") if isinstance(given, BaseModel) else dict(given)
    try:
        model = importlib.import_module(f"schemas.{benchmark}").Config
        config = with_whole_paths(make_config(model, values), Path.cwd())
    except (ModuleNotFoundError, ConfigError):
        return values  # settings that are wrong may be just what failed: show them as they came
    return config.model_dump(mode="json", exclude_unset=True)


def _error(state: Any) -> BaseException | None:
    """The exception itself where the flow ran in this process; after a crash there is none."""
    if state.data is None:
        return None
    found = state.result(raise_on_failure=False)
    return found if isinstance(found, BaseException) else None


def open_shards(run_id: Any) -> list[tuple[str, str, str]]:
    """As the server knows it: shards that failed, else those under way when the process died."""
    runs = open_tasks(run_id)
    failed = [run for run in runs if run.state_type in ("FAILED", "CRASHED")]
    return sorted(
        (*run.name.partition("/")[::2], (run.state_name or "").lower()) for run in failed or runs
    )


def open_tasks(run_id: Any) -> list[Any]:
    """Task runs that failed, crashed, or are held for running."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter

    wanted = {"state": {"type": {"any_": ["RUNNING", "FAILED", "CRASHED"]}}}
    with get_client(sync_client=True) as client:
        return client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])),
            task_run_filter=TaskRunFilter.model_validate(wanted),
        )


def failure_note(benchmark: str, ending: Ending, config: Path) -> str:
    """The note: the sentence, where it happened, and the command that goes on."""
    error = ending.error
    lines = [
        f"# {benchmark}: {ending.state}",
        "",
        str(error) if isinstance(error, NoveltyError) else ending.message,
        "",
        f"- When: {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"- Run: {ending.run}",
        *_places(ending.shards),
        "",
        "To go on (what was finished is not made again):",
        "",
        f"    novelty build {benchmark} --config {shlex.quote(str(config))}",
        "",
    ]
    if error is not None and not isinstance(error, NoveltyError):
        trace = "".join(traceback.format_exception(error))
        lines += ["## Traceback", "", *(f"    {line}" for line in trace.splitlines()), ""]
    return "\n".join(lines)


def _places(shards: list[tuple[str, str, str]]) -> list[str]:
    if not shards:
        return ["- Stage: no shard is known to have failed or to have been under way"]
    lines = [
        f"- Stage: {stage}, shard: {shard} ({state})"
        for stage, shard, state in shards[:MOST_SHARDS]
    ]
    more = len(shards) - MOST_SHARDS
    return [*lines, f"- and {more} shards more"] if more > 0 else lines


def _publish(benchmark: str, run_id: Any, text: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactCreate

    artifact = ArtifactCreate(
        key=f"{benchmark}-failure",
        type="markdown",
        description="What failed, and how to go on",
        data=text,
        flow_run_id=run_id,
    )
    with get_client(sync_client=True) as client:
        # `create_artifact` adds an event, sent in the background: this process is about to end.
        sent = artifact.model_dump(mode="json", exclude_unset=True)
        client.request("POST", "/artifacts/", json=sent)
