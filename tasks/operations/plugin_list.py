"""What plug-ins there are, where they fit, and what settings they have."""

import importlib
import pkgutil
import sys
from typing import Any

import polars as pl

import schemas
from schemas.errors import ConfigError
from schemas.similar import did_you_mean
from tasks.engine.plugins import Plugin, Plugins

KINDS = {
    "models": "tasks.models",
    "networks": "tasks.networks",
    "scores": "tasks.scores",
    "predictors": "tasks.predictors",
}
"""Packages of plug-ins by what the command line calls them."""
ANY = "any"


def _plugins(kind: str) -> Plugins[Any]:
    return importlib.import_module(KINDS[kind]).PLUGINS


def benchmarks_by_modality() -> dict[str, list[str]]:
    """Benchmarks that have samples of each modality, as their schemas say."""
    names: dict[str, list[str]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(schemas.__path__)):
        declared = importlib.import_module(f"schemas.{module}")
        for modality in declared.MODALITIES if hasattr(declared, "Config") else ():
            names.setdefault(modality, []).append(module)
    return names


def plugin_rows(kind: str) -> pl.DataFrame:
    """One row per plug-in: where it fits, what it needs or gives, and what it is."""
    places = benchmarks_by_modality()
    rows = []
    for name in _plugins(kind).names():
        plugin = _plugins(kind).find(name)
        row = {"name": name, "version": plugin.version}
        if kind in ("models", "networks"):
            row |= {
                "modality": plugin.modality,
                "benchmarks": ", ".join(places.get(plugin.modality, ["none"])),
            }
        if kind == "models":
            row["gives"] = ", ".join(sorted(plugin.gives))
        if kind == "scores":
            row["needs"] = ", ".join(sorted(plugin.needs))
        rows.append(row | {"presets": ", ".join(plugin.presets), "about": _first_line(plugin)})
    return pl.DataFrame(rows)


def setting_rows(kind: str, name: str, preset: str | None = None) -> pl.DataFrame:
    """Every setting of a plug-in, with its value and what it means."""
    plugins = _plugins(kind)
    if name not in plugins.names():
        names = f"{', '.join(plugins.names())}{did_you_mean(name, plugins.names())}"
        raise ConfigError(f"{kind}: no {name!r}; there are: {names}")
    plugin = plugins.find(name)
    if preset is not None and preset not in plugin.presets:
        names = ", ".join(plugin.presets) or "none"
        raise ConfigError(f"{name} has no preset {preset!r}; there are: {names}")
    preset_name = preset or next(iter(plugin.presets), None)
    values = plugin.resolve(preset_name, **_on_network(kind, plugin))
    rows = [
        {
            "setting": setting,
            "value": str(getattr(values, setting)),
            "preset": preset_name,
            "about": (field.description or "").replace("\n", " "),
        }
        for setting, field in plugin.configuration.model_fields.items()
    ]
    columns = dict.fromkeys(("setting", "value", "preset", "about"), pl.String)
    return pl.DataFrame(rows or [{"about": "it has no settings"}], schema=columns)


def _on_network(kind: str, plugin: Any) -> dict[str, str]:
    """Values of a model that stands on a network are shown for the first one that fits."""
    if kind != "models" or not plugin.uses_network:
        return {}
    from tasks import networks

    return {"network": networks.names_of(plugin.modality)[0]}


def _first_line(kind: type[Plugin]) -> str:
    text = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
    return text.strip().partition("\n")[0]
