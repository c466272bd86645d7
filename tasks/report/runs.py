"""Runs by the names that readers see: model, network, score, and what sets them apart."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import polars as pl

from schemas.table import Table
from schemas.tables import NO_SCORE, RUNS, SCORE_SETTINGS
from storage.leaderboard import UNNAMED
from tasks.report.built import flat
from tasks.report.reading import Read

MOST_FACTS = 3
Facts = dict[str, str]


@dataclass
class Kind:
    """A configuration or a score; `hints` help, in turn, where others have the same name."""

    title: str
    facts: Facts
    protocols: set[str | None]
    hints: tuple[Facts, ...]


def with_names(read: Read, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with `config_id`, `run`, the name, and `score_name`, the part of it after the network.

    A name is `cross_entropy · dgcnn · nearest (epochs=5)`. Runs of one configuration and score
    share it, whatever their seed; others of the same protocol never do. Rows without a score are
    named by model and network.
    """
    runs, scores = _table(read, RUNS), _table(read, SCORE_SETTINGS)
    config_of = dict(runs.select("run_id", "config_id").iter_rows())
    configs, settings = _configs(runs), _scores(scores)
    key = [name for name in ("run_id", "score_id", "score") if name in rows.columns]
    keys = rows.select(key).unique(maintain_order=True)
    names = []
    for run_id, score_id, score in (row if len(row) > 1 else (*row, "", "") for row in keys.rows()):
        config = config_of.get(run_id, run_id)
        title, facts = run_id, {}
        if config in configs:
            title, facts = configs[config].title, configs[config].facts
        more = settings[score_id].facts if score_id in settings else {}
        if score not in ("", NO_SCORE):
            title, facts = f"{title} · {score}", facts | more
        names.append((config, _name(title, facts), _name(score, more)))
    schema = dict.fromkeys(("config_id", "run", "score_name"), pl.String)
    added = pl.DataFrame(names, schema=schema, orient="row")
    return rows.join(keys.hstack(added), on=key, how="left", maintain_order="left")


def _name(title: str, facts: Facts) -> str:
    details = ", ".join(f"{name}={value}" if value else name for name, value in facts.items())
    return f"{title} ({details})" if details else title


def _table(read: Read, declared: Table) -> pl.DataFrame:
    rows = read(declared.name)
    return declared.empty() if rows is None else rows.sort(declared.key)


def _configs(runs: pl.DataFrame) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for run in runs.iter_rows(named=True):
        kind = kinds.get(run["config_id"])
        if kind is None:
            changed = {
                name: value
                for name, value in _facts(run["changed"]).items()
                if name.rpartition(".")[2] != UNNAMED
            }
            facts = dict(islice(changed.items(), MOST_FACTS))
            if len(changed) > MOST_FACTS:
                facts[f"{len(changed) - MOST_FACTS} more"] = ""
            network = run["network"]
            kind = kinds[run["config_id"]] = Kind(
                run["model"] if network == "none" else f"{run['model']} · {network}",
                facts,
                set(),
                ({"preset": run["preset"]}, _facts(run["settings"]), {"id": run["config_id"][:6]}),
            )
        kind.protocols.add(run["protocol"])
    _tell_apart(kinds.values(), 3)
    return kinds


def _scores(scores: pl.DataFrame) -> dict[str, Kind]:
    kinds = {
        row["score_id"]: Kind(
            row["score"], {}, {None}, (_facts(row["settings"]), {"id": row["score_id"][:6]})
        )
        for row in scores.iter_rows(named=True)
    }
    _tell_apart(kinds.values(), 2)
    return kinds


def _facts(settings: str) -> Facts:
    """Settings by the last part of their names; by the whole where two end alike."""
    pairs = flat(json.loads(settings))
    ends = [name.rpartition(".")[2] for name, _ in pairs]
    return {
        end if ends.count(end) == 1 else name: value
        for end, (name, value) in zip(ends, pairs, strict=True)
    }


def _tell_apart(kinds: Iterable[Kind], hints: int) -> None:
    """Add facts until no two of a name are in the same protocol."""
    for number in range(hints):
        alike = defaultdict(list)
        for kind in kinds:
            alike[kind.title, *kind.facts.items()].append(kind)
        for same in alike.values():
            if sum(len(kind.protocols) for kind in same) == len(
                set().union(*(kind.protocols for kind in same))
            ):
                continue
            for kind in same:
                others = [other.hints[number] for other in same]
                differing = (
                    (name, value)
                    for name, value in kind.hints[number].items()
                    if any(other.get(name) != value for other in others)
                )
                kind.facts = kind.facts | dict(islice(differing, MOST_FACTS))
