"""What happens when a run of a flow ends: a note of a failure, messages, the end of a trouble.

Enters: the benchmark, its settings and what ended the run, or Prefect's flow, run and state.
Leaves: `<lake>/reports/failures/<time>-<benchmark>.md`, a `.yaml` of the run's settings beside it,
and for a Prefect server the same text as an artifact. The note's command names that file, so it
repeats exactly this run, also one whose settings were changed in the UI. For a lake in a bucket
both stand there and, for the command, in the cache of this machine.

A run that fails like the one before it gets no new note: the old one counts. Messages
(flows/notify.py) go out for the 1st, 2nd, 4th, 8th, … failure of that kind, and when a run of the
benchmark succeeds again.
"""

import importlib
import json
import logging
import shlex
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
from tasks.engine.flow_run import FlowRun, latest_run
from tasks.report import REPORTS

log = logging.getLogger(__name__)

FAILURES = "failures"
TIME = "%Y-%m-%d %H:%M:%S"
MOST_SHARDS = 20


@dataclass(frozen=True)
class Ending:
    """How a run ended badly: "failed" or "crashed", why, and the shards that it concerns."""

    run: str
    state: str
    error: BaseException | None
    shards: list[tuple[str, str, str]]
    """Stage, shard and state of those that failed, else of those that were under way."""
    message: str = ""
    """What is known of a process that died with its error."""

    @property
    def is_defect(self) -> bool:
        """Whether it is an error of the program, so that its traceback is of use."""
        return isinstance(self.error, Exception) and not isinstance(self.error, NoveltyError)

    def sentence(self) -> str:
        if self.error is None:
            return self.message or self.state
        if not isinstance(self.error, Exception):
            return "It was told to stop."
        name = f"{type(self.error).__name__}: " if self.is_defect else ""
        return f"{name}{self.error}"


def note_end(benchmark: str, config: Any, run: FlowRun | None, error: BaseException | None) -> None:
    """What the hooks below do, for a run that no server saw end. The error is the caller's."""
    name = f"{benchmark}, {run.id}" if run else benchmark
    parameters = {"config": config}
    try:
        if error is None:
            end_trouble(benchmark, parameters, name)
        else:
            state = "failed" if isinstance(error, Exception) else "crashed"
            ending = Ending(name, state, error, run.open_shards() if run else [])
            Note.of(benchmark, parameters, ending).share()
    except (OSError, NoveltyError) as problem:  # a full disk is a failure, too
        log.warning(f"{benchmark}: the end of this run could not be noted: {problem}")


