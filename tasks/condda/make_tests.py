"""CONDDA and OND tests out of our own tables: labelled samples in, test files in domain `novelty`.

In: a frame with sample_id, class, split and role (`known` or `novel`; other roles are left out), as
`from_lake` makes it of the shared `splits`. Out: `<out>/<PROTOCOL>/novelty/` with `test_ids.csv`,
`<test>_single_df.csv` and `<test>_metadata.json` in the published layout (docs/condda.md, rule 3),
readable by `test_files.TestLibrary`, and a frame of `MADE`.

A test is the layout of a scenario (`scenarios.py`) filled with samples. Known classes in
alphabetical order are the labels 1..K, novel ones -1, -2, ... the same in every test. Known rows
are drawn from all known samples alike; no sample stands twice in a test. Draws depend on seed,
number of the test and sample ids only. Whether samples suffice is known before anything is written.

A test does not give itself away: its instances have names that tell their place alone, the row of
the change is drawn, tests of all scenarios have the same size and stand in a drawn order, the
metadata has nothing of it among what agents may see, and the test's id does not tell the seed, by
which all of it could be drawn again. The seed stands in `<out>/plan-<PROTOCOL>.<group>.json`, for
operators: the same command goes on there with what is missing, with the same bytes.
"""

import csv
import hashlib
import io
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import ConfigError, SourceError
from schemas.tables import PLAIN
from storage.atomic import write_bytes
from tasks.condda.domains import NOVELTY, RED_LIGHT
from tasks.condda.scenarios import (
    MIXES,
    MOST_CLASSES,
    SCENARIOS,
    WHOLE,
    Layout,
    Scenario,
    draw_layout,
    scenarios_named,
)
from tasks.condda.test_files import CELL_EDGES, METADATA, TRUTH
from tasks.engine.progress import progress

log = logging.getLogger(__name__)

LABELLED = ("sample_id", "class", "split", "role")
MADE: dict[str, pl.DataType | type[pl.DataType]] = {
    "test_id": pl.String,
    "protocol": pl.String,
    "scenario": pl.String,
    "rows": pl.Int64,
    "rounds": pl.Int64,
    "red_light_row": pl.Int64,
    "red_light": pl.String,
    "first_novel_row": pl.Int64,
    "novel_rows": pl.Int64,
    "known_classes": pl.Int64,
    "novel_classes": pl.List(pl.String),
}
PLAN_VERSION = 2
"""Raise it when the same seed and settings give other tests or features."""
ROWS, LEAST_ROWS, ROUND = 320, 12, 32


def known_class_names(labelled: pl.DataFrame) -> tuple[str, ...]:
    """Known classes in the order of their columns: label 1 is the first."""
    return _class_names(labelled, "known")


