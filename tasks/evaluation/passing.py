"""What stages that pass samples through models share: device, loader, the model of a run, rows."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.runs import RunChoices, RunFacts
from schemas.tables import OUTPUTS, PLAIN
from storage.pieces import Part
from tasks import models
from tasks.engine.stage import Shard
from tasks.evaluation.runs import run_id
from tasks.learning.devices import use_threads
from tasks.learning.memory import use_memory
from tasks.learning.samples import Samples
from tasks.models.base import Model
from tasks.scores.base import Outputs

NETWORK, LOADER = "network", "loader"
"""Where a run's settings have those of its network and of what loads its samples."""


class Loader(Protocol):
    """What the module tasks/<benchmark>/samples.py has."""

    LOADER_VERSION: int
    """Raised when the same rows give models other numbers to see."""

    def load(self, shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
        """The samples of a split of the run's protocol, by id; labels count the trained classes.

        A model that embeds gets its features later: its samples need no arrays.
        """

    def ids_of(self, part: Part) -> pl.Series:
        """Samples of a part; only where models that embed fit."""

    def load_part(self, part: Part, ids: Sequence[str], facts: RunFacts) -> Samples:
        """Those of them, in this order, for a model that embeds."""


def loader_of(benchmark: str) -> Loader:
    return cast(Loader, importlib.import_module(f"tasks.{benchmark}.samples"))


class DeviceSettings(Settings):
    """Where models run: recorded with each run, and in no key."""

    device: str = Field("auto", exclude=True)
    """`auto`, `cpu` or `cuda`."""
    trainings: int | None = Field(None, exclude=True)
    """Trainings at once on a CPU; none: as many as their threads leave cores for."""
    trainings_per_gpu: int = Field(1, exclude=True)
    """Trainings at once on each GPU."""
    memory: float = Field(4.0, exclude=True)
    """GB of decoded samples and features that one of them keeps in memory."""

    @classmethod
    def of(cls, config: RunChoices) -> "DeviceSettings":
        return cls(**{name: getattr(config, name) for name in cls.model_fields})


def model_of(facts: RunFacts, files: Mapping[str, str] | None = None) -> Model:
    """The model of a run, not fitted; `files` are paths of checkpoints that it starts from."""
    values = {name: value for name, value in facts.settings.items() if name != LOADER}
    shape = values.pop(NETWORK, None)
    fields = models.find(facts.model).configuration.model_fields
    values |= {name: path for name, path in (files or {}).items() if name in fields}
    network = facts.network if models.find(facts.model).uses_network else None
    return models.make_model(facts.model, values, network, shape)


def use_resources(model: Model, settings: DeviceSettings, shard: Shard) -> None:
    """Threads and memory of this process; a model without `cpu_threads` computes on one."""
    use_threads(getattr(model.settings, "cpu_threads", 1))
    use_memory(settings.memory, shard.work)


def output_rows(
    facts: RunFacts, ids: Sequence[str], outputs: Outputs, classes: Mapping[int, str | None]
) -> pl.DataFrame:
    """Rows of `outputs`, of the plain view; `classes` are the names of the labels, where known."""

    def matrix(name: str) -> pl.Series:
        array: np.ndarray | None = getattr(outputs, name)
        kind = pl.List(pl.Float32)
        if array is None:
            return pl.Series(name, [None] * len(ids), kind)
        return pl.Series(name, array.astype(np.float32)).cast(kind)

    best = outputs.predicted if outputs.logits is None else outputs.logits.argmax(1)
    names = [None] * len(ids) if best is None else [classes[int(label)] for label in best]
    return OUTPUTS.conform(
        pl.DataFrame({"sample_id": list(ids)}, schema={"sample_id": pl.String}).with_columns(
            pl.lit(run_id(facts)).alias("run_id"),
            pl.lit(PLAIN).alias("view"),
            matrix("logits"),
            matrix("features"),
            pl.lit(None, pl.Float64).alias("novelty")
            if outputs.novelty is None
            else pl.Series("novelty", outputs.novelty, pl.Float64),
            pl.Series("predicted", names, pl.String),
        )
    )