def write_failure(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect's `on_failure` and `on_crashed` hook. A worker calls it with these names."""
    run = latest_run()
    own_run = run if run is not None and run.id == str(flow_run.id) else None
    ending = Ending(
        f"{flow_run.name}, {flow_run.id}",
        state.name.lower(),
        own_run.error if own_run else _error(state),
        own_run.open_shards() if own_run else open_shards(flow_run.id),
        state.message or "",
    )
    note = Note.of(flow.name, flow_run.parameters, ending)
    try:
        note.share()
    finally:
        _publish(flow.name, flow_run.id, note.text)  # a full disk is a failure, too


def note_success(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect's `on_completion` hook: the run is named after what it built; failures are over."""
    from prefect.client.orchestration import get_client

    end_trouble(flow.name, flow_run.parameters, f"{flow_run.name}, {flow_run.id}")
    lake = lake_root(run_settings(flow.name, flow_run.parameters).get("lake"))
    if version := data_version(lake, flow.name):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=f"{flow.name}-{version}")


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


def note_path(lake: Path, trouble: Trouble, suffix: str = ".md") -> Path:
    return lake / REPORTS / FAILURES / f"{trouble.name}{suffix}"


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


def end_trouble(benchmark: str, parameters: dict[str, Any], run: str) -> None:
    """A run succeeded: if the one before failed, its note and a message say that this is over."""
    lake = lake_root(run_settings(benchmark, parameters).get("lake"))
    trouble = read_trouble(lake, benchmark)
    if trouble is None:
        return
    note = note_path(lake, trouble)
    message = f"It works again: run {run}, {datetime.now(UTC):{TIME}} UTC."
    if note.exists():
        write_bytes(note, f"{message}\n\n{note.read_text()}".encode())
        push_file(lake, note)
    trouble_path(lake, benchmark).unlink(missing_ok=True)
    times = "once" if trouble.times == 1 else f"{trouble.times} times"
    failed = f"It failed {times} since {trouble.since} UTC"
    notify(f"novelty: {benchmark} works again", f"{message}\n{failed}; the note of it: {note}")


@dataclass(frozen=True)
class Note:
    """The note of a failure, the settings of its run, and how often it failed like that."""

    benchmark: str
    lake: Path
    settings: dict[str, Any]
    state: str
    trouble: Trouble
    text: str

    @classmethod
    def of(cls, benchmark: str, parameters: dict[str, Any], ending: Ending) -> "Note":
        settings = run_settings(benchmark, parameters)
        lake = lake_root(settings.get("lake"))
        settings["lake"] = settings.get("lake") or str(lake)
        key = content_key([settings, ending.sentence()])
        trouble = standing_trouble(lake, benchmark, key)
        command = resume_command(benchmark, settings, note_path(lake, trouble, ".yaml"))
        text = failure_note(benchmark, ending, command, trouble)
        return cls(benchmark, lake, settings, ending.state, trouble, text)

    def share(self) -> None:
        """Write note and settings beside each other into the lake, and send the message."""
        files = {
            note_path(self.lake, self.trouble, ".yaml"): yaml.safe_dump(self.settings),
            note_path(self.lake, self.trouble): self.text,
        }
        try:
            for path, text in files.items():
                write_bytes(path, text.encode())
            for path in files:
                push_file(self.lake, path)
            record = json.dumps(asdict(self.trouble)).encode()
            write_bytes(trouble_path(self.lake, self.benchmark), record)
        finally:
            if self.trouble.is_said():
                body = self.text.partition("\n## ")[0]
                notify(f"novelty: {self.benchmark} {self.state}", body)


def run_settings(benchmark: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run as JSON with whole paths: the note is read in another folder."""
    settings = parameters.get("config") or {}
    values = settings.model_dump(mode="json") if isinstance(settings, BaseModel) else dict(settings)
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
    result = state.result(raise_on_failure=False)
    return result if isinstance(result, BaseException) else None


def open_shards(run_id: Any) -> list[tuple[str, str, str]]:
    """As the server knows it: shards that failed, else those under way when the process died."""
    runs = open_tasks(run_id)
    failed = [run for run in runs if run.state_type in ("FAILED", "CRASHED")]
    return sorted(
        (*run.name.partition("/")[::2], (run.state_name or "").lower()) for run in failed or runs
    )


def open_tasks(run_id: Any) -> list[Any]:
    """Task runs that failed or crashed, or that the server takes for running."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter

    conditions = {"state": {"type": {"any_": ["RUNNING", "FAILED", "CRASHED"]}}}
    with get_client(sync_client=True) as client:
        return client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])),
            task_run_filter=TaskRunFilter.model_validate(conditions),
        )


def failure_note(benchmark: str, ending: Ending, command: str, trouble: Trouble) -> str:
    """The note: the sentence, where it happened, and the command that goes on."""
    again = []
    if trouble.times > 1:
        again = [f"- Failed like this: {trouble.times} times since {trouble.since} UTC"]
    lines = [
        f"# {benchmark}: {ending.state}",
        "",
        ending.sentence(),
        "",
        f"- When: {datetime.now(UTC):{TIME}} UTC",
        *again,
        f"- Run: {ending.run}",
        *_places(ending.shards),
        "",
        "To go on (what was finished is not made again):",
        "",
        f"    {command}",
        "",
    ]
    if ending.error is not None and ending.is_defect:
        trace = "".join(traceback.format_exception(ending.error))
        lines += ["## Traceback", "", *(f"    {line}" for line in trace.splitlines()), ""]
    return "\n".join(lines)


def resume_command(flow: str, settings: dict[str, Any], config: Path) -> str:
    """What a person types to do the same again; `config` is the file with the settings."""
    if flow == GC:
        return shlex.join(["novelty", "gc", "--yes", "--lake", str(settings["lake"])])
    return shlex.join(["novelty", "build", flow, "--config", str(config)])


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
