"""The classes alone on CPC's network: what the paper compares CPC with (rule 11).

A stride of 2 in the first convolution, mirrored edges, and norms of two tasks of which one is used.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from schemas.config import Settings
from tasks.models.pictures import PictureClassifier
from tasks.networks.wide_resnet import LIGHT


class LightClassifier(PictureClassifier):
    name: ClassVar[str] = "light_classifier"

    @classmethod
    def network_settings(
        cls, network: str, preset: str | None, changes: Mapping[str, Any] | None = None
    ) -> Settings:
        return super().network_settings(network, preset, changes).model_copy(update=LIGHT)
