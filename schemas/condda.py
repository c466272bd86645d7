"""CONDDA and OND: the tables of sessions and what was measured, and the configuration of the flow.

A session is one agent's run over some tests: by the flow itself, or by any client of the server.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from schemas.config import Choice, Settings
from schemas.runs import RunChoices
from schemas.table import Column, Table

Protocol = Literal["CONDDA", "OND"]
PROTOCOLS: tuple[Protocol, ...] = ("CONDDA", "OND")
_PLACE = (
    Column("session_id", pa.string(), "Session"),
    Column("test_id", pa.string(), "Test; empty where the session has touched none"),
)

TESTS = Table(
    name="tests",
    description="One row per test on offer: its size, and when and how its world changes.",
    columns=(
        Column("protocol", pa.string(), "Protocol", allowed=PROTOCOLS),
        Column("domain", pa.string(), "Domain, which says how the columns of results stand"),
        Column("test_id", pa.string(), "Test"),
        Column("instances", pa.int32(), "Instances", minimum=0),
        Column("round_size", pa.int32(), "Instances of a round", minimum=1),
        Column("rounds", pa.int32(), "Rounds", minimum=0),
        Column("known_classes", pa.int32(), "Known classes", minimum=1),
        Column("novel_classes", pa.int32(), "Novel classes that the labels tell apart", minimum=0),
        Column("novel_rows", pa.int32(), "Instances of novel classes", minimum=0),
        Column("change_row", pa.int32(), "First row of the changed world, from 0", nullable=True),
        Column("novel_row", pa.int32(), "First novel instance, from 0", nullable=True),
        Column("scenario", pa.string(), "Shape of its change, of a generated test", nullable=True),
        Column(
            "nuisance_row",
            pa.int32(),
            "First known instance in another view, which is no novelty, from 0",
            nullable=True,
        ),
        Column(
            "examples",
            pa.int32(),
            "Training examples beside it; 0: it has no features, so nothing runs on it here",
            minimum=0,
        ),
    ),
    key=("protocol", "domain", "test_id"),
    version=3,
)

SESSIONS = Table(
    name="sessions",
    description="One row per session and test: who ran, under which protocol, and how far.",
    columns=(
        *_PLACE,
        Column("run_id", pa.string(), "Run of a completed test, see `runs`", nullable=True),
        Column("owner", pa.string(), "Owner of its token; empty for an operator or without tokens"),
        Column("agent", pa.string(), "Agent, as it named itself"),
        Column("protocol", pa.string(), "Protocol"),
        Column("domain", pa.string(), "Domain"),
        Column("red_light", pa.bool_(), "Whether the agent was told when the world changes"),
        Column("hints", pa.string(), "All hints it asked for, with spaces between"),
        Column("threshold", pa.float64(), "Detection above it declares novelty"),
        Column("tests", pa.int32(), "Tests that the session was opened with", minimum=0),
        Column("completed", pa.bool_(), "Whether this test is completed"),
        Column("opened", pa.string(), "Time of opening; null where the flow ran it", nullable=True),
        Column("terminated", pa.string(), "Time of its end; null while open", nullable=True),
        Column("state", pa.string(), "State of the session", allowed=("open", "terminated")),
    ),
    key=("session_id", "test_id"),
    version=3,
)

ROUNDS = Table(
    name="rounds",
    description="What happened in each round of each test; a restarted test starts a new attempt.",
    columns=(
        *_PLACE,
        Column("attempt", pa.int32(), "Restarts before it", minimum=0),
        Column("round", pa.int32(), "Round, from 0"),
        Column("served", pa.int32(), "Times its data was asked for", minimum=0),
        Column("posted", pa.string(), "Types of results posted, with spaces between"),
        Column("result_lines", pa.int32(), "Result lines posted", minimum=0),
        Column("feedback_ids", pa.int32(), "Ids answered with feedback", minimum=0),
    ),
    key=("session_id", "test_id", "attempt", "round"),
    version=2,
)

RESULTS = Table(
    name="results",
    description="Every result line of the latest attempt of each test, in the order of posting.",
    columns=(
        *_PLACE,
        Column("type", pa.string(), "detection, classification, characterization, ..."),
        Column("position", pa.int32(), "Place among the lines of the type", minimum=0),
        Column("round", pa.int32(), "Round it was posted for"),
        Column("instance_id", pa.string(), "Instance"),
        Column(
            "numbers",
            pa.list_(pa.float64()),
            "Numbers of the line: P(world changed), or a probability per class; null for text",
            nullable=True,
        ),
        Column("text", pa.string(), "Cells of a line that is not all numbers", nullable=True),
    ),
    key=("session_id", "test_id", "type", "position"),
    version=2,
)

FEEDBACK = Table(
    name="feedback",
    description="Every answered request for feedback.",
    columns=(
        *_PLACE,
        Column("number", pa.int32(), "Place among the requests of this test", minimum=0),
        Column("round", pa.int32(), "Round it was charged to"),
        Column("type", pa.string(), "Type of feedback"),
        Column("ids", pa.int32(), "Ids answered", minimum=0),
    ),
    key=("session_id", "test_id", "number"),
    version=2,
)

SESSION_MEASURES = Table(
    name="session_measures",
    description="Measures of each completed test, as the public evaluation has them and corrected.",
    columns=(
        *_PLACE,
        Column(
            "form",
            pa.string(),
            "`upstream` keeps the public code's faults, `corrected` does not",
            allowed=("upstream", "corrected"),
        ),
        Column("metric", pa.string(), "Group of measures, such as m_num_stats"),
        Column("name", pa.string(), "Measure, such as P_indx_0.5"),
        Column("value", pa.float64(), "Its value; null where there is none", nullable=True),
    ),
    key=("session_id", "test_id", "form", "metric", "name"),
)

INSTANCES = Table(
    name="instances",
    description="The truth of each instance of an ended session's tests, for operators: what an "
    "anonymous id stands for.",
    columns=(
        *_PLACE,
        Column("instance_id", pa.string(), "Instance as it was served"),
        Column("position", pa.int32(), "Row of the test, from 0", minimum=0),
        Column("sample_id", pa.string(), "Sample it was made of, where known", nullable=True),
        Column("view", pa.string(), "View that it is shown in, where known", nullable=True),
        Column("class", pa.string(), "Class"),
        Column("novel", pa.bool_(), "Whether its class is novel"),
        Column("changed", pa.bool_(), "Whether the world has changed by then"),
    ),
    key=("session_id", "test_id", "position"),
    version=2,
)

CHARACTERIZATION = Table(
    name="characterization",
    description="How well discovered clusters are the novel classes of a CONDDA test.",
    columns=(
        *_PLACE,
        Column("part", pa.string(), "All rows or those after novelty", allowed=("all", "post")),
        Column("metric", pa.string(), "nmi, ari, purity, discovery_accuracy, ..."),
        Column("novel_class", pa.string(), "Novel class the value is about; empty if about all"),
        Column("value", pa.float64(), "Its value; null where there is none", nullable=True),
    ),
    key=("session_id", "test_id", "part", "metric", "novel_class"),
)

PROGRAM = Table(
    name="program",
    description="Program metrics M1 to M6 of each agent over all its completed tests.",
    columns=(
        Column("owner", pa.string(), "Owner of its sessions, as in `sessions`"),
        Column("agent", pa.string(), "Agent"),
        Column("protocol", pa.string(), "Protocol"),
        Column("domain", pa.string(), "Domain"),
        Column(
            "metric", pa.string(), "M1, M2, M2.1, no_cdt, false_alarms, nuisance_alarms, M3 to M6"
        ),
        Column("value", pa.float64(), "Its value; null if not applicable", nullable=True),
        Column("tests", pa.int32(), "Completed tests, each counted once", minimum=0),
    ),
    key=("owner", "agent", "protocol", "domain", "metric"),
    version=3,
)

TABLES = (
    *(TESTS, SESSIONS, ROUNDS, RESULTS, FEEDBACK, INSTANCES),
    *(SESSION_MEASURES, CHARACTERIZATION, PROGRAM),
)


class TestSettings(Settings):
    """How tests are made."""

    __test__: ClassVar[bool] = False  # not a test class, whatever pytest thinks of its name

    kind: Literal["CONDDA", "OND"] = "CONDDA"
    """Protocol that the tests are for."""
    scenario: tuple[str, ...] = Field(("sudden",), min_length=1)
    """Shapes that the changes of the tests have, by name, or all."""
    tests: int = Field(12, ge=1, le=10_000)
    """How many, dealt evenly to the scenarios."""
    unchanged: float = Field(0.25, ge=0, le=1)
    """Share of the tests in which nothing changes (scenario none)."""
    rows: int | None = Field(None, ge=2)
    """Instances of a test (default: 320, or as many as there are samples for)."""
    round_size: int | None = Field(None, ge=1)
    """Instances of a round; the last one may be shorter (default: a tenth of the rows)."""
    earliest_change: float = Field(0.2, gt=0, lt=1)
    """Least share of the rows before the world changes; each test draws its own."""
    latest_change: float = Field(0.5, gt=0, lt=1)
    """Greatest share of them."""
    novelty_mix: float | None = Field(None, gt=0, le=1)
    """Share of novel samples in the rows after the change (default: drawn, 0.3 to 0.7)."""
    novel_classes: int | None = Field(None, ge=1)
    """Novel classes in a test, of those with enough samples (default: drawn, 1 to 5)."""
    feedback_max_ids: int = Field(10, ge=0)
    """Instances a round that an agent may ask the label of (OND)."""
    splits: tuple[str, ...] = ()
    """Splits that samples are drawn from (default: test, and of novel classes all)."""
    anonymous: bool = True
    """Serve names that say nothing instead of samples' ids, which may tell the class."""
    media: bool = False
    """Also write pictures or clouds by instance id, which the server hands out signed."""
    group: int = Field(1, ge=0)
    """Second part of a test's id, PROTOCOL.group.number.tag."""
    seed: int | None = Field(None, ge=0)
    """Decides which samples are in which test, and where (default: drawn, and kept beside the
    tests, for operators only)."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "TestSettings":
        if self.latest_change < self.earliest_change:
            raise ValueError("latest_change is smaller than earliest_change")
        if self.media and not self.anonymous:
            raise ValueError("media go with anonymous ids only")
        return self

    def change_rows(self, rows: int) -> tuple[int, int]:
        """Earliest and latest row of the change, counted from 0."""
        first, last = (
            min(max(round(rows * share), 1), rows - 1)
            for share in (self.earliest_change, self.latest_change)
        )
        return first, last


class SessionSettings(Settings):
    """How agents are led through the tests."""

    red_light: Literal["without", "with", "both"] = "both"
    """Whether agents are told when the world changes."""
    detection_threshold: float = Field(0.5, ge=0, le=1)
    """P(world changed) above it declares novelty."""
    baseline: str = "threshold"
    """Agent whose accuracy the others' is measured against in M3 to M6."""
    url: str | None = None
    """Server to run against (default: the protocol in this process)."""
    name: str = ""
    """Another name runs everything once more, such as on a server that was emptied."""
    token: str | None = Field(None, exclude=True)
    """Its token, if it wants one."""


