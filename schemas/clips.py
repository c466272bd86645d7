"""Which frames of a video a model of clips is shown."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.config import Settings

Preprocessing = Literal["release", "fair", "spread"]


class FrameSampling(Settings):
    """Temporal crops of frames; the defaults are those of X3D-M in KOWL-718.

    `preprocessing` says where temporal crops begin and what of a picture is cut out; what else
    goes with a name is in `by_preprocessing`, and stands unless it is set by itself.
    """

    by_preprocessing: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    preprocessing: Preprocessing = Field(
        "spread",
        description="Temporal crops from first to last frame and the centre (spread), as "
        "KOWL-718's release, or as FAIR tests its weights (fair).",
    )
    step: int = Field(5, ge=1, description="Every so many frames one is taken.")
    count: int = Field(16, ge=1, description="Frames in a temporal crop.")
    crops: int = Field(4, ge=1, description="Temporal crops.")
    short_side: int = Field(
        256, ge=1, description="Length in pixels to which the shorter side is scaled."
    )
    crop: int = Field(224, ge=1, description="Side of the square that is cut out, in pixels.")

    @model_validator(mode="before")
    @classmethod
    def _goes_with_the_name(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get("preprocessing", cls.model_fields["preprocessing"].default)
        return {**cls.by_preprocessing.get(str(name), {}), **values}

    @model_validator(mode="after")
    def _fits(self) -> "FrameSampling":
        if self.crop > self.short_side:
            raise ValueError(f"crop {self.crop} is larger than short_side {self.short_side}")
        return self

    @property
    def squares(self) -> int:
        """Squares of a picture: the centre, or both ends of its longer side too."""
        return 3 if self.preprocessing == "fair" else 1

    @property
    def views(self) -> int:
        """Temporal crops of all squares."""
        return self.crops * self.squares
