"""Names that were meant: what a message adds where a name is unknown."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the names, or nothing where none is near."""
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""
