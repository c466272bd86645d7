"""Both renderers behind one call: world states in, novel masks out.

`raycast` runs in this process. `blender` runs in child processes that may crash or hang; a frame
that it cannot render comes back as the RecordError that goes to quarantine. Bounding boxes of novel
objects are always those of `raycast`, as Blender gives one picture for all objects.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import ConfigError, RecordError
from schemas.novelcraft import RenderSettings
from tasks.ingest.native.pool import Limits, run_batch
from tasks.novelcraft.raycast import Rendering, render
from tasks.novelcraft.scene import View, build_scene
from tasks.novelcraft.worldstate import WorldState

Frame = tuple[WorldState, tuple[str, ...]]
"""A state, and the names that are novel in it."""

BLENDER = "tasks.novelcraft.blender:render_states"
BLENDER_PYTHON = "NOVELTY_BLENDER_PYTHON"
BLENDER_LIMITS = Limits(seconds_per_item=120, seconds_start=180)
FRAMES_PER_CHILD = 100


def view_of(settings: RenderSettings) -> View:
    return View(rotation=settings.rotation, resolution=settings.resolution)


def render_all(
    frames: Sequence[Frame], settings: RenderSettings, workers: int = 1
) -> Iterator[Rendering | RecordError]:
    """One rendering for each frame, in order."""
    view = view_of(settings)
    rule = (settings.coverage, settings.samples)
    cast = (render(build_scene(state, novel, view), *rule) for state, novel in frames)
    return (
        _with_blender(frames, cast, settings, workers) if settings.renderer == "blender" else cast
    )


def blender_python() -> str:
    """The interpreter of Blender's child processes: NOVELTY_BLENDER_PYTHON, else this one."""
    named = os.environ.get(BLENDER_PYTHON)
    if not named:
        return sys.executable
    if not os.access(named, os.X_OK):
        raise ConfigError(
            f"{BLENDER_PYTHON} is {named}, which is no program; `make setup-blender` makes one"
        )
    return str(Path(named).absolute())


def _with_blender(
    frames: Sequence[Frame], cast: Iterable[Rendering], settings: RenderSettings, workers: int
) -> Iterator[Rendering | RecordError]:
    wanted = [(state, novel) for state, novel in frames if _has_any(state, novel)]
    items = [_item(state, novel, settings) for state, novel in wanted]
    outcomes = run_batch(
        BLENDER,
        items,
        limits=BLENDER_LIMITS,
        imports=("bpy", "cv2"),
        python=blender_python(),
        workers=workers,
        batch=FRAMES_PER_CHILD,
    )
    for (state, novel), rendering in zip(frames, cast, strict=True):
        if not _has_any(state, novel):
            yield rendering
            continue
        outcome = next(outcomes)
        if outcome.value is None:
            yield RecordError(outcome.rule or "native_error", outcome.message or "")
        elif outcome.value["errors"]:
            (error,) = outcome.value["errors"]
            yield RecordError(error["rule"], error["message"])
        else:
            (mask,) = outcome.value["masks"]
            yield replace(rendering, mask=mask, pixels=int(np.count_nonzero(mask)))


def _has_any(state: WorldState, novel: tuple[str, ...]) -> bool:
    return bool(build_scene(state, novel).novel.any())


def _item(state: WorldState, novel: tuple[str, ...], settings: RenderSettings) -> dict[str, Any]:
    return {
        "states": [state_document(state)],
        "novel": list(novel),
        "settings": settings.blender,
        "coverage": settings.coverage,
        "samples": settings.samples,
        "threads": 1,
        "rotation": settings.rotation,
        "resolution": settings.resolution,
    }


def state_document(state: WorldState) -> dict[str, Any]:
    """The part of a SENSE_ALL document that a picture depends on."""
    places = [",".join(map(str, place)) for place in state.positions.tolist()]
    names = [state.keys[index] for index in state.key_index.tolist()]
    return {
        "map": {place: {"name": name} for place, name in zip(places, names, strict=True)},
        "player": {"pos": list(state.player), "yaw": state.yaw, "pitch": state.pitch},
        "entities": {
            entity.id: {"type": entity.type, "name": entity.name, "pos": list(entity.position)}
            for entity in state.entities
        },
        "step": state.step,
    }
