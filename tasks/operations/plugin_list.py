"""What plug-ins there are, where they fit, and what settings they have."""

import importlib
import sys
from typing import Any

import polars as pl

from schemas.errors import ConfigError
from schemas.similar import did_you_mean
from tasks.engine.plugins import Plugin, Plugins

ANY = "any"
KINDS = {
    "models": {
        "novelcraft": "tasks.detectors",
        "semantic": "tasks.semantic.models",
        "threedos": "tasks.threedos.methods",
    },
    "scores": {ANY: "tasks.scores"},
    "predictors": {"condda": "tasks.condda.agents", "kowl": "tasks.predictors"},
}
"""Packages of plug-ins by what the command line calls them and by benchmark."""


def _packages(kind: str) -> dict[str, Plugins[Any]]:
    return {
        benchmark: importlib.import_module(package).PLUGINS
        for benchmark, package in KINDS[kind].items()
    }


def plugin_rows(kind: str) -> pl.DataFrame:
    """One row per plug-in: where it fits, what it needs or gives, and what it is."""
    rows = []
    for benchmark, plugins in _packages(kind).items():
        for name in plugins.names():
            found = plugins.find(name)
            words = getattr(found, "needs" if kind == "scores" else "gives", ())
            rows.append(
                {
                    "name": name,
                    "benchmark": benchmark,
                    "version": found.version,
                    "needs" if kind == "scores" else "gives": ", ".join(sorted(words)),
                    "presets": ", ".join(found.presets),
                    "about": _first_line(found),
                }
            )
    return pl.DataFrame(rows)


def setting_rows(kind: str, name: str, preset: str | None = None) -> pl.DataFrame:
    """Every setting of the plug-ins of that name, with its value and what it means."""
    rows, names = [], set()
    for benchmark, plugins in _packages(kind).items():
        names |= set(plugins.names())
        if name not in plugins.names():
            continue
        found = plugins.find(name)
        shown = preset or next(iter(found.presets), None)
        values = found.resolve(shown)
        rows += [
            {
                "benchmark": benchmark,
                "setting": setting,
                "value": str(getattr(values, setting)),
                "preset": shown,
                "about": (field.description or "").replace("\n", " "),
            }
            for setting, field in found.configuration.model_fields.items()
        ]
        if not found.configuration.model_fields:
            rows.append({"benchmark": benchmark, "setting": None, "about": "it has no settings"})
    if not rows:
        there = f"{', '.join(sorted(names))}{did_you_mean(name, names)}"
        raise ConfigError(f"{kind}: no {name!r}; there are: {there}")
    columns = ("benchmark", "setting", "value", "preset", "about")
    return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String))


def _first_line(kind: type[Plugin]) -> str:
    text = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
    return text.strip().partition("\n")[0]
