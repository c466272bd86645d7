"""The stages of CONDDA and OND: describe tests, run agents, export sessions, program metrics.

Enters: a folder of test files with features, and perhaps the state of a server. Leaves: the tables
of `schemas.condda` and the shared ones. A test is a protocol, an agent on a test is a run, with or
without the red light: one shard, so a cluster takes all tests at once; a killed run goes on in the
middle of its test. The features of a test are a run of their own, which all scores are made of.
"""

import io
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from schemas.condda import (
    CHARACTERIZATION,
    PROGRAM,
    PROTOCOLS,
    SESSION_MEASURES,
    SESSIONS,
    TESTS,
    Config,
    SessionSettings,
)
from schemas.config import Settings, make_config
from schemas.errors import ChangedSource, ConfigError, NoveltyError, SourceError, TrainingError
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN, RUNS, SAMPLES, SPLITS
from storage.pieces import Part
from storage.raw import RawFile, RawSource, open_raw
from tasks import scores as score_files
from tasks.condda.agent import AGENT_VERSION, Agent, AgentSettings, FeatureLookup, Training
from tasks.condda.changes import find_change
from tasks.condda.commands import Policy, ProtocolRefusal
from tasks.condda.domains import DOMAINS, RED_LIGHT, domain_named
from tasks.condda.export import (
    NO_TIME,
    P_UNKNOWN,
    SESSION_TABLES,
    describe_test,
    example_ids,
    instance_rows,
    sample_frames,
    session_frames,
)
from tasks.condda.harness import Harness
from tasks.condda.measures import begun_tests, program_of
from tasks.condda.run import LOOP_VERSION, run_session
from tasks.condda.server.client import HttpHarness, Mirrored
from tasks.condda.session import open_state
from tasks.condda.store import EVENTS, EventStore
from tasks.condda.test_files import METADATA, TRUTH, TestLibrary, features_file, protocol_name
from tasks.engine.stage import Build, Produced, Reject, Shard, stage
from tasks.evaluation.protocols import plan_protocols, protocol_keys
from tasks.evaluation.runs import run_id, run_mark, run_row
from tasks.evaluation.stages import PassedRun, ScoreChoice, chosen_scores
from tasks.predictors import find_predictor, resolved_predictors

log = logging.getLogger(__name__)

BENCHMARK = "condda"
GIVEN_FEATURES = "given_features"
GIVEN = frozenset({"features", "train", "valid"})
FEATURE_BYTES = 1 << 30


# ---------------------------------------------------------------- choices


AGENT = "agent"
"""Settings of the agent among those of its predictor: `--predictors.<name>.agent.<setting>`."""


def chosen_agents(config: Config) -> list[RunFacts]:
    """Agents with resolved settings, one for each seed, each as a run on no test yet.

    Whatever does not fit is refused.
    """
    for name in ("models", "networks"):
        if wrong := sorted(set(getattr(config, name)) - {"all"}):
            raise ConfigError(
                f"{name} {wrong[0]} does not fit condda: its tests come with features; choose "
                "agents by --predictors and scores by --scores"
            )
    wanted = {
        name: {key: value for key, value in changes.items() if key != AGENT}
        for name, changes in config.predictors.items()
    }
    agents = []
    for name, one in resolved_predictors(wanted, config.preset, config.train).items():
        given = config.predictors.get(name, {}).get(AGENT, {})
        try:
            own = make_config(AgentSettings, dict(given))
            if not one.kind.needs_validation and (
                idle := sorted({"held_out", "folds"} & set(given))
            ):
                raise ConfigError(
                    f"{idle[0]} has no effect: {name} holds examples out by itself; "
                    f"set --predictors.{name}.folds"
                )
        except ConfigError as error:
            raise ConfigError(f"{name}: {AGENT}: {error}") from None
        settings = one.settings.model_dump(mode="json"), own.model_dump(mode="json")
        rule = find_change(own.change)
        code = {"change": rule.version, "agent": AGENT_VERSION, "run_loop": LOOP_VERSION}
        facts = RunFacts(
            benchmark=BENCHMARK,
            protocol=None,
            model=name,
            preset=config.preset if one.kind.presets else "none",
            settings=dict(zip(("predictor", AGENT), settings, strict=True)),
            changed={**one.changed, **({AGENT: given} if given else {})},
            versions={**one.kind.versions(one.settings), **code},
            fit_key="",
        )
        agents += [facts.model_copy(update={"seed": seed}) for seed in config.seeds]
    return agents


