"""Shapes of tests as data: which classes come, when they leave, and what is no novelty at all.

In: a scenario, the rows of a test and draws. Out: a `Layout`, which says for each row whether it is
of a known class, of which novel one, and whether it is shown in another view. Nothing here knows
samples; `make_tests` fills a layout with them.

A test begins with known classes alone. At a drawn row it changes: from there on a share of the rows
is what the scenario says. The world has changed (the red light) from the first row on at which a
novel class may come; another view is no such change.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from schemas.condda import TestSettings
from schemas.errors import ConfigError

Share = tuple[float, float]
"""Least and greatest share of the rows after the change, of which a test draws one."""
WHOLE: tuple[tuple[Share, Share], ...] = (((0, 0), (1, 1)),)
MIXES: Share = (0.3, 0.7)
MOST_CLASSES = 5
# Where classes come apart, one comes this much of its part of the rows late at most.
LATE = 0.5


@dataclass(frozen=True)
class Scenario:
    """How the world of a test changes."""

    name: str
    about: str
    present: tuple[tuple[Share, Share], ...] = WHOLE
    """From when to when a novel class is there, each time drawn; empty: there is none."""
    least_classes: int = 1
    apart: bool = False
    """Whether classes come one after the other, not at once."""
    growing: bool = False
    """Whether novel rows are rare at first and grow more frequent."""
    distance: Literal["any", "near", "far"] = "any"
    """Which half of the novel classes, by their distance to the known ones."""
    disturbed: bool = False
    """Whether a share of the known rows is shown in another view, which is no novelty."""

    def of_one_class(self, rows: int, classes: int) -> int:
        """Novel rows, of so many, that one of the classes is to have at most."""
        if not self.apart and self.present == WHOLE:
            return -(-rows // classes)
        if self.apart:  # alone first, then one of two, ...
            share = (sum(1 / number for number in range(1, classes + 1)) + LATE) / classes
        else:  # alone where another has left, or has not come yet
            alone = sum(high - low for times in self.present for low, high in times)
            share = alone + (sum(last[0] - first[1] for first, last in self.present)) / classes
        return min(rows, math.ceil(rows * share) + 1)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("none", "nothing changes", present=()),
        Scenario("sudden", "all novel classes come at once and stay"),
        Scenario("gradual", "novel rows are rare at first and grow more frequent", growing=True),
        Scenario("staggered", "novel classes come one by one", apart=True, least_classes=2),
        Scenario("vanishing", "novel classes come and leave", (((0, 0), (0.4, 0.6)),)),
        Scenario(
            "recurring",
            "novel classes come, leave and come back",
            (((0, 0), (0.2, 0.35)), ((0.55, 0.7), (1, 1))),
        ),
        Scenario("near", "as sudden, classes of the half that is like known ones", distance="near"),
        Scenario("far", "as sudden, classes of the half that is unlike known ones", distance="far"),
        Scenario(
            "nuisance",
            "known classes in another view of the run (a transform, a density), no new class",
            present=(),
            disturbed=True,
        ),
        Scenario(
            "disturbed",
            "known classes in another view, later novel classes too",
            (((0.3, 0.5), (1, 1)),),
            disturbed=True,
        ),
    )
}


def scenarios_named(names: tuple[str, ...]) -> list[Scenario]:
    """Scenarios by name, or all."""
    for name in names:
        if name not in (*SCENARIOS, "all"):
            raise ConfigError(
                f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}, all"
            )
    return [one for one in SCENARIOS.values() if one.name in names or "all" in names]


@dataclass(frozen=True)
class Layout:
    """What each row of a test is."""

    slots: NDArray[np.int64]
    """0 for a known class, 1, 2, ... for the novel classes of the test."""
    disturbed: NDArray[np.bool_] = field(repr=False)
    """Rows of known classes that are shown in another view."""
    change: int | None
    """First row of the changed world; None if it stays as it is."""


def draw_layout(
    scenario: Scenario, rows: int, classes: int, settings: TestSettings, rng: np.random.Generator
) -> Layout:
    """A layout with so many novel classes (none if the scenario has none)."""
    start = int(rng.integers(*settings.change_rows(rows), endpoint=True))
    span = rows - start
    mix = settings.novelty_mix if settings.novelty_mix is not None else rng.uniform(*MIXES)
    count = max(1, round(span * mix))
    slots, disturbed = np.zeros(rows, np.int64), np.zeros(rows, bool)
    change = None
    if scenario.present:
        there = _presence(scenario, span, classes, rng)
        weights = np.arange(1, span + 1) ** (2.0 * scenario.growing)
        places = rng.choice(span, count, replace=False, p=weights / weights.sum())
        slots[start:] = _dealt(there, np.sort(places), rng)
        change = start + int(there.any(0).argmax())
    if scenario.disturbed:
        places = start + rng.choice(span, count, replace=False)
        disturbed[places] = slots[places] == 0
    return Layout(slots, disturbed, change)


def _presence(
    scenario: Scenario, span: int, classes: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """(classes, span): whether a class may come at a row."""
    there = np.zeros((classes, span), bool)
    for number in range(classes):
        late = number + rng.uniform(0, LATE) if scenario.apart and number else 0
        for first, last in scenario.present:
            begin = int(span * max(rng.uniform(*first), late / classes))
            end = max(round(span * rng.uniform(*last)), begin + 1)
            there[number, begin:end] = True
    return there


def _dealt(
    there: NDArray[np.bool_], places: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Classes of the rows at `places`: wherever the same classes are there, as many of one as of
    another, give or take one. A class that would have no row has one."""
    slots = np.zeros(there.shape[1], np.int64)
    changes = np.flatnonzero((there[:, 1:] != there[:, :-1]).any(0)) + 1
    for part in np.split(places, np.searchsorted(places, changes)):
        if len(part) and len(present := 1 + np.flatnonzero(there[:, part[0]])):
            # Those that have fewer rows so far come first.
            order = sorted(rng.permutation(present), key=lambda slot: (slots == slot).sum())
            whole = np.tile(order, -(-len(part) // len(present)))
            slots[part] = rng.permutation(whole[: len(part)])
    for number, rows in enumerate(there, start=1):
        free = np.flatnonzero(rows & (slots == 0))
        if not (slots == number).any() and len(free):
            slots[rng.choice(free)] = number
    return slots
