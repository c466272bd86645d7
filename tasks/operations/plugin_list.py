"""What plug-ins there are, with their settings and what they need."""

from collections.abc import Iterable
from typing import Any

import polars as pl

from tasks.engine.plugins import Plugin


def plugin_rows(kinds: Iterable[type[Plugin]], about: str) -> pl.DataFrame:
    """One row per plug-in; `about` is the class attribute that tells where it fits."""
    rows = []
    for kind in kinds:
        fits = getattr(kind, about, ())
        rows.append(
            {
                "name": kind.name,
                "version": kind.version,
                about: fits if isinstance(fits, str) else ", ".join(sorted(fits)),
                "presets": ", ".join(kind.presets),
                "about": _first_line(kind),
            }
        )
    return pl.DataFrame(rows)


def setting_rows(kind: type[Plugin], preset: str | None = None) -> pl.DataFrame:
    """Every setting with its value under the preset and what it means."""
    values = kind.resolve(preset)
    rows = [
        {"setting": name, "value": str(getattr(values, name)), "about": _described(field)}
        for name, field in kind.configuration.model_fields.items()
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(("setting", "value", "about"), pl.String))


def _described(field: Any) -> str:
    return (field.description or "").replace("\n", " ")


def _first_line(kind: type[Plugin]) -> str:
    import sys

    text = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
    return text.strip().partition("\n")[0]