def agent_facts(
    agent: RunFacts, protocol: str, red_light: bool, run: SessionSettings, key: str
) -> RunFacts:
    """The run of an agent on a test."""
    session = {
        "red_light": red_light,
        **run.model_dump(include={"detection_threshold", "url", "name"}),
    }
    settings = {**agent.settings, "session": session}
    update = {"protocol": protocol, "settings": settings, "fit_key": key}
    return agent.model_copy(update=update)


def fitting_scores(config: Config) -> list[ScoreChoice]:
    """Scores that can be made of features alone; another one is refused if it is named.

    `p_unknown` is made of what agents post, whether it is named or not.
    """
    choices = chosen_scores(config.scores, config.preset)
    lacking = {choice.name: score_files.find(choice.name).needs - GIVEN for choice in choices}
    for name, needs in lacking.items():
        if needs and name in config.scores and name != P_UNKNOWN.name:
            raise ConfigError(
                f"score {name} does not fit condda: it needs {', '.join(sorted(needs))}, and tests "
                "come with features alone"
            )
    return [choice for choice in choices if not lacking[choice.name]]


# ---------------------------------------------------------------- tests


def plan_tests(source: RawSource, protocols: Sequence[str] = ()) -> list[Shard]:
    """One shard for each test of a known domain; `protocols` must each name one or more."""
    files = {file.name: file for file in source.files()}
    shards = []
    for name in sorted(files):
        protocol, _, rest = name.partition("/")
        domain, _, file = rest.partition("/")
        if not file.endswith(TRUTH) or domain not in DOMAINS or "/" in file:
            continue
        test = file.removesuffix(TRUTH)
        whole = protocol_name(protocol, domain, test)
        names = [name, f"{whole}{METADATA}", features_file(test)]
        shards.append(
            Shard(
                whole,
                files=tuple(files[one] for one in names if one in files),
                source=source.root,
                about={"protocol": protocol, "domain": domain, "test": test},
            )
        )
    if not shards:
        raise SourceError(
            f"no test in {source.root}; expected PROTOCOL/domain/<test>{TRUTH} of a domain among "
            f"{', '.join(DOMAINS)}"
        )
    for wanted in protocols:
        if not any(is_part_of(shard.name, wanted) for shard in shards):
            raise ConfigError(
                f"no test is of protocol {wanted!r}; there are: "
                + ", ".join(sorted({shard.name.rpartition("/")[0] for shard in shards}))
            )
    return shards


def is_part_of(protocol: str, wanted: str) -> bool:
    """Whether a protocol is the wanted one or below it, such as OND/novelty/t below OND."""
    return f"{protocol}/".startswith(f"{wanted}/")


def is_wanted(protocol: str, protocols: Sequence[str]) -> bool:
    """Whether a protocol is among those that are named, or below one; all are if none is named."""
    return not protocols or any(is_part_of(protocol, one) for one in protocols)


@stage(writes=(TESTS, SAMPLES, SPLITS), version=2)
def read_test(shard: Shard, settings: Settings) -> Produced:
    """Describe one test: its size, its classes, when its world changes, and every instance."""
    place, root = shard.about, Path(shard.source or "")
    given, rejects = None, []
    try:
        test = TestLibrary(root).load(place["test"], place["protocol"], place["domain"])
        row = describe_test(test)
    except ChangedSource:
        raise
    except NoveltyError as error:
        return Produced({}, 1, [Reject(shard.name, "unusable_test", str(error))])
    for file in shard.files:
        if file.name != features_file(test.test_id):
            continue
        try:
            given = read_features(root, file, test.domain.unknown)
            given[1].of(test.names)
        except ChangedSource:
            raise
        except NoveltyError as error:
            given = None
            rejects.append(Reject(file.name, "unusable_features", str(error), SAMPLES.name))
    row["examples"] = 0 if given is None else len(given[0].labels)
    tests = pl.DataFrame([row], schema=TESTS.polars_schema)
    return Produced({"tests": tests, **sample_frames(test, given)}, 1, rejects)


