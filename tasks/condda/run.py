"""The run loop: an agent through the tests of a session, by the life cycle of CONDDA rule 1.

In: a harness (in process, or a client of a server with the same keyword calls), an agent and its
features. Out: results posted to the harness, and what was done (`SessionRun`). Per round detection,
then characterization (CONDDA) or classification and feedback (OND), each file its own post; a test
ends at the refusal 204.

Resuming: rounds that are posted are led past the agent again, without posts, so it is in the state
it had; the last one is posted again, because an interruption may have come between its files (the
same file twice is kept once). Where the harness begins a started test anew (mode compat, rule
7), so does the run. Labels told cannot be asked for twice, so an OND run that is to be resumable
keeps them in a journal, a folder with one file a test.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from schemas.errors import SourceError
from storage.atomic import explained
from storage.layout import file_slug
from tasks.condda.agents.base import Agent, FeatureLookup, TestInfo
from tasks.condda.domains import RED_LIGHT, Domain, domain_named
from tasks.condda.lookup import known_classes, whole
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.test_files import CELL_EDGES
from tasks.engine.progress import progress

LOOP_VERSION = 1
"""Raise it when the same agent posts other results to the same test."""
# Decimals of a posted value: what another machine's arithmetic changes lies beyond.
DECIMALS = 9


class HarnessCalls(Protocol):
    """The calls that the loop makes; `harness.Harness` has them."""

    def session_request(
        self,
        *,
        test_ids: Sequence[str],
        protocol: str,
        domain: str,
        novelty_detector_version: str,
        hints: Sequence[str] = (),
        detection_threshold: float = 0.5,
    ) -> str: ...

    def resume_session(self, *, session_id: str) -> list[str]: ...

    def resume_test(self, *, session_id: str, test_id: str) -> dict[str, Any]: ...

    def get_test_metadata(self, *, session_id: str, test_id: str) -> dict[str, Any]: ...

    def dataset_request(self, *, test_id: str, round_id: int | str, session_id: str) -> bytes: ...

    def post_results(
        self,
        *,
        result_files: Mapping[str, bytes],
        test_id: str,
        round_id: int | str,
        session_id: str,
    ) -> None: ...

    def get_feedback_request(
        self,
        *,
        feedback_ids: Sequence[str] | None,
        feedback_type: str,
        test_id: str,
        session_id: str,
        round_id: int | str | None = None,
    ) -> bytes: ...

    def complete_test(self, *, session_id: str, test_id: str) -> None: ...

    def terminate_session(self, *, session_id: str) -> None: ...


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
    harness: HarnessCalls,
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
    if resume is None:
        session = harness.session_request(
            test_ids=list(tests),
            protocol=protocol,
            domain=domain,
            novelty_detector_version=agent.detector,
            hints=[RED_LIGHT] if red_light else [],
            detection_threshold=detection_threshold,
        )
    else:
        session = resume
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
                    harness,
                    session,
                    test,
                    agent,
                    features,
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
    harness: HarnessCalls,
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
    rules = domain_named(domain)
    metadata = harness.get_test_metadata(session_id=session_id, test_id=test_id)
    info = _info(test_id, protocol, metadata, rules)
    agent.start(info)
    file = None if journal is None else journal / f"{file_slug(f'{session_id}.{test_id}')}.jsonl"
    told = _Told(harness, session_id, info, rules, agent.known, file)
    seen: list[str] = []
    chances: list[np.ndarray] = []
    first_open = number = 0
    while (ids := _round(harness, session_id, test_id, number, rules)) is not None:
        if resume and number == 0:
            # Asked after round 0 was served: a harness that begins anew has done so by then.
            first_open = _first_open(harness.resume_test(session_id=session_id, test_id=test_id))
            told.load()
        vectors = features.of(ids)
        chances.append(agent.detect(vectors, ids))
        results = {"detection": chances[-1][:, None]}
        if protocol == "CONDDA":
            results["characterization"] = _placed(agent.characterize(vectors, ids), rules)
        else:
            results["classification"] = _placed(agent.classify(vectors, ids), rules)
        if number >= first_open:
            for kind, values in results.items():
                _post(harness, session_id, test_id, number, kind, ids, values)
        if protocol == "OND" and (wanted := agent.wanted(ids)[: info.feedback_max_ids]):
            agent.learn(told.about(wanted, number, asked_before=number < first_open))
        seen += ids
        number += 1
    if protocol == "OND" and seen:
        clusters = agent.characterize_test(features.of(seen), seen)
        if clusters is not None:
            _post(harness, session_id, test_id, 0, "characterization", seen, clusters)
    harness.complete_test(session_id=session_id, test_id=test_id)
    above = np.concatenate([np.empty(0), *chances]) > detection_threshold
    return TestRun(
        test_id=test_id,
        rounds=number,
        rows=len(seen),
        replayed=first_open,
        detected_row=int(above.argmax()) if above.any() else None,
        told=told.count,
    )


def _finished(harness: HarnessCalls, session: str) -> set[str] | None:
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


def _info(test_id: str, protocol: str, metadata: Mapping[str, Any], rules: Domain) -> TestInfo:
    def number(key: str) -> int | None:
        return whole(metadata, key) if key in metadata else None

    red_light = metadata.get(RED_LIGHT)
    known = known_classes(metadata)
    return TestInfo(
        test_id=test_id,
        protocol=protocol,
        known_classes=known - 1 if known and rules.unknown_counted else known,
        max_novel_classes=number("max_novel_classes"),
        round_size=number("round_size"),
        feedback_max_ids=number("feedback_max_ids") or 0,
        red_light=None if red_light is None else str(red_light).strip(CELL_EDGES),
    )


def _round(
    harness: HarnessCalls, session: str, test: str, number: int, rules: Domain
) -> list[str] | None:
    """Instance ids of a round; None after the last."""
    try:
        body = harness.dataset_request(test_id=test, round_id=number, session_id=session)
    except ProtocolRefusal as refusal:
        if refusal.status == 204:
            return None
        raise
    lines = body.decode(rules.encoding).splitlines()
    if rules.served != ("instance_id",):
        lines = [row[0] for row in csv.reader(lines, quotechar=rules.quotechar) if row]
    return [name for line in lines if (name := line.strip(CELL_EDGES))]


def _first_open(where: Mapping[str, Any]) -> int:
    """The first round to post: the last one that has results, which may lack a file."""
    following = where["rounds"] if where["next_round"] is None else where["next_round"]
    return max(following - 1, 0)


def _placed(vectors: np.ndarray, rules: Domain) -> np.ndarray:
    """Vectors with the unknown column where the domain has it."""
    return vectors if rules.unknown == "first" else np.roll(vectors, -1, axis=1)


def _post(
    harness: HarnessCalls,
    session: str,
    test: str,
    number: int,
    kind: str,
    ids: Sequence[str],
    values: np.ndarray,
) -> None:
    table = pl.DataFrame(np.round(np.clip(values, 0.0, 1.0), DECIMALS))
    table.insert_column(0, pl.Series("instance_id", ids, dtype=pl.String))
    body = table.write_csv(include_header=False, quote_style="never").encode()
    harness.post_results(
        result_files={kind: body}, test_id=test, round_id=number, session_id=session
    )


class _Told:
    """Labels told in one test, asked for once and kept in the journal."""

    def __init__(
        self,
        harness: HarnessCalls,
        session: str,
        test: TestInfo,
        rules: Domain,
        known: int,
        file: Path | None,
    ) -> None:
        self.harness, self.session, self.test, self.rules = harness, session, test, rules
        self.known, self.file = known, file
        self.before: dict[int, dict[str, int]] = {}
        self.count = 0

    def load(self) -> None:
        """Take over what an earlier run was told; a line that was cut off is removed."""
        if self.file is None or not self.file.exists():
            return
        with explained(self.file), self.file.open("r+b") as file:
            *lines, rest = file.read().split(b"\n")
            if rest:
                file.truncate(file.tell() - len(rest))
        for line in lines:
            entry = json.loads(line)
            self.before[entry["round"]] = entry["told"]

    def about(self, ids: Sequence[str], number: int, *, asked_before: bool) -> dict[str, int]:
        """Labels of these instances of a round: the place of a known class, or -1, -2, ..."""
        if number not in self.before:
            if asked_before:
                raise self._lost(number)
            self._keep(number, self._ask(ids, number))
        told = self.before[number]
        self.count += len(told)
        return told

    def _ask(self, ids: Sequence[str], number: int) -> dict[str, int]:
        try:
            body = self.harness.get_feedback_request(
                feedback_ids=list(ids),
                feedback_type=_label_feedback(self.rules),
                test_id=self.test.test_id,
                session_id=self.session,
                round_id=number,
            )
        except ProtocolRefusal as refusal:
            if refusal.reason == "FeedbackBudgetExceeded":
                raise self._lost(number) from refusal
            raise
        rows = [line.split(",") for line in body.decode().splitlines() if line]
        # None: novelty is not declared. Some: the budget was drawn on by a run before this one.
        if 0 < len(rows) < len(ids):
            raise self._lost(number)
        return {name: self._place(int(label)) for name, label in rows}

    def _place(self, label: int) -> int:
        """A label of the domain as a place among the known classes, or a negative novel class."""
        place = label - 1 if self.rules.unknown == "first" else label
        if place < 0:
            return min(label, -1)
        return place if place < self.known else -1

    def _keep(self, number: int, told: dict[str, int]) -> None:
        self.before[number] = told
        if self.file is None:
            return
        with explained(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps({"round": number, "told": told}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _lost(self, number: int) -> SourceError:
        kept = "no journal was named" if self.file is None else f"{self.file} does not have them"
        return SourceError(
            f"labels of round {number} of test {self.test.test_id} were told to an earlier run and "
            f"{kept}; name the journal of that run, or begin a new session"
        )


def _label_feedback(rules: Domain) -> str:
    """The feedback type of a domain that tells an instance's class."""
    found = [name for name, kind in rules.feedback.items() if kind.columns == (rules.label,)]
    if not found:
        raise SourceError(f"domain {rules.name} tells no labels; run an agent that asks for none")
    return found[0]
