"""The choices of KOWL-718 that are data: the three releases and the label renames, by name.

Label and split rules are fields of `UnifySettings` (schemas/kowl.py), increment options those of
`IncrementSettings` (schemas/increments.py). Spec section 1 and expected/README rule 2.
"""

from typing import NamedTuple

from schemas.kowl import Release


class Rename(NamedTuple):
    """`old` becomes `new` where the chosen label came from `release` (None: from any)."""

    release: str | None
    old: str
    new: str


# `kinetics400_renames` is the authors' table. `football_case` is not in their code: it was fitted
# to their printed totals (718 labels, 409 known instead of 719 and 410).
RENAMES: dict[str, tuple[Rename, ...]] = {
    "kinetics400_renames": (
        Rename("kinetics400", "balloon blowing", "inflating balloons"),
        Rename("kinetics400", "dying hair", "dyeing hair"),
        Rename("kinetics400", "garbage collecting", "person collecting garbage"),
        Rename("kinetics400", "making bed", "making the bed"),
        Rename("kinetics400", "strumming guitar", "playing guitar"),
        Rename("kinetics400", "tying tie", "tying necktie"),
    ),
    "football_case": (
        Rename(
            None,
            "passing american football (not in game)",
            "passing American football (not in game)",
        ),
    ),
}

KINETICS: tuple[Release, ...] = tuple(
    Release(
        name=name,
        order=order,
        files={split: (f"{name}_{split}.csv.gz",) for split in ("train", "validate", "test")},
    )
    for order, name in enumerate(("kinetics400", "kinetics600", "kinetics700_2020"))
)