def _class_names(labelled: pl.DataFrame, role: str) -> tuple[str, ...]:
    return tuple(labelled.filter(pl.col("role") == role)["class"].unique().sort())


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Pool:
    """What tests may be drawn from."""

    labelled: pl.DataFrame
    """Samples with `LABELLED`."""
    views: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Samples that also have features in a view other than plain."""
    distances: Mapping[str, float] = field(default_factory=dict)
    """How far each novel class is from the known ones."""
    source: str = "these samples"
    """What they are, in a sentence."""


@dataclass(frozen=True)
class PlannedTest:
    """A test that can be written; `truth` has the columns of the domain."""

    test_id: str
    truth: pl.DataFrame
    metadata: dict[str, Any]


class Plan:
    """All tests of one command: sizes that fit, the seed, and each test when it is asked for."""

    def __init__(self, pool: Pool, settings: TestSettings, seed: int | None = None) -> None:
        self.pool, self.settings = pool, settings
        self.samples = _checked(pool.labelled, settings)
        self.known, self.novel = (_class_names(self.samples, role) for role in ("known", "novel"))
        if not self.known or not self.novel:
            raise SourceError(
                "tests need samples with the role known and samples with the role novel"
            )
        codes = {name: place for place, name in enumerate(self.known, start=1)}
        codes |= {name: -place for place, name in enumerate(self.novel, start=1)}
        in_split = pl.col("split").is_in(settings.splits or ("test",))
        if not settings.splits:
            in_split |= pl.col("role") == "novel"
        labelled = self.samples.filter(in_split).with_columns(
            pl.col("class").replace_strict(codes, return_dtype=pl.Int64).alias("label")
        )
        self.known_ids = labelled.filter(pl.col("label") > 0)
        groups = labelled.filter(pl.col("label") < 0).partition_by("label", as_dict=True)
        self.novel_ids = {int(key[0]): rows["sample_id"] for key, rows in groups.items()}
        mix = settings.novelty_mix
        self.mixes = MIXES if mix is None else (mix, mix)
        self.splits = ", ".join(settings.splits or ("test",))
        self.scenarios = self._scenarios()
        self.rows = settings.rows or self._fitting_rows(*self.scenarios)
        if not self.rows:
            raise self._too_few()
        self.round_size = settings.round_size or min(ROUND, max(1, self.rows // 10))
        self._check()
        if seed is None:
            seed = secrets.randbits(63) if settings.seed is None else settings.seed
        self.seed = seed

    # ------------------------------------------------------------ what fits

    def _scenarios(self) -> list[Scenario]:
        """Those of the settings; of all, those that the samples allow, and that is said."""
        named = scenarios_named(self.settings.scenario)
        reasons = {one.name: reason for one in named if (reason := self._lacks(one))}
        if "all" not in self.settings.scenario and reasons:
            name, reason = next(iter(reasons.items()))
            raise ConfigError(f"scenario {name} does not fit {self.pool.source}: {reason}")
        for name, reason in reasons.items():
            log.warning(f"without scenario {name}: {reason}")
        return [one for one in named if one.name not in reasons]

    def _lacks(self, scenario: Scenario) -> str | None:
        classes = self.settings.novel_classes or scenario.least_classes
        if scenario.least_classes > max(1, min(classes, len(self.novel_ids))):
            return f"it needs {scenario.least_classes} novel classes"
        if scenario.distance != "any" and len(self.pool.distances) < 2:
            return "it needs the features of two novel classes or more"
        if scenario.disturbed and not self.pool.views:
            return "its run has no view but the plain one (a transform, a density)"
        if "all" in self.settings.scenario and not self._fitting_rows(scenario):
            return "classes have too few samples"
        return None

    def _fitting_rows(self, *scenarios: Scenario) -> int:
        """As many rows as there are samples for, up to `ROWS`; 0 if none fit."""
        sizes = [self.settings.rows or ROWS]
        if self.settings.rows is None:
            sizes = list(range(min(ROWS, len(self.known_ids)), LEAST_ROWS - 1, -1))
        fitting = (n for n in sizes if all(self._shortage(one, n) is None for one in scenarios))
        return next(fitting, 0)

    def _too_few(self) -> ConfigError:
        sizes = sorted((len(ids) for ids in self.novel_ids.values()), reverse=True)
        return ConfigError(
            f"{self.pool.source} has too few samples for a test of {LEAST_ROWS} rows: "
            f"{len(self.known_ids)} of known classes in splits {self.splits}, and "
            f"{', '.join(map(str, sizes[:MOST_CLASSES])) or 'none'} of the largest novel classes; "
            "name more --splits, another --protocol, or lower --novelty-mix"
        )

    def _check(self) -> None:
        """Refuse what cannot be made."""
        changing = [one for one in self.scenarios if one.name != "none"]
        if self.settings.tests < len(changing):
            raise ConfigError(
                f"{self.settings.tests} tests are fewer than the {len(changing)} scenarios; "
                f"name --tests {len(changing)} or more"
            )
        for scenario in (SCENARIOS["none"],) * bool(self._unchanged) + tuple(changing):
            if shortage := self._shortage(scenario, self.rows):
                raise ConfigError(shortage)

    def _needed(self, scenario: Scenario, rows: int, classes: int) -> int:
        """Samples of one of so many novel classes that a test may need at most."""
        return scenario.of_one_class(self._most_novel(rows), classes)

    def _most_novel(self, rows: int) -> int:
        """Rows that may be novel at most, or be shown in another view."""
        return max(1, round((rows - self.settings.change_rows(rows)[0]) * self.mixes[1]))

    def _least_novel(self, rows: int) -> int:
        return max(1, round((rows - self.settings.change_rows(rows)[1]) * self.mixes[0]))

    def _eligible(self, scenario: Scenario, needed: int) -> list[int]:
        """Labels of novel classes that the scenario may draw, and that have enough samples."""
        labels = sorted(self.novel_ids, reverse=True)
        if scenario.distance != "any":
            order = sorted(labels, key=lambda label: self.pool.distances[self._novel_name(label)])
            half = len(order) // 2
            labels = order[: len(order) - half] if scenario.distance == "near" else order[half:]
        return sorted(
            (label for label in labels if len(self.novel_ids[label]) >= needed), reverse=True
        )

    def _novel_name(self, label: int) -> str:
        return self.novel[-label - 1]

    def _choices(self, scenario: Scenario, rows: int) -> list[int]:
        """Numbers of novel classes that a test may have."""
        if not scenario.present:
            return [0]
        first, most = scenario.least_classes, MOST_CLASSES
        if self.settings.novel_classes is not None:
            first = most = self.settings.novel_classes
        return [
            number
            for number in range(first, min(most, self._least_novel(rows)) + 1)
            if len(self._eligible(scenario, self._needed(scenario, rows, number))) >= number
        ]

    def _shortage(self, scenario: Scenario, rows: int) -> str | None:
        """What the samples lack for so many rows, or None."""
        least = self._least_novel(rows) if scenario.present == WHOLE else 0
        if len(self.known_ids) < rows - least:
            return (
                f"a test needs {rows - least} samples of known classes, splits {self.splits} "
                f"have {len(self.known_ids)}; lower rows or add splits"
            )
        if scenario.disturbed and not self._views(rows):
            return f"no view of {self.pool.source} has enough samples for {rows} rows; lower rows"
        if not self._choices(scenario, rows):
            number = self.settings.novel_classes or scenario.least_classes
            needed = self._needed(scenario, rows, number)
            enough = len(self._eligible(scenario, needed))
            most = max((len(ids) for ids in self.novel_ids.values()), default=0)
            return (
                f"{enough} novel classes have the {needed} samples that a test of scenario "
                f"{scenario.name} needs of each in splits {self.splits}, {number} are wanted; the "
                f"largest has {most}: lower rows, novelty_mix or novel_classes, or add splits"
            )
        return None

    @cached_property
    def _viewed(self) -> dict[str, np.ndarray]:
        """Places of the known samples that have a view."""
        ids = self.known_ids["sample_id"]
        return {
            view: np.flatnonzero([name in names for name in ids])
            for view, names in sorted(self.pool.views.items())
        }

    def _views(self, rows: int) -> list[str]:
        most = self._most_novel(rows)
        return [view for view, places in self._viewed.items() if len(places) >= most]

    # ------------------------------------------------------------ tests

    @property
    def _unchanged(self) -> int:
        """Tests of scenario none."""
        if [one.name for one in self.scenarios] == ["none"]:
            return self.settings.tests
        changing = sum(one.name != "none" for one in self.scenarios)
        share = round(self.settings.tests * self.settings.unchanged)
        share = max(share, int(len(self.scenarios) > changing))
        return min(share, self.settings.tests - changing)

    @cached_property
    def _dealt(self) -> list[Scenario]:
        """The scenario of each test, in a drawn order."""
        changing = [one for one in self.scenarios if one.name != "none"]
        tests = [SCENARIOS["none"]] * self._unchanged
        tests += [changing[n % len(changing)] for n in range(self.settings.tests - len(tests))]
        order = np.random.default_rng([self.seed, self.settings.tests, 1]).permutation(len(tests))
        return [tests[place] for place in order]

    @property
    def test_ids(self) -> list[str]:
        tag = int(_digest("tests", self.seed)[:6], 16)
        return [
            f"{self.settings.kind}.{self.settings.group}.{number}.{tag}"
            for number in range(self.settings.tests)
        ]

    def test(self, number: int) -> PlannedTest:
        """The test of this number; the same each time."""
        scenario = self._dealt[number]
        rng = np.random.default_rng([self.seed, number])
        count = int(rng.choice(self._choices(scenario, self.rows)))
        needed = self._needed(scenario, self.rows, max(count, 1))
        layout = draw_layout(scenario, self.rows, count, self.settings, rng)
        while np.bincount(layout.slots)[1:].max(initial=0) > needed:
            layout = draw_layout(scenario, self.rows, count, self.settings, rng)
        truth = self._truth(scenario, layout, number, count, rng)
        return PlannedTest(self.test_ids[number], truth, self._metadata(scenario, layout, truth))

    def _truth(
        self, scenario: Scenario, layout: Layout, number: int, count: int, rng: np.random.Generator
    ) -> pl.DataFrame:
        rows, slots = self.rows, layout.slots
        places = rng.permutation(len(self.known_ids))
        views = np.full(rows, PLAIN, object)
        kept = np.full(rows, -1)
        if layout.disturbed.any():
            view = str(rng.choice(self._views(rows)))
            kept[layout.disturbed] = rng.permutation(self._viewed[view])[: layout.disturbed.sum()]
            views[layout.disturbed] = view
            places = places[~np.isin(places, kept)]
        left = (slots == 0) & ~layout.disturbed
        kept[left] = places[: left.sum()]
        samples, labels = np.full(rows, None, object), np.zeros(rows, np.int64)
        samples[kept >= 0] = self.known_ids["sample_id"].to_numpy()[kept[kept >= 0]]
        labels[kept >= 0] = self.known_ids["label"].to_numpy()[kept[kept >= 0]]
        eligible = self._eligible(scenario, self._needed(scenario, rows, count)) if count else []
        for slot, label in enumerate(rng.choice(eligible, count, replace=False).tolist(), start=1):
            ids, mine = self.novel_ids[label], slots == slot
            samples[mine] = ids.to_numpy()[rng.choice(len(ids), mine.sum(), replace=False)]
            labels[mine] = label
        change = rows if layout.change is None else layout.change
        names = list(samples)
        if self.settings.anonymous:
            names = [_digest("row", self.seed, number, row)[:16] for row in range(rows)]
        return pl.DataFrame(
            {
                "instance_id": pl.Series(names, dtype=pl.String),
                "novel": (labels < 0).astype(np.int64),
                "detection": (np.arange(rows) >= change).astype(np.int64),
                "classification": labels,
                "sample_id": pl.Series(list(samples), dtype=pl.String),
                "view": pl.Series(list(views), dtype=pl.String),
            }
        ).select(NOVELTY.columns)

    def _metadata(self, scenario: Scenario, layout: Layout, truth: pl.DataFrame) -> dict[str, Any]:
        """Agents see what `domains.SHOWN_METADATA` names, which tells nothing of this test's truth.

        With the red light they are told its instance, or by an empty name that there is none.
        """
        present = truth.filter(pl.col("novel") == 1)["classification"].unique()
        return {
            "protocol": self.settings.kind,
            "domain": NOVELTY.name,
            "scenario": scenario.name,
            "known_classes": len(self.known),
            "known_class_names": list(self.known),
            "novel_classes": len(present),
            "novel_class_names": {
                str(label): self._novel_name(label) for label in present.sort(descending=True)
            },
            "round_size": self.round_size,
            "n_rounds": -(-self.rows // self.round_size),
            "detection": layout.change,
            RED_LIGHT: "" if layout.change is None else truth["instance_id"][layout.change],
            "prop_novel": self.settings.novelty_mix,
            "feedback_max_ids": self.settings.feedback_max_ids,
            "anonymous": self.settings.anonymous,
            "threshold": 0.5,
            "seed": self.seed,
        }

    # ------------------------------------------------------------ files

    def write(
        self, out: Path, beside: Callable[[PlannedTest], None] = lambda test: None
    ) -> pl.DataFrame:
        """Write what is missing below `out`; `beside` writes what belongs to a test before it."""
        folder = Path(out) / self.settings.kind / NOVELTY.name
        rows = []
        with progress("tests", self.settings.tests) as advance:
            for number, name in enumerate(self.test_ids):
                test = self.test(number)
                if not (folder / f"{name}{METADATA}").is_file():
                    beside(test)
                    write_bytes(folder / f"{name}{TRUTH}", _csv(test.truth))
                    text = json.dumps(test.metadata, indent=2)
                    write_bytes(folder / f"{name}{METADATA}", text.encode())
                rows.append(_described(test))
                advance(1)
        path = folder / "test_ids.csv"
        listed, made = path.read_text().split() if path.is_file() else [], self.test_ids
        # Tests of other groups come first.
        names = [*(name for name in listed if name not in made), *made]
        write_bytes(path, "".join(f"{name}\n" for name in names).encode())
        return pl.DataFrame(rows, schema=MADE)


def make_tests(labelled: pl.DataFrame, out: Path, settings: TestSettings) -> pl.DataFrame:
    """Write tests of labelled samples below `out`; gives one row of `MADE` for each."""
    return planned(Pool(labelled), out, settings).write(out)


def planned(pool: Pool, out: Path, settings: TestSettings) -> Plan:
    """The plan of these tests: a new one, or the one that an earlier command left at `out`."""
    path = Path(out) / f"plan-{settings.kind}.{settings.group}.json"
    about = {
        "version": PLAN_VERSION,
        "settings": settings.model_dump(mode="json", exclude={"seed"}),
        "samples": _fingerprint(pool),
    }
    if not path.is_file():
        plan = Plan(pool, settings)
        content = json.dumps({"seed": plan.seed, **about}, indent=2)
        write_bytes(path, content.encode())
        return plan
    kept = json.loads(path.read_text())
    seed = kept.pop("seed")
    differing = [name for name, value in about.items() if kept.get(name) != value]
    if settings.seed not in (None, seed):
        differing.append("seed")
    if differing:
        raise ConfigError(
            f"{path} is of other tests ({', '.join(differing)} differ); name another --out or "
            "--group, or remove that file and its tests"
        )
    return Plan(pool, settings, seed)


def _fingerprint(pool: Pool) -> str:
    """A digest of all that tests are drawn from."""
    rows = pool.labelled.select([name for name in LABELLED if name in pool.labelled.columns]).sort(
        pl.all()
    )
    digest = hashlib.sha256(rows.write_csv().encode())
    for view, names in sorted(pool.views.items()):
        digest.update("\n".join([view, *sorted(names)]).encode())
    digest.update(pool.source.encode())
    return digest.hexdigest()


def _checked(labelled: pl.DataFrame, settings: TestSettings) -> pl.DataFrame:
    """Known and novel samples by id; one row a sample, one role a class, ids that a CSV can hold.

    Ids are sorted as bytes, so the order is that of every machine.
    """
    lacking = [name for name in LABELLED if name not in labelled.columns]
    if lacking:
        raise SourceError(f"labelled samples have no column {lacking[0]}; expected {LABELLED}")
    used = pl.col("role").is_in(("known", "novel")) & pl.col("class").is_not_null()
    samples = labelled.select(LABELLED).filter(used).sort("sample_id")
    twice = samples.filter(pl.col("sample_id").is_duplicated())["sample_id"]
    if len(twice):
        raise SourceError(f"sample {twice[0]!r} stands twice; give each sample one row")
    both = set(_class_names(samples, "known")) & set(_class_names(samples, "novel"))
    if both:
        raise SourceError(
            f"class {min(both)!r} has known and novel samples; give all samples of a class one role"
        )
    ids = samples["sample_id"]
    bad = ids.filter(
        ids.str.contains(r"[,|\x00-\x1f\x7f\u0085\u2028\u2029\"]")
        | (ids.str.strip_chars(CELL_EDGES) != ids)
        | (ids.str.strip_chars("\"',.") == "")
        | (ids.str.len_chars() > 512)
    )
    if len(bad) and not settings.anonymous:
        raise SourceError(
            f"sample id {bad[0][:80]!r} cannot stand in a test file; use anonymous ids"
        )
    return samples


def _csv(truth: pl.DataFrame) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, quotechar=NOVELTY.quotechar, lineterminator="\n")
    lines.writerows([truth.columns, *truth.rows()])
    return text.getvalue().encode()


def _described(test: PlannedTest) -> dict[str, Any]:
    truth, metadata = test.truth, test.metadata
    novel = truth["novel"]
    return {
        "test_id": test.test_id,
        "protocol": metadata["protocol"],
        "scenario": metadata["scenario"],
        "rows": truth.height,
        "rounds": metadata["n_rounds"],
        "red_light_row": metadata["detection"],
        "red_light": metadata[RED_LIGHT] or None,
        "first_novel_row": novel.arg_max() if novel.max() else None,
        "novel_rows": int(novel.sum()),
        "known_classes": metadata["known_classes"],
        "novel_classes": list(metadata["novel_class_names"].values()),
    }
