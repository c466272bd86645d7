"""Rounds of a test (CONDDA rule 5): round r is rows [r*size, (r+1)*size), the last may be short.

A served dataset has one line per instance and no header; the domain says which columns and which
encoding (docs/condda.md, rule 3).
"""

from tasks.condda.commands import Dataset, Decision
from tasks.condda.lookup import Rules, load_test, open_test, round_size
from tasks.condda.rules import ProtocolRefusal
from tasks.condda.session import Event, SessionState, TestState
from tasks.condda.test_files import TestFile


def round_count(test: TestFile, size: int) -> int:
    """Rounds of `size` rows, the last one maybe short."""
    return -(-len(test.ids) // size)


def round_rows(test: TestFile, number: int, size: int) -> slice:
    """Rows of a round; none for a negative one."""
    return slice(number * size, (number + 1) * size) if number >= 0 else slice(0, 0)


def round_bytes(test: TestFile, number: int, size: int) -> bytes:
    """The dataset of one round; a lone newline where there are no rows, as published."""
    rows = round_rows(test, number, size)
    domain = test.domain
    if domain.served == ("instance_id",):
        return ("\n".join(test.ids[rows]) + "\n").encode(domain.encoding)
    quote = domain.quotechar
    columns = []
    for name in domain.served:
        cells = ["" if cell is None else str(cell) for cell in test.truth[name][rows]]
        if name in domain.served_quoted:
            cells = [quote + cell.replace(quote, quote * 2) + quote for cell in cells]
        columns.append(cells)
    lines = [",".join(cells) for cells in zip(*columns, strict=True)]
    return ("\n".join(lines) + "\n").encode(domain.encoding)


def serve(state: SessionState, command: Dataset, rules: Rules) -> Decision:
    progress = open_test(state, command.test)
    test, metadata = load_test(state, command.test, rules)
    size = round_size(metadata, command.test)
    if rules.strict:
        _check_round_order(command, progress, round_count(test, size))
    events: list[Event] = []
    attempt = progress.attempt
    served = progress.served
    # Nothing is lost when only round 0 was served: then this is a repeated request.
    if not rules.strict and command.round == 0 and (progress.posted or served - {0}):
        attempt, served = attempt + 1, set()
        events.append(Event("restarted", rules.now, command.test, attempt))
    if command.round * size >= len(test.ids):
        raise ProtocolRefusal(
            204, "EndOfDataset", f"test {command.test} has no round {command.round}"
        )
    if command.round >= 0 and command.round not in served:
        events.append(Event("served", rules.now, command.test, attempt, command.round))
    return Decision(tuple(events), round_bytes(test, command.round, size))


def _check_round_order(command: Dataset, progress: TestState, rounds: int) -> None:
    following = len(progress.served)
    if command.round in progress.served or (command.round >= rounds == following):
        return
    if command.round != following:
        raise ProtocolRefusal(
            400, "RoundOrder", f"round {command.round} was asked for, round {following} is next"
        )
    if following and following - 1 not in progress.posted:
        raise ProtocolRefusal(
            400, "RoundOrder", f"post results of round {following - 1} before the next round"
        )
