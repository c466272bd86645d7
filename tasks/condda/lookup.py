"""What a command looks up: the rules it is decided by, its test, that test's metadata and rounds.

Metadata as a session sees it is the test's file with what the operator fixed when the session was
opened, or the session's hints of the form "key=number" (docs/condda.md, rule 4), put over it: made
anew each time, so that no session changes another's. Round r is rows [r*size, (r+1)*size), the last
may be short (rule 5); a served dataset has one line per instance and no header (rule 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import SourceError
from tasks.condda.domains import SHOWN_METADATA
from tasks.condda.rules import Limits, Policy, ProtocolRefusal, refused
from tasks.condda.session import SessionState, TestState
from tasks.condda.test_files import TestFile, TestLibrary


@dataclass(frozen=True)
class Rules:
    library: TestLibrary
    policy: Policy
    strict: bool
    now: str
    limits: Limits


def check_text(value: object, name: str) -> str:
    """A text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise refused("InvalidParams", f"{name} must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused("InvalidParams", f"{name} holds half a surrogate pair") from error
    return value


def check_texts(values: object, name: str) -> tuple[str, ...]:
    """A list of such texts."""
    if not isinstance(values, list | tuple):
        raise refused("InvalidParams", f"{name} must be a list")
    return tuple(check_text(value, name) for value in values)


def whole_round(number: Any) -> int:
    """A round's number, which comes as text from a query."""
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused("ValueError", f"round_id {str(number)[:80]!r} is no whole number") from error


def unknown_test(test: str) -> ProtocolRefusal:
    return refused("test_id_invalid", f"there is no test {test[:80]!r} to serve")


def open_test(state: SessionState, test: str) -> TestState:
    progress = state.test(test)
    if progress.completed:
        raise refused("TestCompleted", f"test {test} is completed in this session")
    return progress


def overrides(hints: Sequence[str]) -> dict[str, int]:
    """Metadata that hints of the form "key=number" replace, for keys that an agent may see."""
    replaced = {}
    for hint in hints:
        key, equals, number = hint.partition("=")
        if equals and key in SHOWN_METADATA:
            try:
                replaced[key] = int(number)
            except ValueError as error:
                raise refused(
                    "ValueError", f"hint {hint!r} is not of the form key=whole number"
                ) from error
    return replaced


def find_test(
    state: SessionState, test: str, library: TestLibrary, *, truth_first: bool = True
) -> TestFile:
    """A test that must have ground truth and metadata, and that must be readable.

    As published some calls look for the truth first, others for the metadata.
    """
    try:
        return library.load(test, state.protocol, state.domain)
    except SourceError as error:
        place = (test, state.protocol, state.domain)
        has_truth, has_metadata = library.has_truth(*place), library.has_metadata(*place)
        if has_truth and has_metadata:
            raise refused("SourceError", str(error)) from error
    if has_truth or not (truth_first or has_metadata):
        raise refused("metadata_not_found", f"test {test} has no metadata")
    raise unknown_test(test)


def load_test(
    state: SessionState, test: str, rules: Rules, *, truth_first: bool = True
) -> tuple[TestFile, dict[str, Any]]:
    """A test, and its metadata as the session sees it."""
    file = find_test(state, test, rules.library, truth_first=truth_first)
    return file, {**file.metadata, **overrides(state.hints), **state.fixed}


def lenient_metadata(state: SessionState, test: TestFile) -> dict[str, Any]:
    """Metadata for taking results in: a bad hint or round size must not refuse them."""
    metadata = dict(test.metadata)
    try:
        metadata.update(overrides(state.hints) | dict(state.fixed))
        metadata["round_size"] = round_size(metadata, test.test_id)
    except ProtocolRefusal:
        metadata.pop("round_size", None)
    return metadata


def round_size(metadata: Mapping[str, Any], test: str) -> int:
    size = whole(metadata, "round_size") if "round_size" in metadata else 0
    if size < 1:
        raise refused("no_defined_rounds", f"test {test} has no round_size of at least 1")
    return size


def known_classes(metadata: Mapping[str, Any]) -> int | None:
    """K of a test; newer files call it nonnovel_classes, older ones have numbers as text."""
    for key in ("known_classes", "nonnovel_classes"):
        if key in metadata:
            return whole(metadata, key)
    return None


def whole(metadata: Mapping[str, Any], key: str) -> int:
    """A whole number of the metadata, which may be written as text."""
    try:
        return int(metadata[key])
    except (TypeError, ValueError) as error:
        raise refused(
            "ValueError", f"{key} of the metadata is {metadata[key]!r}, not a whole number"
        ) from error


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