def plan_test_protocols(build: Build) -> list[Shard]:
    """One shard for each test that could be read."""
    samples = {part.shard: part for part in build.table(SAMPLES.name)}
    splits = {part.shard: part for part in build.table(SPLITS.name)}
    shards = []
    for row in build.read(TESTS.name).iter_rows(named=True):
        name = protocol_name(row["protocol"], row["domain"], row["test_id"])
        sizes = ("instances", "round_size", "rounds", "known_classes", "examples")
        definition = {size: row[size] for size in sizes}
        shards += plan_protocols((splits[name],), (samples[name],), {name: definition})
    return shards


def read_features(root: Path, file: RawFile, unknown: str) -> tuple[Training, FeatureLookup]:
    """Examples of the known classes and vectors of a test's instances, out of an npz file.

    It holds instance_id, features, train_features and train_labels, these as the domain counts
    them: from 1 where the unknown column is first, else from 0. It may hold train_groups: the
    number of each example's episode or video, -1 where there is none.
    """
    data = open_raw(root).read(file.name, limit=FEATURE_BYTES)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            ids = [str(name) for name in arrays["instance_id"]]
            vectors, examples = arrays["features"], arrays["train_features"]
            labels = arrays["train_labels"].astype(np.int64) - int(unknown == "first")
            groups = arrays["train_groups"].astype(np.int64) if "train_groups" in arrays else None
    except (ValueError, KeyError, OSError) as error:
        raise SourceError(
            f"{file.name} is no file of features ({error}); expected an npz of instance_id, "
            "features, train_features and train_labels"
        ) from error
    known = tuple(str(number) for number in range(int(labels.max(initial=0)) + 1))
    names = [f"example {number:08d}" for number in range(len(labels))]
    return Training(names, examples, labels, known, groups), FeatureLookup(ids, vectors)


# ---------------------------------------------------------------- features as a run


@dataclass(frozen=True)
class Tests:
    """Tests of a build as protocols: their files, keys and rows."""

    source: RawSource
    rows: pl.DataFrame
    keys: Mapping[str, Mapping[str, str]]
    parts: Mapping[str, tuple[Part, Part]]
    """Rows of `tests` and of `splits`, by protocol."""

    __test__ = False

    @classmethod
    def of(cls, build: Build, source: RawSource, protocols: Sequence[str]) -> "Tests":
        """Those of the build that are wanted."""
        rows = build.read(TESTS.name).with_columns(
            pl.concat_str("protocol", "domain", "test_id", separator="/").alias("whole")
        )
        wanted = [is_wanted(name, protocols) for name in rows["whole"]]
        pairs = zip(build.table(TESTS.name), build.table(SPLITS.name), strict=True)
        parts = {test.shard: (test, splits) for test, splits in pairs}
        chosen = rows.filter(pl.Series(wanted, dtype=pl.Boolean))
        return cls(source, chosen, protocol_keys(build), parts)

    @cached_property
    def files(self) -> dict[str, RawFile]:
        return {file.name: file for file in self.source.files()}

    def with_features(self) -> list[dict[str, Any]]:
        return self.rows.filter(pl.col("examples") > 0).rows(named=True)

    def passed(self, facts: RunFacts, outputs: tuple[Part, ...] = ()) -> PassedRun:
        """A run on one of these tests."""
        name = str(facts.protocol)
        mark = run_mark(facts, self.keys[name]["data_key"])
        return PassedRun(facts, mark, outputs, self.parts[name][1:])

    def run_of(self, shard: Shard, *outputs: Part) -> PassedRun:
        """The run that a shard made."""
        return self.passed(RunFacts.model_validate(shard.about), outputs)

    def shard(self, facts: RunFacts, row: Mapping[str, Any], name: str) -> Shard:
        """The shard that makes a run of a test with features; its id ends the name."""
        run = self.passed(facts)
        names = [f"{row['whole']}{TRUTH}", f"{row['whole']}{METADATA}"]
        return Shard(
            f"{name}/{run.mark.run_id}",
            files=tuple(self.files[one] for one in (*names, features_file(row["test_id"]))),
            parts=self.parts[row["whole"]],
            source=self.source.root,
            about=facts.model_dump(mode="json"),
            depends={"run": run.mark.run_id, "rows": run.mark.data_key},
            run=run.mark,
        )


