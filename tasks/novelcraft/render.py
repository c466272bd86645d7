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
from storage.checkpoints import read_checkpoint, write_checkpoint
from tasks.ingest.native.pool import Limits, Outcome, run_batch
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
    frames: Sequence[Frame],
    settings: RenderSettings,
    workers: int = 1,
    work: Path | None = None,
) -> Iterator[Rendering | RecordError]:
    """One rendering for each frame, in order.

    Blender's masks are kept in `work` one by one: after a kill it goes on with the next frame.
    """
    view = view_of(settings)
    rule = (settings.coverage, settings.samples)
    cast = (render(build_scene(state, novel, view), *rule) for state, novel in frames)
    if settings.renderer != "blender":
        return cast
    return _with_blender(frames, cast, settings, workers, work)


def blender_python() -> str:
    """The interpreter of Blender's child processes: NOVELTY_BLENDER_PYTHON, else this one."""
    python = os.environ.get(BLENDER_PYTHON)
    if not python:
        return sys.executable
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"{BLENDER_PYTHON} is {python}, which is no program; `make setup-blender` makes one"
        )
    return str(Path(python).absolute())


def _with_blender(
    frames: Sequence[Frame],
    cast: Iterable[Rendering],
    settings: RenderSettings,
    workers: int,
    work: Path | None,
) -> Iterator[Rendering | RecordError]:
    shown = [number for number, frame in enumerate(frames) if _has_any(*frame)]
    kept = {} if work is None else {number: work / f"mask_{number:06d}" for number in shown}
    to_draw = [number for number in shown if number not in kept or not kept[number].is_file()]

    def keep(outcome: Outcome) -> None:
        if kept and (mask := _mask_of(outcome)) is not None:
            write_checkpoint(kept[to_draw[outcome.item]], np.packbits(mask).tobytes())

    outcomes = run_batch(
        BLENDER,
        [_item(*frames[number], settings) for number in to_draw],
        limits=BLENDER_LIMITS,
        imports=("bpy", "cv2"),
        python=blender_python(),
        workers=workers,
        batch=FRAMES_PER_CHILD,
        on_outcome=keep,
    )
    drawn = set(to_draw)
    for number, rendering in enumerate(cast):
        mask = rendering.mask
        if number in drawn:
            outcome = next(outcomes)
            if (drawing := _mask_of(outcome)) is None:
                yield _refusal(outcome)
                continue
            mask = drawing
        elif number in kept:
            bits = np.frombuffer(read_checkpoint(kept[number]), np.uint8)
            mask = np.unpackbits(bits, count=mask.size).astype(bool).reshape(mask.shape)
        yield replace(rendering, mask=mask, pixels=int(np.count_nonzero(mask)))


def _mask_of(outcome: Outcome) -> np.ndarray | None:
    if outcome.value is None or outcome.value["errors"]:
        return None
    mask: np.ndarray = outcome.value["masks"][0]
    return mask


def _refusal(outcome: Outcome) -> RecordError:
    if outcome.value is None:
        return RecordError(outcome.rule or "native_error", outcome.message or "")
    (error,) = outcome.value["errors"]
    return RecordError(error["rule"], error["message"])


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
