"""TimeSformer, frozen: the class token of 8 frames 32 apart (KOWL-718 section 5.1).

Preset `released` shows the first 300 frames, as the release's script does. FAIR tests it with the
same 8 frames of three squares (Bertasius 2021, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.models.clips import CropBackbone, CropSettings

if TYPE_CHECKING:
    from tasks.features.timesformer import TimeSformer


class Configuration(CropSettings):
    by_preprocessing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "release": {"short_side": 224},
        "fair": {"short_side": 224},
    }
    step: int = Field(32, ge=1, description="Every so many frames one is taken.")
    count: int = Field(
        8, ge=1, description="Frames; the time embedding is stretched to others than the file's."
    )
    crops: int = Field(1, ge=1, description="Temporal crops.")
    crop: int = Field(224, ge=224, le=224, description="Side of a frame in pixels; it takes 224.")


class TimesformerBackbone(CropBackbone):
    name: ClassVar[str] = "timesformer"
    configuration: ClassVar[type[Settings]] = Configuration
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {"step": 1, "count": 300},
        "small": {},
    }

    def load(self, weights: Path | None) -> TimeSformer:
        from tasks.features.timesformer import load_timesformer

        return load_timesformer(weights, self.settings.count, allow_random=weights is None)
