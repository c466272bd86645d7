"""The paper's ODIN, with its step on the input: a second look at a network that is trained.

Its runs have the run of the network as base and put out novelty (score `own`); the score file
tasks/scores/odin.py is ODIN without the step. It starts from the `odin` settings of the network.
"""

from __future__ import annotations

from typing import ClassVar

from schemas.config import Settings
from tasks.semantic.models.base import Model
from tasks.semantic.odin import OdinSettings


class Odin(Model):
    name: ClassVar[str] = "odin"
    gives: ClassVar[frozenset[str]] = frozenset({"novelty"})
    configuration: ClassVar[type[Settings]] = OdinSettings
