"""The stages of CONDDA and OND: describe tests, run agents, export sessions, program metrics.

Enters: a folder of test files with features, and perhaps the state of a server. Leaves: the tables
of `schemas.condda`. One shard is one agent on one test, with or without the red light, so a cluster
takes all tests at once; a killed run goes on in the middle of its test.
"""

import io
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import Field

from schemas.condda import (
    CHARACTERIZATION,
    FEEDBACK,
    METRICS,
    PROGRAM,
    RESULTS,
    ROUNDS,
    SESSIONS,
    TESTS,
    RunSettings,
)
from schemas.config import Settings
from schemas.errors import ChangedSource, NoveltyError, SourceError
from storage.pieces import Part
from storage.raw import RawFile, RawSource, open_raw
from tasks.condda.agents import make_agent
from tasks.condda.agents.base import FeatureLookup, Training
from tasks.condda.domains import DOMAINS, domain_named
from tasks.condda.export import NO_TIME, describe_test, session_frames
from tasks.condda.harness import Harness
from tasks.condda.metrics import Trial, program_metrics
from tasks.condda.mirror import Mirrored
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.run import run_session
from tasks.condda.store import EventStore
from tasks.condda.test_files import METADATA, TRUTH, TestLibrary
from tasks.stage import Produced, Reject, Shard, stage

SESSION_TABLES = (SESSIONS, ROUNDS, RESULTS, FEEDBACK, METRICS, CHARACTERIZATION)
FEATURES = "features"
FEATURE_BYTES = 1 << 30
EVENTS = "events.sqlite"


# ---------------------------------------------------------------- tests


def plan_tests(source: RawSource) -> list[Shard]:
    """One shard for each test of a known domain."""
    files = {file.name: file for file in source.files()}
    shards = []
    for name in sorted(files):
        protocol, _, rest = name.partition("/")
        domain, _, file = rest.partition("/")
        if not file.endswith(TRUTH) or domain not in DOMAINS or "/" in file:
            continue
        test = file.removesuffix(TRUTH)
        found = [name, f"{protocol}/{domain}/{test}{METADATA}"]
        shards.append(
            Shard(
                f"{protocol}/{domain}/{test}",
                files=tuple(files[one] for one in found if one in files),
                source=source.root,
                about={"protocol": protocol, "domain": domain, "test": test},
            )
        )
    if not shards:
        raise SourceError(
            f"no test in {source.root}; expected PROTOCOL/domain/<test>{TRUTH} of a domain among "
            f"{', '.join(DOMAINS)}"
        )
    return shards


@stage(writes=(TESTS,), version=1)
def read_test(shard: Shard, settings: Settings) -> Produced:
    """Describe one test: its size, its classes, when its world changes."""
    place = shard.about
    try:
        test = TestLibrary(Path(shard.source or "")).load(
            place["test"], place["protocol"], place["domain"]
        )
        row = describe_test(test)
    except ChangedSource:
        raise
    except NoveltyError as error:
        return Produced({}, 1, [Reject(shard.name, "unusable_test", str(error))])
    return Produced({"tests": pl.DataFrame([row], schema=TESTS.polars_schema)}, 1)


# ---------------------------------------------------------------- runs


def plan_runs(source: RawSource, tests: pl.DataFrame, settings: RunSettings) -> list[Shard]:
    """One shard for each agent, test and way of detection.

    A test without its file of features is not run, and that is said.
    """
    files = {file.name: file for file in source.files()}
    told = {"without": (False,), "with": (True,), "both": (False, True)}[settings.red_light]
    shards, lacking = [], []
    for row in tests.filter(pl.col("protocol").is_in(settings.protocols)).iter_rows(named=True):
        protocol, domain, test = row["protocol"], row["domain"], row["test_id"]
        names = [f"{protocol}/{domain}/{test}{end}" for end in (TRUTH, METADATA)]
        names.append(f"{FEATURES}/{test}.npz")
        if names[-1] not in files:
            lacking.append(names[-1])
            continue
        for agent in settings.agents:
            for red_light in told:
                shard = Shard(
                    f"{agent}/{protocol}/{domain}/{test}/{'given' if red_light else 'system'}",
                    files=tuple(files[name] for name in names),
                    source=source.root,
                    about={
                        "agent": agent,
                        "protocol": protocol,
                        "domain": domain,
                        "test": test,
                        "red_light": red_light,
                    },
                )
                shards.append(shard)
    if lacking and settings.agents:
        print(
            f"agents do not run {len(lacking)} tests, which have no features, such as {lacking[0]}",
            file=sys.stderr,
        )
    return shards


class OneRun(Settings):
    """What one run depends on: naming another agent or test makes no other run anew."""

    detection_threshold: float
    url: str | None
    name: str
    token: str | None = Field(None, exclude=True)

    @classmethod
    def of(cls, run: RunSettings) -> "OneRun":
        return cls(**{name: getattr(run, name) for name in cls.model_fields})


