"""What happens when a flow run fails or crashes: a note that says what failed and how to go on.

Enters: Prefect's flow, run and state. Leaves: `<lake>/reports/failures/<time>-<benchmark>.md`, a
`.yaml` of the run's settings beside it, and the same text as a Prefect artifact. The note's command
names that file, so it repeats exactly this run, also one whose settings were changed in the UI.
For a lake in a bucket both stand there and, for the command, in the cache of this machine.

A run that fails like the one before it gets no new note: the old one counts. Messages
(flows/notify.py) go out for the 1st, 2nd, 4th, 8th, … failure of that kind, and when a run of the
benchmark succeeds again.
"""

import importlib
import json
import shlex
import time
import traceback
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from flows.deployments import GC, with_whole_paths
from flows.notify import notify
from schemas.config import make_config
from schemas.errors import ConfigError, NoveltyError
from storage.atomic import write_bytes
from storage.layout import content_key, inner, lake_root
from storage.remote import push_file
from storage.tables import current_versions
from tasks.report import REPORTS

FAILURES = "failures"
TIME = "%Y-%m-%d %H:%M:%S"
WAIT_SECONDS = 15.0
"""Prefect records that a task failed a moment after it did, on a busy machine some seconds."""
SETTLED_SECONDS = 2.0
"""Shards that failed together are recorded one after another: so long nothing new must come."""
MOST_SHARDS = 20


@dataclass(frozen=True)
class FailedShard:
    """A task run that did not end well: a stage, its shard, and how it stands."""

    stage: str
    shard: str
    state: str


def write_failure(flow: Any, flow_run: Any, state: Any) -> Path:
    """Prefect's `on_failure` and `on_crashed` hook. A worker calls it with these names."""
    benchmark = flow.name
    settings = run_settings(benchmark, flow_run.parameters)
    lake = lake_root(settings.get("lake"))
    error = _error(state)
    shards = failed_shards(flow_run.id, WAIT_SECONDS if _left_a_task(error) else 0.0)
    settings["lake"] = settings.get("lake") or str(lake)
    trouble = standing_trouble(lake, benchmark, content_key([settings, _sentence(state, error)]))
    note = lake / REPORTS / FAILURES / f"{trouble.name}.md"
    config = note.with_suffix(".yaml")
    command = resume_command(benchmark, settings, config)
    text = failure_note(benchmark, flow_run, state, error, shards, command, trouble)
    try:
        write_bytes(config, yaml.safe_dump(settings).encode())
        write_bytes(note, text.encode())
        for path in (config, note):
            push_file(lake, path)
        write_bytes(trouble_path(lake, benchmark), json.dumps(asdict(trouble)).encode())
    finally:
        _publish(benchmark, flow_run.id, text)  # a full disk is a failure, too
        if trouble.is_said():
            notify(f"novelty: {benchmark} {state.name.lower()}", text.partition("\n## ")[0])
    return note


def note_success(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect's `on_completion` hook: the run is named after what it built; failures are over."""
    from prefect.client.orchestration import get_client

    benchmark = flow.name
    lake = lake_root(run_settings(benchmark, flow_run.parameters).get("lake"))
    if version := data_version(lake, benchmark):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=f"{benchmark}-{version}")
    trouble = read_trouble(lake, benchmark)
    if trouble is None:
        return
    note = lake / REPORTS / FAILURES / f"{trouble.name}.md"
    said = f"It works again: run {flow_run.name}, {flow_run.id}, {datetime.now(UTC):{TIME}} UTC."
    if note.exists():
        write_bytes(note, f"{said}\n\n{note.read_text()}".encode())
        push_file(lake, note)
    trouble_path(lake, benchmark).unlink(missing_ok=True)
    failed = f"It failed {trouble.times} times since {trouble.since} UTC"
    notify(f"novelty: {benchmark} works again", f"{said}\n{failed}; the note of it: {note}")


def data_version(lake: Path, benchmark: str) -> str:
    """Eight digits that stand for the current tables of a benchmark; "" where there are none."""
    keys = {version.name: version.manifest.key for version in current_versions(lake, benchmark)}
    return content_key(keys)[:8] if keys else ""