def plan_features(tests: Tests) -> list[Shard]:
    """The features of each test as a run."""
    shards = []
    for row in tests.with_features():
        facts = RunFacts(
            benchmark=BENCHMARK,
            protocol=row["whole"],
            model=GIVEN_FEATURES,
            origin="frozen",
            versions={"model": 1},
            fit_key=tests.keys[row["whole"]]["fit_key"],
        )
        shards.append(tests.shard(facts, row, row["whole"]))
    return shards


@stage(writes=(OUTPUTS, RUNS), version=1)
def pass_features(shard: Shard, settings: Settings) -> Produced:
    """The vectors of a test's examples and instances, as they were given."""
    facts, root = RunFacts.model_validate(shard.about), Path(shard.source or "")
    place = shard.read(TESTS.name).row(0, named=True)
    test = TestLibrary(root).load(place["test_id"], place["protocol"], place["domain"])
    training, features = read_features(root, shard.files[-1], test.domain.unknown)
    ids = [*example_ids(test, len(training.labels)), *instance_rows(test)["sample_id"]]
    vectors = np.vstack([training.features, features.of(test.names)]).astype(np.float32)
    rows = pl.DataFrame(
        {"sample_id": ids, "features": pl.Series(vectors).cast(pl.List(pl.Float32))}
    ).unique("sample_id", keep="first", maintain_order=True)
    outputs = rows.with_columns(
        pl.lit(run_id(facts)).alias("run_id"),
        pl.lit(PLAIN).alias("view"),
        pl.lit(None, pl.List(pl.Float32)).alias("logits"),
        pl.lit(None, pl.Float64).alias("novelty"),
        pl.lit(None, pl.String).alias("predicted"),
    )
    return Produced({"outputs": outputs, "runs": run_row(facts)}, outputs.height)


# ---------------------------------------------------------------- runs of agents


def check_server(config: Config) -> None:
    """Refuse what the server of the runs would refuse, before any work: whether it answers and
    takes the token, offers the tests, and allows the red light and the threshold."""
    run, library = config.run, TestLibrary(config.tests)
    places = [(one, domain) for one in PROTOCOLS for domain in library.domains(one)]
    with HttpHarness(str(run.url), token=run.token, patience=0) as server:
        try:
            for protocol, domain in places:
                if domain not in DOMAINS:
                    continue
                offered = server.test_ids_request(protocol=protocol, domain=domain)
                for test in library.test_ids(protocol, domain):
                    name = protocol_name(protocol, domain, test)
                    runs = is_wanted(name, config.protocols)
                    runs = runs and (config.tests / features_file(test)).is_file()
                    if runs and test not in offered.decode().split():
                        raise ConfigError(
                            f"{run.url} does not offer test {name}; serve the tests in "
                            f"{config.tests} there, or choose by --protocols"
                        )
            policy = server.policy()
        except ProtocolRefusal as refusal:
            reason = refusal.message
            if refusal.reason == "Unauthorized":
                reason = f"{'this' if run.token else 'no'} token; name one by --token"
            raise ConfigError(f"{run.url} refuses: {reason}") from refusal
    if policy.strict and run.red_light != "without" and not policy.red_light:
        raise ConfigError(f"the operator of {run.url} allows no red light; run without it")
    if policy.strict and run.detection_threshold != policy.detection_threshold:
        raise ConfigError(
            f"the detection_threshold of {run.url} is {policy.detection_threshold:g}, not "
            f"{run.detection_threshold:g}; leave it out"
        )


