"""Settings that models of game frames share; any other pictures are frames without an item bar."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.config import Settings
from tasks.learning.trainer import TrainingSettings


class ThreadSettings(Settings):
    """Settings of a model that runs a network."""

    cpu_threads: int = Field(
        2, ge=1, description="Threads on a CPU; they order the sums, so the result depends on them."
    )


class FrameSettings(ThreadSettings):
    """How a picture is prepared."""

    item_bar_rows: int = Field(0, ge=0, description="Rows cut off at the bottom.")
    scale: float = Field(1.0, gt=0, le=1, description="Factor on both sides after the cut.")


class FrameTraining(FrameSettings, TrainingSettings):
    """How a network of frames is trained; classes come equally often."""

    order: Literal["shuffled", "balanced", "endless"] = Field(
        "balanced",
        description="Each sample once an epoch, drawn with replacement so that classes come "
        "equally often, or full batches of an endless series.",
    )
