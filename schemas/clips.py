"""Which frames of a video a model of clips is shown."""

from pydantic import Field, model_validator

from schemas.config import Settings


class FrameSampling(Settings):
    """Temporal crops of frames; the defaults are those of X3D-M in KOWL-718."""

    step: int = Field(5, ge=1)
    """Every so many frames one is taken."""
    count: int = Field(16, ge=1)
    """Frames in a temporal crop."""
    crops: int = Field(4, ge=1)
    """Temporal crops, spread evenly from the first to the last frame; one is the middle."""
    short_side: int = Field(256, ge=1)
    """Length in pixels to which the shorter side is scaled."""
    crop: int = Field(224, ge=1)
    """Side of the square cut out of the centre, in pixels."""

    @model_validator(mode="after")
    def _fits(self) -> "FrameSampling":
        if self.crop > self.short_side:
            raise ValueError(f"crop {self.crop} is larger than short_side {self.short_side}")
        return self
