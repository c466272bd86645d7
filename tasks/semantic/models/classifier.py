"""The classes alone: the paper's classification-only networks."""

from __future__ import annotations

from typing import ClassVar

from tasks.semantic.models.base import NetworkModel


class Classifier(NetworkModel):
    name: ClassVar[str] = "classifier"

    def pictures(self) -> int:
        return 0
