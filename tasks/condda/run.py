"""The run loop: an agent through the tests of a session, by the life cycle of CONDDA rule 1.

In: a harness (in process, or a client of a server with the same keyword calls), an agent and its
features. Out: results posted to the harness, and what was done (`SessionRun`). Per round detection,
then characterization (CONDDA) or classification and feedback (OND), each file its own post; a test
ends at the refusal 204.

Resuming: with a journal, a folder with one file a test, the agent is saved after each round (its
predictor by its own `state`), so a killed run goes on with the round after; labels told are in the
file before they are learned. Without one, rounds that are posted are led past the agent again,
without posts, which labels told do not allow: they cannot be asked for twice. The last posted round
is posted again, because an interruption may have come between its files (the same file twice is
kept once). Where the harness begins a started test anew (as published, rule 7), so does the run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from schemas.errors import SourceError
from storage.layout import file_slug
from tasks.condda.agent import Agent, FeatureLookup, TestInfo
from tasks.condda.commands import Calls, ProtocolRefusal
from tasks.condda.domains import RED_LIGHT, Domain, domain_named
from tasks.condda.session import known_classes, whole
from tasks.condda.test_files import CELL_EDGES
from tasks.engine.progress import progress

LOOP_VERSION = 3
"""Raise it when the same agent posts other results to the same test."""
# Decimals of a posted value: what another machine's arithmetic changes lies beyond.
DECIMALS = 9


@dataclass(frozen=True)
class TestRun:
    """What was done in one test."""

    __test__ = False

    test_id: str
    rounds: int
    rows: int
    replayed: int
    """Rounds that an earlier run had posted."""
    detected_row: int | None
    """First row with P(world changed) above the threshold of the session."""
    told: int
    """Labels that the agent was told."""


@dataclass(frozen=True)
class SessionRun:
    """A session that was run to its end; `tests` are those that were not finished before."""

    session_id: str
    tests: tuple[TestRun, ...]


def run_session(
    harness: Calls,
    tests: Sequence[str],
    agent: Agent,
    features: FeatureLookup,
    *,
    protocol: str,
    domain: str = "novelty",
    red_light: bool = False,
    detection_threshold: float = 0.5,
    resume: str | None = None,
    journal: Path | None = None,
    opened: Callable[[str], None] = lambda session: None,
) -> SessionRun:
    """Run `tests` in a new session, or what is left of them in the session `resume`.

    `opened` is told the session's id before the first test: who resumes needs it. A session that
    has ended is taken as it is: the run was killed before it could use what the session holds.
    """
    session = resume or harness.session_request(
        test_ids=list(tests),
        protocol=protocol,
        domain=domain,
        novelty_detector_version=agent.detector,
        hints=[RED_LIGHT] if red_light else [],
        detection_threshold=detection_threshold,
    )
    opened(session)
    finished = set() if resume is None else _finished(harness, session)
    if finished is None:
        return SessionRun(session, ())
    left = [test for test in tests if test not in finished]
    done = []
    with progress(f"{agent.name} {protocol}", len(left)) as advance:
        for test in left:
            done.append(
                run_test(
                    *(harness, session, test, agent, features),
                    protocol=protocol,
                    domain=domain,
                    detection_threshold=detection_threshold,
                    resume=resume is not None,
                    journal=journal,
                )
            )
            advance(1)
    harness.terminate_session(session_id=session)
    return SessionRun(session, tuple(done))


def run_test(
    harness: Calls,
    session_id: str,
    test_id: str,
    agent: Agent,
    features: FeatureLookup,
    *,
    protocol: str,
    domain: str = "novelty",
    detection_threshold: float = 0.5,
    resume: bool = False,
    journal: Path | None = None,
) -> TestRun:
    """Run one test to its completion; with `resume`, from where an earlier run left it."""
    file = journal and journal / f"{file_slug(f'{session_id}.{test_id}')}.safetensors"
    test = _Test(harness, session_id, test_id, domain_named(domain), file)
    info = test.info(protocol)
    agent.start(info)
    first_open = number = 0
    if resume and file is not None and file.exists():
        following = test.following()
        number, first_open = agent.load(file, features), max(following - 1, 0)
        if number > following:
            # The harness has begun anew since.
            agent.start(info)
            first_open = number = 0
    resumed = number
    while (ids := test.round(number)) is not None:
        if resume and number == 0:
            # Asked after round 0 was served: a harness that begins anew has done so by then.
            first_open = max(test.following() - 1, 0)
        vectors = features.of(ids)
        results = {"detection": agent.detect(vectors, ids)[:, None]}
        if protocol == "CONDDA":
            results["characterization"] = test.placed(agent.characterize(vectors, ids))
        else:
            results["classification"] = test.placed(agent.classify(vectors, ids))
        if number >= first_open:
            for kind, values in results.items():
                test.post(number, kind, ids, values)
        if protocol == "OND" and (wanted := agent.wanted(vectors, ids)):
            if number < first_open:
                raise test.lost(number)
            agent.learn(test.told(number, wanted, agent.known))
        number += 1
        if file is not None:
            agent.save(file, number)
    if protocol == "OND" and agent.ids:
        clusters = agent.characterize_test()
        if clusters is not None:
            test.post(0, "characterization", agent.ids, clusters)
    harness.complete_test(session_id=session_id, test_id=test_id)
    above = agent.chances > detection_threshold
    detected_row = int(above.argmax()) if above.any() else None
    replayed = max(first_open, resumed)
    return TestRun(test_id, number, len(agent.ids), replayed, detected_row, len(agent.told))


def _finished(harness: Calls, session: str) -> set[str] | None:
    """Tests that are complete; None if the session itself has ended."""
    try:
        return set(harness.resume_session(session_id=session))
    except ProtocolRefusal as refusal:
        if refusal.reason == "SessionEnded":
            return None
        # As published, a session without a finished test has no list of them.
        if (refusal.status, refusal.reason, refusal.message) == (500, "KeyError", "'tests'"):
            return set()
        raise


@dataclass(frozen=True)
class _Test:
    """The calls of one test, as the loop makes them."""

    harness: Calls
    session: str
    test: str
    rules: Domain
    journal: Path | None
    """The file that the agent is saved in."""

    @property
    def names(self) -> dict[str, str]:
        return {"session_id": self.session, "test_id": self.test}

    def info(self, protocol: str) -> TestInfo:
        """What the agent is told of the test."""
        metadata = self.harness.get_test_metadata(**self.names)

        def number(key: str) -> int | None:
            return whole(metadata, key) if key in metadata else None

        red_light = metadata.get(RED_LIGHT)
        known = known_classes(metadata)
        return TestInfo(
            test_id=self.test,
            protocol=protocol,
            known_classes=known - 1 if known and self.rules.unknown_counted else known,
            max_novel_classes=number("max_novel_classes"),
            round_size=number("round_size"),
            feedback_max_ids=number("feedback_max_ids") or 0,
            red_light=None if red_light is None else str(red_light).strip(CELL_EDGES),
        )

    def round(self, number: int) -> list[str] | None:
        """Instance ids of a round; None after the last."""
        try:
            body = self.harness.dataset_request(**self.names, round_id=number)
        except ProtocolRefusal as refusal:
            if refusal.status == 204:
                return None
            raise
        lines = body.decode(self.rules.encoding).splitlines()
        if self.rules.served != ("instance_id",):
            lines = [row[0] for row in csv.reader(lines, quotechar=self.rules.quotechar) if row]
        return [name for line in lines if (name := line.strip(CELL_EDGES))]

    def following(self) -> int:
        """The round after the last that has results, one of which may lack a file."""
        where = self.harness.resume_test(**self.names)
        return where["rounds"] if where["next_round"] is None else where["next_round"]

    def placed(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors with the unknown column where the domain has it."""
        return vectors if self.rules.unknown == "first" else np.roll(vectors, -1, axis=1)

    def post(self, number: int, kind: str, ids: Sequence[str], values: np.ndarray) -> None:
        table = pl.DataFrame(np.round(np.clip(values, 0.0, 1.0), DECIMALS))
        table.insert_column(0, pl.Series("instance_id", ids, dtype=pl.String))
        body = table.write_csv(include_header=False, quote_style="never").encode()
        self.harness.post_results(result_files={kind: body}, **self.names, round_id=number)

    def told(self, number: int, ids: Sequence[str], known: int) -> dict[str, int]:
        """Labels of these instances of a round: the place of a known class, or -1, -2, ..."""
        types = self.rules.feedback.items()
        of_labels = [name for name, kind in types if kind.columns == (self.rules.label,)]
        if not of_labels:
            raise SourceError(
                f"domain {self.rules.name} tells no labels; run an agent that asks for none"
            )
        try:
            body = self.harness.get_feedback_request(
                feedback_ids=list(ids), feedback_type=of_labels[0], **self.names, round_id=number
            )
        except ProtocolRefusal as refusal:
            if refusal.reason == "FeedbackBudgetExceeded":
                raise self.lost(number) from refusal
            raise
        rows = [line.split(",") for line in body.decode().splitlines() if line]
        # None: novelty is not declared. Some: the budget was drawn on by a run before this one.
        if 0 < len(rows) < len(ids):
            raise self.lost(number)
        told = {}
        for name, text in rows:
            label = int(text)
            place = label - self.rules.first_label
            told[name] = min(label, -1) if place < 0 else place if place < known else -1
        return told

    def lost(self, number: int) -> SourceError:
        """Labels were told to a run that did not keep them."""
        file = self.journal
        kept = "no journal was named" if file is None else f"{file} does not have them"
        return SourceError(
            f"labels of round {number} of test {self.test} were told to an earlier run and "
            f"{kept}; name the journal of that run, or begin a new session"
        )
