"""A run as a thing: its id out of all that decides its numbers, its row, its mark on pieces."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from schemas.manifest import RunMark
from schemas.runs import RunFacts
from schemas.tables import RUNS
from storage.layout import content_key

ID_DIGITS = 16
FILES = "files"
"""Where the settings of an imported run have the digests of its files."""


def run_id(facts: RunFacts) -> str:
    """The same for the same rows, settings, plug-in versions, weights and base runs."""
    return content_key(_identity(facts))[:ID_DIGITS]


def config_id(facts: RunFacts) -> str:
    """The same for runs that differ in protocol, rows and seed alone.

    Of an imported run each protocol and seed has a file of its own.
    """
    identity = _identity(facts)
    for name in ("protocol", "seed", "fit_key", "base_runs"):
        identity.pop(name)
    if facts.origin == "imported":
        identity["settings"].pop(FILES, None)
    return content_key(identity)[:ID_DIGITS]


def _identity(facts: RunFacts) -> dict[str, Any]:
    """`changed` follows from the rest."""
    return facts.model_dump(mode="json", exclude={"changed"})


def run_mark(facts: RunFacts, data_key: str) -> RunMark:
    """What a piece of this run carries: it is true as long as the protocol has these rows."""
    return RunMark(run_id=run_id(facts), protocol=facts.protocol, data_key=data_key)


def run_row(facts: RunFacts, *, device: str = "cpu", failed: str | None = None) -> pl.DataFrame:
    """The run's row of the table `runs`."""
    row = {
        "run_id": run_id(facts),
        "protocol": facts.protocol,
        "model": facts.model,
        "network": facts.network,
        "preset": facts.preset,
        "settings": as_json(facts.settings),
        "changed": as_json(facts.changed),
        "seed": facts.seed,
        "config_id": config_id(facts),
        "origin": facts.origin,
        "base_runs": list(facts.base_runs),
        "versions": as_json(facts.versions),
        "precision": facts.precision,
        "device": device,
        "fit_key": facts.fit_key,
        "state": "done" if failed is None else "failed",
        "reason": failed,
    }
    return pl.DataFrame([row], schema=RUNS.polars_schema)


def as_json(value: Mapping[str, Any]) -> str:
    """One spelling for one value."""
    return json.dumps(value, sort_keys=True, default=str)