@dataclass(frozen=True)
class Trouble:
    """A failure that may come again: the same settings, the same sentence."""

    key: str
    name: str
    """Of its note, without the suffix."""
    since: str
    times: int = 1

    def is_said(self) -> bool:
        """Whether people hear of this one: 1, 2, 4, 8, …"""
        return self.times & (self.times - 1) == 0


def trouble_path(lake: Path, benchmark: str) -> Path:
    return inner(lake) / FAILURES / f"{benchmark}.json"


def read_trouble(lake: Path, benchmark: str) -> Trouble | None:
    """How the benchmark's last run failed, if it did."""
    try:
        return Trouble(**json.loads(trouble_path(lake, benchmark).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def standing_trouble(lake: Path, benchmark: str, key: str) -> Trouble:
    """The failure of that key, once more than before, or for the first time."""
    before = read_trouble(lake, benchmark)
    if before is not None and before.key == key:
        return replace(before, times=before.times + 1)
    now = datetime.now(UTC)
    name = f"{now:%Y-%m-%dT%H-%M-%S}.{now:%f}Z-{benchmark}"
    return Trouble(key, name, f"{now:{TIME}}")


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


def _left_a_task(error: BaseException | None) -> bool:
    """Whether the exception came out of a task, so that the server will hear of a failed one."""
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    return any(frame.f_globals.get("__name__") == "prefect.futures" for frame, _ in frames)


def failed_shards(run_id: Any, wait_seconds: float = 0.0) -> list[FailedShard]:
    """Shards that failed, else those that were under way when the process died."""
    deadline = time.monotonic() + wait_seconds
    known, since = None, 0.0
    while True:
        runs = open_tasks(run_id)
        failed = [run for run in runs if run.state_type in ("FAILED", "CRASHED")]
        now, before = time.monotonic(), known
        known = {(run.id, run.state_type) for run in runs}
        since = now if known != before else since
        if now >= deadline or (failed and now - since >= SETTLED_SECONDS):
            break
        time.sleep(0.25)
    shards = [
        FailedShard(*run.name.partition("/")[::2], state=run.state_name or "")
        for run in failed or runs
    ]
    return sorted(shards, key=lambda shard: (shard.stage, shard.shard))


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


def failure_note(
    benchmark: str,
    flow_run: Any,
    state: Any,
    error: BaseException | None,
    shards: list[FailedShard],
    command: str,
    trouble: Trouble | None = None,
) -> str:
    """The note: the sentence, where it happened, and the command that goes on."""
    again = []
    if trouble is not None and trouble.times > 1:
        again = [f"- Failed like this: {trouble.times} times since {trouble.since} UTC"]
    lines = [
        f"# {benchmark}: {state.name.lower()}",
        "",
        _sentence(state, error),
        "",
        f"- When: {datetime.now(UTC):{TIME}} UTC",
        *again,
        f"- Run: {flow_run.name}, {flow_run.id}",
        *_places(shards),
        "",
        "To go on (what was finished is not made again):",
        "",
        f"    {command}",
        "",
    ]
    if error is not None and not isinstance(error, NoveltyError):
        trace = "".join(traceback.format_exception(error))
        lines += ["## Traceback", "", *(f"    {line}" for line in trace.splitlines()), ""]
    return "\n".join(lines)


def resume_command(flow: str, settings: dict[str, Any], config: Path) -> str:
    """What a person types to do the same again; `config` is the file with the settings."""
    if flow == GC:
        return shlex.join(["novelty", "gc", "--yes", "--lake", str(settings["lake"])])
    return shlex.join(["novelty", "build", flow, "--config", str(config)])


def _sentence(state: Any, error: BaseException | None) -> str:
    return str(error) if isinstance(error, NoveltyError) else (state.message or state.name)


def _places(shards: list[FailedShard]) -> list[str]:
    if not shards:
        return ["- Stage: no shard is known to have failed or to have been under way"]
    lines = [
        f"- Stage: {shard.stage}, shard: {shard.shard} ({shard.state.lower()})"
        for shard in shards[:MOST_SHARDS]
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
