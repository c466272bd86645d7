"""Taking results (docs/condda.md, rules 3 and 10): a post of one or several types becomes events.

All files of a post are taken or none. The same file again, for the same round and type, is a
repeated request and makes no event.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from tasks.condda.commands import Decision, Post
from tasks.condda.domains import DOMAINS
from tasks.condda.lookup import (
    Rules,
    lenient_metadata,
    load_test,
    open_test,
    read_test,
    round_size,
    unknown_test,
)
from tasks.condda.posts import ResultFile, check_name, check_strict, parse, remember
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.serving import round_count, round_rows
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestFile


def take_results(state: SessionState, command: Post, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    if not command.results:
        raise ProtocolRefusal(400, "MissingParamsError", "no result file was given")
    known = rules.library.has_truth(command.test, state.protocol, state.domain)
    if not known and rules.strict:
        raise unknown_test(command.test)
    before = progress.posted.get(command.round, {})
    events = []
    for kind, body in command.results.items():
        check_name(kind, "result type", rules.limits)
        sha256 = hashlib.sha256(body).hexdigest()
        if sha256 in before.get(kind, ()):
            continue
        if kind in before and (rules.strict or kind == "detection"):
            raise ProtocolRefusal(
                400,
                "DetectionRepost" if kind == "detection" else "ResultRepost",
                f"{kind} of round {command.round} was posted before with other content",
            )
        result = parse(body, rules.limits)
        facts = _facts(state, command, kind, result, progress, known, rules)
        events.append(
            Event(
                *("posted", rules.now, command.test, progress.attempt, command.round, kind),
                sha256=sha256,
                detail=facts,
                body=body,
            )
        )
    return Decision(tuple(events))


def _facts(
    state: SessionState,
    command: Post,
    kind: str,
    result: ResultFile,
    progress: TestState,
    known: bool,
    rules: Rules,
) -> dict[str, Any]:
    values = DOMAINS[state.domain].results.get(kind)
    test: TestFile | None = None
    metadata: Mapping[str, Any] = {}
    if known and rules.strict:
        test, metadata = load_test(state, command.test, rules)
        if values is None:
            raise ProtocolRefusal(
                400, "UnknownResultType", f"{kind} is no result type of {state.domain}"
            )
        expected = _expected_names(state, command, kind, progress, test, metadata)
        check_strict(
            kind,
            values,
            result,
            expected,
            state.protocol,
            metadata,
            progress.columns.get(kind),
            DOMAINS[state.domain].unknown_counted,
        )
    elif known and rules.library.has_metadata(command.test, state.protocol, state.domain):
        test = read_test(state, command.test, rules)
        metadata = lenient_metadata(state, test)
    facts = remember(result, values, test, None if test is None else test.red_light)
    size = metadata.get("round_size", 0)
    facts["round_size"] = size if isinstance(size, int) and size > 0 else 0
    return facts


def _expected_names(
    state: SessionState,
    command: Post,
    kind: str,
    progress: TestState,
    test: TestFile,
    metadata: Mapping[str, Any],
) -> tuple[str, ...]:
    """Names that a strict post must hold: those of the round just served.

    OND characterization is posted once, after the last round, as round 0 for the whole test.
    """
    size = round_size(metadata, command.test)
    if state.protocol == "OND" and kind == "characterization":
        if command.round != 0 or len(progress.served) < round_count(test, size):
            raise ProtocolRefusal(
                400,
                "RoundOrder",
                "OND characterization is posted as round 0 when all rounds have been served",
            )
        return test.names
    if command.round not in progress.served:
        raise ProtocolRefusal(
            400, "RoundNotServed", f"ask for the data of round {command.round} before posting"
        )
    if command.round != len(progress.served) - 1:
        raise ProtocolRefusal(
            400, "RoundOrder", f"round {command.round} is over, {len(progress.served) - 1} is open"
        )
    return test.names[round_rows(test, command.round, size)]
