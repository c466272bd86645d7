"""Names that were meant: what a message adds where a name is unknown."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the names, or nothing where none is near.

    The dashes before options are not counted, so `--check` is not near `--help`.
    """
    by_plain = {known.lower().lstrip("-"): known for known in names}
    near = difflib.get_close_matches(name.lower().lstrip("-"), by_plain, n=1)
    return f"; did you mean {by_plain[near[0]]}?" if near else ""
