"""Masks for people who have only world states: a folder of JSON files or a JSON-lines file.

Enters: states, the names that are novel, a renderer. Leaves in a folder: targets as Parquet and CSV
(frame_id, novel_fraction, novel_pixels, renderer, rotation), refused states with the reason, and on
request the masks as PNG.
"""

import gzip
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from schemas.errors import RecordError, SourceError
from schemas.novelcraft import RenderSettings
from schemas.similar import did_you_mean
from storage.atomic import write_bytes
from tasks.novelcraft.masks import encode_png
from tasks.novelcraft.render import render_all
from tasks.novelcraft.worldstate import MAX_BYTES, WorldState, parse_world_state

log = logging.getLogger(__name__)
TARGETS = {
    "frame_id": pl.String,
    "novel_fraction": pl.Float64,
    "novel_pixels": pl.Int32,
    "renderer": pl.String,
    "rotation": pl.String,
}


def read_states(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, JSON) of every state, in natural order of the names."""
    if path.is_dir():
        files = sorted(path.rglob("*.json"), key=_natural)
        for file in files:
            if file.stat().st_size > MAX_BYTES:
                yield _name(path, file), b""
            else:
                yield _name(path, file), file.read_bytes()
    elif path.name.endswith((".jsonl", ".jsonl.gz", ".ndjson")):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            number = 0
            while line := lines.readline(MAX_BYTES + 1):
                if line.strip():
                    yield str(number), line
                    number += 1
    elif path.is_file() and path.suffix == ".json":
        yield path.stem, path.read_bytes()
    else:
        raise SourceError(
            f"{path} is neither a folder of .json files nor a .jsonl[.gz] or .json file"
        )


def _name(root: Path, file: Path) -> str:
    return str(file.relative_to(root).with_suffix(""))


def _natural(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(p)) if p.isdigit() else (1, p) for p in path.with_suffix("").parts]


def absent_names(novel: Sequence[str], states: Sequence[WorldState]) -> list[str]:
    """A sentence for each name that no state has a block or entity of: a typing mistake?"""
    known_names = {key for state in states for key in state.keys}
    known_names |= {key.partition("_var_")[0] for key in known_names}
    known_names |= {n for state in states for one in state.entities for n in (one.name, one.type)}
    return [
        f"{name} is in none of the {len(states)} states, so it gives no novel pixel"
        f"{did_you_mean(name, known_names)}"
        for name in novel
        if name not in known_names
    ]


def render_states(
    path: Path, novel: Sequence[str], settings: RenderSettings, out: Path, masks: bool = False
) -> pl.DataFrame:
    """Render every state; returns the targets that were written to `out`."""
    states: list[tuple[str, WorldState]] = []
    refused: list[tuple[str, str, str]] = []
    for name, data in read_states(path):
        try:
            states.append((name, parse_world_state(data)))
        except RecordError as error:
            refused.append((name, error.rule, error.message))
    if not states:
        why = f"; the first was refused: {refused[0][2]}" if refused else ""
        raise SourceError(f"no world state could be read from {path}{why}")
    for warning in absent_names(novel, [state for _, state in states]):
        log.warning("WARNING: %s", warning)
    rows = []
    for (name, _), outcome in zip(
        states, render_all([(state, tuple(novel)) for _, state in states], settings), strict=True
    ):
        if isinstance(outcome, RecordError):
            refused.append((name, outcome.rule, outcome.message))
            continue
        mask = outcome.mask
        pixels = int(mask.sum())
        rows.append((name, pixels / mask.size, pixels, settings.renderer, settings.rotation))
        if masks:
            write_bytes(out / "masks" / f"{name}.png", encode_png(mask))
    targets = pl.DataFrame(rows, schema=TARGETS, orient="row")
    out.mkdir(parents=True, exist_ok=True)
    targets.write_parquet(out / "targets.parquet")
    targets.write_csv(out / "targets.csv")
    reasons = pl.DataFrame(refused, schema=["record", "rule", "message"], orient="row")
    if refused:
        reasons.write_csv(out / "refused.csv")
    return targets