MODALITIES = ()
"""Its models are those of the benchmarks that its tests are made of."""


class Config(RunChoices):
    """CONDDA and OND: when did the world change, and into what? Agents run over streams."""

    tests: Path
    """Folder of PROTOCOL/domain/ test files, with features/<test>.npz for the agents."""
    lake: Path | None = None
    """Lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)."""
    predictors: Choice = Field({"threshold": {}, "clustering": {}})
    """Predictors that agents are made of, or all; `--predictors.<name>.agent.<setting>` is an
    agent's."""
    protocols: tuple[str, ...] = ()
    """Tests to run, such as OND, OND/novelty or OND/novelty/OND.1.0.0 (default: all)."""
    run: SessionSettings = SessionSettings()
    state: Path | None = None
    """State folder of `novelty condda serve`: its sessions are exported too; alone if no agents,
    scores or seeds are named."""
    max_reject_share: float = Field(0.5, ge=0, le=1)
    """Share of tests that may go to quarantine before the build stops."""

    @model_validator(mode="before")
    @classmethod
    def _exports_alone(cls, values: Any) -> Any:
        """A build that names a state and nothing to run exports its sessions alone."""
        runs = {"models", "networks", "scores", "predictors", "preset", "seeds", "train", "run"}
        if values.get("state") is None or runs & values.keys():
            return values
        return {**values, "predictors": {}, "scores": {}}

    @classmethod
    def demo(cls, sample: Path) -> "Config":
        """The configuration of `make demo`."""
        return cls(
            tests=sample,
            scores={name: {} for name in ("mahalanobis", "knn", "cosine")},
            run=SessionSettings(red_light="without"),
            seeds=(0, 1, 2),
        )