def plan_runs(tests: Tests, agents: Sequence[RunFacts], settings: SessionSettings) -> list[Shard]:
    """One run for each agent, test and way of detection.

    A test without its file of features is not run, and that is said.
    """
    ways = {"without": (False,), "with": (True,), "both": (False, True)}[settings.red_light]
    shards = []
    for row in tests.with_features():
        key = tests.keys[row["whole"]]["fit_key"]
        for agent in agents:
            for red_light in ways:
                facts = agent_facts(agent, row["whole"], red_light, settings, key)
                way = "given" if red_light else "system"
                shards.append(tests.shard(facts, row, f"{agent.model}/{row['whole']}/{way}"))
    lacking = tests.rows.filter(examples=0)["test_id"]
    if agents and len(lacking):
        log.warning(
            f"agents do not run {len(lacking)} tests, which have no features, such as "
            f"{features_file(lacking[0])}"
        )
    return shards


class Access(Settings):
    """What a run needs that changes none of its numbers."""

    token: str | None = Field(None, exclude=True)
    device: str = Field("auto", exclude=True)


@stage(writes=SESSION_TABLES, version=6)
def run_agent(shard: Shard, settings: Access) -> Produced:
    """Lead one agent through one test, in this process or against a server, and measure it."""
    facts, root = RunFacts.model_validate(shard.about), Path(shard.source or "")
    test, way = shard.read(TESTS.name).row(0, named=True), facts.settings["session"]
    training, features = read_features(root, shard.files[-1], domain_named(test["domain"]).unknown)
    kind = find_predictor(facts.model)
    predictor = kind(kind.resolve(None, facts.settings["predictor"]), device=settings.device)
    agent = Agent(predictor, AgentSettings(**facts.settings[AGENT]), facts.seed or 0)
    if shard.work is None:
        raise ValueError("a run needs a folder of work")
    shard.work.mkdir(parents=True, exist_ok=True)
    # The same run must give the same bytes: no clock, and an id out of what was run.
    session = str(uuid.uuid5(uuid.NAMESPACE_URL, f"novelty:{run_id(facts)}"))
    never = datetime.fromisoformat(NO_TIME).astimezone(UTC)
    # What a remote agent would see: the red light if it is the condition, no count of classes.
    condition = {name: way[name] for name in ("red_light", "detection_threshold")}
    library, policy = TestLibrary(root), Policy(**condition)
    try:
        agent.fit(training)
        with ExitStack() as open_files:
            store = open_files.enter_context(closing(EventStore(shard.work / EVENTS)))
            harness = Harness(library, store, policy, clock=lambda: never, new_id=lambda: session)
            target: Any = harness
            if way["url"]:
                server = open_files.enter_context(HttpHarness(way["url"], token=settings.token))
                target = Mirrored(server, library, store)
                harness = target.local
            run = run_session(
                *(target, [test["test_id"]], agent, features),
                protocol=test["protocol"],
                domain=test["domain"],
                **condition,
                resume=next(iter(store.sessions()), None),
                journal=shard.work,
            )
            frames, rejects = session_frames(harness, run.session_id, test["test_id"], facts)
    except ConfigError as error:
        raise TrainingError(f"{facts.model} cannot run {facts.protocol}: {error}") from error
    except ProtocolRefusal as refusal:
        raise SourceError(
            f"{shard.name}: the protocol refused the run: {refusal.reason}, {refusal.message}"
        ) from refusal
    if way["url"]:
        # The server's own account of the session may be exported, too.
        mirrored = pl.format("{}/mirror", pl.col("session_id")).alias("session_id")
        frames = {
            name: rows.with_columns(mirrored) if "session_id" in rows.columns else rows
            for name, rows in frames.items()
        }
    return Produced(frames, 1, rejects)


# ---------------------------------------------------------------- sessions of a server


class ExportSettings(Settings):
    """Where the events are."""

    state: Path = Field(exclude=True)


