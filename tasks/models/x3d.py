"""X3D-M, frozen: four temporal crops of a clip, 2048 features each (KOWL-718 section 5.1).

As FAIR tests it: ten temporal crops of three squares at 256 pixels (Feichtenhofer 2020, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.config import Settings
from tasks.models.clips import CropBackbone, CropSettings

if TYPE_CHECKING:
    from tasks.features.x3d import X3D


class Configuration(CropSettings):
    by_preprocessing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "release": {"short_side": 224},
        "fair": {"crops": 10, "short_side": 256, "crop": 256},
    }
    count: int = Field(16, ge=16, le=16, description="Frames in a temporal crop; X3D-M takes 16.")
    crop: int = Field(224, ge=224, description="Side of a frame in pixels.")


class X3DBackbone(CropBackbone):
    name: ClassVar[str] = "x3d"
    configuration: ClassVar[type[Settings]] = Configuration

    def load(self, weights: Path | None) -> X3D:
        from tasks.features.x3d import X3DSize, load_x3d

        size = X3DSize(side=self.settings.crop)
        return load_x3d(weights, size=size, allow_random=weights is None)
