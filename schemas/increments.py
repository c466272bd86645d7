"""Settings of the open-world increments, shared by every benchmark that is cut into them."""

from typing import Literal

from pydantic import Field

from schemas.config import Settings


class IncrementSettings(Settings):
    """The open-world protocol."""

    novel_class_order: Literal["least_frequent_first", "most_frequent_first"] = (
        "least_frequent_first"
    )
    """Order of novel classes: as released (least), or as the paper's text says (most)."""
    group_size: Literal["ceil", "floor"] = "ceil"
    """Novel classes per increment: quotient rounded up (Table 1) or down (the text)."""
    increments: int = Field(5, ge=1, le=10_000)
    """Increments per pool."""
    pooling: Literal["per_release", "one_pool"] = "per_release"
    """Cut each later release alone, or all of them together."""
    seed: int = Field(0, ge=0)
    """Decides which sample goes to which fold."""