def state_store(state: Path) -> EventStore:
    """The store of a server's state folder, which must be there."""
    path = state / EVENTS
    if not path.is_file():
        raise SourceError(f"{state} holds no {EVENTS}; name the state folder of a server")
    return EventStore(path)


def plan_exports(state: Path, tests: Tests) -> list[tuple[PassedRun | None, Shard]]:
    """One shard for each test of a session; one that has had no event since stays as it is.

    A completed test that is among `tests` is a run, named by the digest of its events.
    """
    planned: list[tuple[PassedRun | None, Shard]] = []
    with closing(state_store(state)) as store:
        for session in store.sessions():
            opened = open_state(session, store.load(session, kind="opened")[0].event)
            ended = [stored.event.time for stored in store.load(session, kind="terminated")]
            for test in store.tests(session) or [""]:
                size, digest = store.fingerprint(session, test)
                protocol = protocol_name(opened.protocol, opened.domain, test)
                facts = run = None
                if protocol in tests.keys:
                    facts = RunFacts(
                        benchmark=BENCHMARK,
                        protocol=protocol,
                        model=opened.detector,
                        settings={
                            "session": {
                                "red_light": RED_LIGHT in opened.hints,
                                "detection_threshold": opened.threshold,
                                "hints": list(opened.hints),
                            }
                        },
                        origin="imported",
                        weights={"events": digest},
                        fit_key=tests.keys[protocol]["fit_key"],
                    )
                    run = tests.passed(facts)
                shard = Shard(
                    f"served/{session}/{test}",
                    files=(RawFile(f"{EVENTS}#{session}/{test}", size, digest, path=""),),
                    parts=tests.parts.get(protocol, ()),
                    source=tests.source.root,
                    about={
                        "session": session,
                        "test": test,
                        "facts": facts and facts.model_dump(mode="json"),
                    },
                    depends={"ended": ended, "rows": tests.keys.get(protocol)},
                    run=None if run is None else run.mark,
                )
                planned.append((run, shard))
    return planned


@stage(writes=SESSION_TABLES, version=7)
def export_session(shard: Shard, settings: ExportSettings) -> Produced:
    """Rows of one test of a server's session, measured if it is completed."""
    facts = shard.about["facts"] and RunFacts.model_validate(shard.about["facts"])
    with closing(state_store(settings.state)) as store:
        harness = Harness(TestLibrary(Path(shard.source or "")), store)
        place = shard.about["session"], shard.about["test"]
        frames, rejects = session_frames(harness, *place, facts)
        return Produced(frames, 1, rejects)


# ---------------------------------------------------------------- program metrics


class ProgramSettings(Settings):
    """Against whom agents are measured."""

    baseline: str


def plan_program(build: Build) -> list[Shard]:
    """All sessions that the tables will hold, those of earlier builds too."""
    pieces = [piece for piece in (*build.pieces, *build.carried()) if piece.has(SESSIONS.name)]
    if not pieces and not build.table(OUTPUTS.name):
        raise SourceError(
            "there is no session to measure: no test has its features/<test>.npz for an agent to "
            "run (novelty condda make-tests writes them), and no state of a server with sessions "
            "is named"
        )
    pieces.sort(key=lambda piece: piece.manifest.address)
    tables = (SESSIONS.name, SESSION_MEASURES.name, CHARACTERIZATION.name)
    return [Shard("all", parts=tuple(piece.part(name) for name in tables for piece in pieces))]


@stage(writes=(PROGRAM,), version=6)
def measure_program(shard: Shard, settings: ProgramSettings) -> Produced:
    """M1 to M6 of each agent over its completed tests, each session's own."""
    if not shard.parts:
        return Produced({}, 0)
    read = (shard.read(table.name) for table in (SESSIONS, SESSION_MEASURES, CHARACTERIZATION))
    found = program_of(begun_tests(*read), settings.baseline)
    rows = [
        (*place, metric, value, count)
        for place, (count, metrics) in found.items()
        for metric, value in metrics.items()
    ]
    table = pl.DataFrame(rows, schema=PROGRAM.polars_schema, orient="row")
    return Produced({"program": table}, table.height)