@stage(writes=SESSION_TABLES, version=1)
def run_agent(shard: Shard, settings: OneRun) -> Produced:
    """Lead one agent through one test, in this process or against a server, and measure it."""
    about, root = shard.about, Path(shard.source or "")
    training, features = read_features(root, shard.files[-1], domain_named(about["domain"]).unknown)
    agent = make_agent(about["agent"])
    agent.fit(training)
    if shard.work is None:
        raise ValueError("a run needs a folder of work")
    shard.work.mkdir(parents=True, exist_ok=True)
    store = EventStore(shard.work / EVENTS)
    try:
        library = TestLibrary(root)
        # The same run must give the same bytes: no clock, and an id out of what was run.
        session = str(uuid.uuid5(uuid.NAMESPACE_URL, f"novelty:{shard.name}"))
        never = datetime.fromisoformat(NO_TIME).astimezone(UTC)
        harness = Harness(library, store, "compat", clock=lambda: never, new_id=lambda: session)
        target = harness
        if settings.url:
            target = _mirrored(settings, library, store)
            harness = target.local
        started = store.sessions()
        found = run_session(
            target,
            [about["test"]],
            agent,
            features,
            protocol=about["protocol"],
            domain=about["domain"],
            red_light=about["red_light"],
            detection_threshold=settings.detection_threshold,
            resume=started[0] if started else None,
            journal=shard.work,
        )
        frames, rejects = session_frames(harness, found.session_id)
    except ProtocolRefusal as refusal:
        raise SourceError(
            f"{shard.name}: the protocol refused the run: {refusal.reason}, {refusal.message}"
        ) from refusal
    finally:
        store.close()
    return Produced(frames, 1, rejects)


def _mirrored(settings: OneRun, library: TestLibrary, store: EventStore) -> Mirrored:
    from tasks.condda.server.client import HttpHarness

    return Mirrored(HttpHarness(settings.url, token=settings.token), library, store)


def read_features(root: Path, file: RawFile, unknown: str) -> tuple[Training, FeatureLookup]:
    """Examples of the known classes and vectors of a test's instances, out of an npz file.

    It holds instance_id, features, train_features and train_labels, these as the domain counts
    them: from 1 where the unknown column is first, else from 0.
    """
    data = open_raw(root).read(file.name, limit=FEATURE_BYTES)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            ids = [str(name) for name in arrays["instance_id"]]
            vectors, examples = arrays["features"], arrays["train_features"]
            labels = arrays["train_labels"].astype(np.int64) - int(unknown == "first")
    except (ValueError, KeyError, OSError) as error:
        raise SourceError(
            f"{file.name} is no file of features ({error}); expected an npz of instance_id, "
            "features, train_features and train_labels"
        ) from error
    known = tuple(str(number) for number in range(int(labels.max(initial=0)) + 1))
    names = [f"example {number:08d}" for number in range(len(labels))]
    return Training(names, examples, labels, known), FeatureLookup(ids, vectors)


# ---------------------------------------------------------------- sessions of a server


def plan_exports(state: Path, source: RawSource) -> list[Shard]:
    """One shard for each session; one that has had no event since is not exported again."""
    path = state / EVENTS
    if not path.is_file():
        raise SourceError(f"{state} holds no {EVENTS}; name the state folder of a server")
    store = EventStore(path)
    try:
        return [
            Shard(
                f"served/{session}",
                files=(RawFile(f"{path}#{session}", *store.fingerprint(session), path=""),),
                source=source.root,
                about={"session": session},
            )
            for session in store.sessions()
        ]
    finally:
        store.close()


@stage(writes=SESSION_TABLES, version=2)
def export_session(shard: Shard, settings: Settings) -> Produced:
    """Rows of one session of a server, with measures of its completed tests."""
    store = EventStore(Path(shard.files[0].name.rpartition("#")[0]))
    try:
        harness = Harness(TestLibrary(Path(shard.source or "")), store, "compat")
        frames, rejects = session_frames(harness, shard.about["session"])
        return Produced(frames, 1, rejects)
    finally:
        store.close()


# ---------------------------------------------------------------- program metrics


class ProgramSettings(Settings):
    """Against whom agents are measured."""

    baseline: str


def plan_program(sessions: tuple[Part, ...], metrics: tuple[Part, ...]) -> list[Shard]:
    if not sessions:
        raise SourceError(
            "there is no session to measure: no test has its features/<test>.npz for an agent to "
            "run (novelty make-tests writes them), and no state of a server with sessions is named"
        )
    return [Shard("all", parts=sessions + metrics)]


@stage(writes=(PROGRAM,), version=2)
def measure_program(shard: Shard, settings: ProgramSettings) -> Produced:
    """M1 to M6 of each agent over its completed tests, each session's own.

    Of several sessions of the baseline the newest counts; one without detection is no agent.
    """
    sessions, metrics = shard.read("sessions"), shard.read("metrics")
    corrected = (
        metrics.filter(form="corrected")
        .join(sessions, on="session_id")
        .sort("opened", "session_id", "test_id", maintain_order=True)
    )
    trials: dict[tuple[str, str, str], list[tuple[str, bool, dict]]] = {}
    place = ("detector", "protocol", "domain", "test_id", "red_light", "session_id")
    for key, rows in corrected.group_by(*place, maintain_order=True):
        detector, protocol, domain, test, red_light, _ = key
        nested: dict[str, dict[str, float | None]] = {}
        for metric, name, value in rows.select("metric", "name", "value").iter_rows():
            nested.setdefault(metric, {})[name] = value
        trials.setdefault((detector, protocol, domain), []).append((test, red_light, nested))
    rows = []
    for (detector, protocol, domain), found in sorted(trials.items()):
        base = {
            test: nested["m_acc"]
            for (other, *place), theirs in trials.items()
            for test, red_light, nested in theirs
            if settings.baseline in (other, other.rpartition("-")[0])
            and (protocol, domain) == tuple(place)
            and not red_light
        }
        every = [
            Trial(nested, "given" if red_light else "system", base.get(test))
            for test, red_light, nested in found
            if "m_num_stats" in nested
        ]
        if not every:
            continue
        rows += [
            (detector, protocol, domain, metric, value, len(every))
            for metric, value in program_metrics(every).items()
        ]
    table = pl.DataFrame(rows, schema=PROGRAM.polars_schema, orient="row")
    return Produced({"program": table}, table.height)
