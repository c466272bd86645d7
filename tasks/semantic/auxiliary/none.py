"""No auxiliary task: the paper's classification-only networks."""

from __future__ import annotations

from typing import ClassVar

from tasks.semantic.auxiliary.base import Auxiliary


class NoTask(Auxiliary):
    name: ClassVar[str] = "none"

    def pictures(self) -> int:
        return 0
