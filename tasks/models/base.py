"""What a model is: fitted on samples of known classes, it turns any samples into outputs.

`Samples` (ids, labels, named arrays) enter, `Outputs` leave: logits, features and an own novelty
(higher = more novel), whichever it has. A fitted model is saved as one safetensors file whose
header holds its name, settings and record; no pickle anywhere.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError, TrainingError
from schemas.runs import Origin
from storage.tensors import as_tensors, write_tensors
from tasks import networks
from tasks.engine.plugins import Plugin, put_over
from tasks.learning.compiling import compile_layers
from tasks.learning.devices import choose_device, seeded
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.trainer import (
    SCORING_BATCH,
    Batch,
    Trainable,
    TrainingSettings,
    compute_in_batches,
)
from tasks.learning.trainer import train as train_layers
from tasks.learning.training import Progress
from tasks.scores.base import Head, Outputs

if TYPE_CHECKING:
    import torch
    from torch import nn

NOVELTY_ONLY = frozenset({"novelty"})
CLASSIFIER = frozenset({"logits", "features", "head"})


@dataclass(frozen=True)
class BaseRun:
    """A run that a model builds on: which model, and which of its settings are a condition.

    `model`: it starts from the fitted model; `outputs`: it reads what that put out.
    """

    model: str
    reads: Literal["model", "outputs"] = "model"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Fitting:
    """How a model is fitted: the seed, where, a folder for checkpoints, who is told of epochs."""

    seed: int = 0
    device: str = "auto"
    work: Path | None = None
    progress: Progress | None = None
    keep: Callable[[Model, int], None] | None = None
    """Called with the model and the number of each epoch that the model says to keep."""


class Model(Plugin, ABC):
    """Subclasses set the class variables and implement `_fit`, `_outputs`, `state`, `restore`.

    One that trains layers is a `NetworkModel` and needs less. The mean picture::

        class MeanPicture(Model):
            name: ClassVar[str] = "mean_picture"
            modality: ClassVar[str] = "image"
            gives: ClassVar[frozenset[str]] = frozenset({"novelty"})

            def _fit(self, train, valid, fitting):
                self.mean = train.images()[:].mean(0)
                return pl.DataFrame()

            def _outputs(self, samples):
                far = np.square(samples.images()[:] - self.mean).mean((1, 2, 3))
                return Outputs(novelty=far)

            def state(self):
                return {"mean": self.mean}

            def restore(self, state):
                self.mean = state["mean"].numpy()
    """

    modality: ClassVar[str]
    """The kind of sample that it takes: image, cloud, clip, states, features, or outputs of
    other `runs`."""
    gives: ClassVar[frozenset[str]] = NOVELTY_ONLY
    """What it puts out for scores: of logits, features, novelty and head."""
    uses_network: ClassVar[bool] = False
    """Whether it stands on a network of tasks/networks, chosen with --networks."""
    seeded: ClassVar[bool] = True
    """Whether anything in it is drawn at random; if not, it has one run without a seed."""
    needs_weights: ClassVar[bool] = False
    """Whether it works only from a checkpoint file, which its setting `weights` names."""
    embeds: ClassVar[tuple[str, ...]] = ()
    """Settings that decide `embed`. Where there are some, samples are embedded once for all
    protocols, and what it is fitted on and puts out of is the array `features`."""
    origin: ClassVar[Origin] = "trained"
    """`frozen` where nothing of it is learnt here."""

    def __init__(
        self,
        settings: Settings | str = "paper",
        network: str | None = None,
        network_settings: Settings | None = None,
    ) -> None:
        if isinstance(settings, str):
            preset = settings
            settings = self.resolve(preset, network=network)
            if network is not None and network_settings is None:
                network_settings = self.network_settings(network, preset)
        if type(settings) is not self.configuration:
            raise ConfigError(
                f"model {self.name} takes {self.configuration.__module__}."
                f"{self.configuration.__name__}, not {type(settings).__name__}"
            )
        self.check_network(network)
        self.settings: Any = settings
        self.network_name, self.network_shape = network, network_settings
        self.classes = 0
        self.record: dict[str, Any] = {}
        """What is known of a fitted model beside its tensors, as JSON."""
        self.device = "cpu"
        self.bases: tuple[Model, ...] = ()

    # ------------------------------------------------------------ choices, before any work

    @classmethod
    def resolve(
        cls,
        preset: str | None = None,
        changes: Mapping[str, Any] | None = None,
        network: str | None = None,
    ) -> Any:
        """The settings of a preset on that network, with what was asked to differ."""
        if preset is None:
            return super().resolve(None, changes)
        if cls.presets and preset not in cls.presets:
            names = ", ".join(cls.presets)
            raise ConfigError(f"{cls.name} has no preset {preset!r}; there are: {names}")
        return super().resolve(None, put_over(cls.preset_values(preset, network), changes or {}))

    @classmethod
    def preset_values(cls, preset: str, network: str | None) -> dict[str, Any]:
        """Settings of a preset that differ from the defaults; those of its network win."""
        below = {} if network is None else networks.find(network).training(preset)
        network_values = {
            name: value for name, value in below.items() if name in cls.configuration.model_fields
        }
        return {**cls.presets.get(preset, {}), **network_values}

    @classmethod
    def network_settings(
        cls, network: str, preset: str | None, changes: Mapping[str, Any] | None = None
    ) -> Settings:
        """The network's settings as this model needs them."""
        return networks.find(network).resolve(preset, changes)

    @classmethod
    def check_network(cls, network: str | None) -> None:
        """A model takes a network of its modality, or has layers of its own."""
        if not cls.uses_network and network is None:
            return
        fitting = networks.names_of(cls.modality) if cls.uses_network else ()
        if network not in fitting:
            expectation = f"one of {', '.join(fitting)}" if fitting else "none"
            raise ConfigError(f"model {cls.name}: network is {network}, expected {expectation}")

    @classmethod
    def variants(
        cls, preset: str, changes: Mapping[str, Any], network: str | None, names: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """What differs from the preset, once for each run of a choice; `names` are all models."""
        return [changes]

    @classmethod
    def bases_of(cls, settings: Any) -> tuple[BaseRun, ...]:
        """Runs that one with these settings builds on."""
        return ()

    @classmethod
    def weights_files(cls, settings: Any) -> dict[str, Path]:
        """Checkpoint files that it starts from, by name."""
        path = getattr(settings, "weights", None)
        return {} if path is None else {"weights": path}

    @classmethod
    def check_classes(cls, settings: Any, classes: int, protocol: str) -> None:
        """Refuse a file of weights that is for another number of known classes.

        It is asked before anything is trained; a model that learns its last layer takes any number.
        """

    @classmethod
    def origin_of(cls, settings: Any) -> Origin:
        """Where the weights of a run with these settings come from."""
        return cls.origin

    # ------------------------------------------------------------ fitting

    def prepare(self, *, device: str, bases: Sequence[Model] = ()) -> None:
        """Choose the device and take the fitted models that this one starts from."""
        expected = [base.model for base in self.bases_of(self.settings) if base.reads == "model"]
        names = [base.name for base in bases]
        if names != expected:
            raise ConfigError(
                f"model {self.name} builds on a fitted {', '.join(expected) or '(none)'}, found "
                f"{', '.join(names) or 'none'}; pass it as base"
            )
        self.bases = tuple(bases)
        self.device = choose_device(device)

    def fit(
        self,
        train: Samples,
        valid: Samples | None = None,
        fitting: Fitting | None = None,
        bases: Sequence[Model] = (),
    ) -> pl.DataFrame:
        """Learn from `train`; returns one row per epoch (or per candidate that was tried)."""
        fitting = fitting or Fitting()
        if not len(train):
            raise ConfigError(f"model {self.name}: no training samples")
        if train.labels is not None and (train.labels == NOVEL).any():
            raise ConfigError(
                f"model {self.name}: {int((train.labels == NOVEL).sum())} training samples are "
                "labelled novel (-1); train on known classes only"
            )
        self.prepare(device=fitting.device, bases=bases)
        self.classes = 0 if train.labels is None else int(train.labels.max()) + 1
        return self._fit(train, valid, fitting)

    @abstractmethod
    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        """See `fit`."""

    # ------------------------------------------------------------ use

    def outputs(self, samples: Samples) -> Outputs:
        """What one pass leaves of each sample."""
        outputs = self._outputs(samples)
        names = ("logits", "features", "novelty")
        gives = {name for name in names if getattr(outputs, name) is not None}
        expected = self.puts_out()
        if gives != expected or len(outputs) != len(samples):
            raise TrainingError(
                f"model {self.name} put out {', '.join(sorted(gives))} of {len(outputs)} samples, "
                f"expected {', '.join(sorted(expected))} of {len(samples)}"
            )
        if outputs.novelty is not None:
            bad = np.flatnonzero(~np.isfinite(outputs.novelty))
            if bad.size:
                raise TrainingError(
                    f"model {self.name}: the novelty of {bad.size} samples is not finite, first "
                    f"{samples.ids[bad[0]]}: {outputs.novelty[bad[0]]}; the training diverged, "
                    "lower its rate"
                )
        return outputs

    @abstractmethod
    def _outputs(self, samples: Samples) -> Outputs:
        """See `outputs`."""

    def puts_out(self) -> frozenset[str]:
        """What `outputs` has; less than `gives` where a file of weights lacks something."""
        return self.gives - {"head"}

    def embed(self, samples: Samples) -> np.ndarray:
        """Frozen features (N, D) of a prepared model; one that `embeds` has its own."""
        raise TypeError(f"model {self.name} names settings that it embeds by, but has no embed")

    def head(self) -> Head | None:
        """How logits follow from features, where that is norm, activation and a linear layer."""
        return None

    @abstractmethod
    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        """What `fit` learned, without the settings and without the bases."""

    @abstractmethod
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave."""

    def fingerprint(self) -> str:
        """sha256 of the learned state."""
        digest = hashlib.sha256(self.name.encode())
        for name, value in sorted(as_tensors(self.state()).items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.numpy().data)
        return digest.hexdigest()

    def base_fingerprints(self) -> list[str]:
        return [base.fingerprint() for base in self.bases]

    def save(self, path: Path) -> None:
        shape = self.network_shape
        header = {
            "model": self.name,
            "settings": self.settings.model_dump(mode="json"),
            "network": self.network_name,
            "network_settings": None if shape is None else shape.model_dump(mode="json"),
            "classes": self.classes,
            "record": self.record,
            "bases": self.base_fingerprints(),
        }
        write_tensors(path, self.state(), header)


class NetworkModel(Model, Trainable):
    """A model whose layers the one trainer fits.

    Subclasses implement `build`, `losses` of a batch to learn from and `compute` of a batch to put
    out. What they must know of the training samples, `survey` puts into the record first. A
    classifier of feature rows::

        class Linear(NetworkModel):
            name: ClassVar[str] = "linear"
            modality: ClassVar[str] = "features"
            gives: ClassVar[frozenset[str]] = frozenset({"logits", "features"})
            presets = {"small": {"epochs": 5, "batch_size": 32, "learning_rate": 0.1}}

            def survey(self, train):
                return {"width": train.array("features").shape[1]}

            def build(self):
                return {"line": nn.Linear(self.record["width"], self.classes)}

            def losses(self, batch):
                logits = self.compute(batch)["logits"]
                return {"loss": functional.cross_entropy(logits, batch.labels)}

            def compute(self, batch):
                rows = batch.array("features")
                return {"logits": self.layers["line"](rows), "features": rows}
    """

    configuration: ClassVar[type[Settings]] = TrainingSettings
    layers: Any
    """The nn.ModuleDict of all its layers."""
    network: Any = None
    """The network below, where it uses one; its layers are `layers["network"]`."""
    channels_last: ClassVar[bool] = False
    """Whether the weights of convolutions lie so in memory; saved files do not differ."""

    def survey(self, train: Samples) -> dict[str, Any]:
        """What it must know of the training samples before its layers are built, as JSON."""
        return {}

    @abstractmethod
    def build(self) -> Mapping[str, nn.Module]:
        """Layers beside the network's, made of settings, classes and record."""

    def initialise(self) -> None:
        """Other initial weights than torch's, drawn after all layers are there."""

    def start(self, seed: int) -> None:
        """Take over weights of a base or of a file; the record says where they come from."""
        self.record["initial_weights"] = f"random, seed {seed}"

    def keeps(self, epoch: int) -> bool:
        """Whether the layers as this epoch leaves them are kept beside the last ones."""
        return False

    @abstractmethod
    def compute(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """What one pass leaves of a batch: what `gives` names."""

    def scoring_batch(self) -> int:
        """Samples of a batch outside of training."""
        return int(getattr(self.settings, "scoring_batch", SCORING_BATCH))

    def _fit(self, train: Samples, valid: Samples | None, fitting: Fitting) -> pl.DataFrame:
        self.record = self.survey(train)
        with seeded([fitting.seed], self.device):
            self._make_layers()
            self.initialise()
        self.start(fitting.seed)

        return train_layers(
            self,
            train,
            seed=fitting.seed,
            device=self.device,
            valid=valid,
            work=fitting.work,
            identity=self.base_fingerprints(),
            progress=fitting.progress,
            keep=partial(_keep_epoch, self, fitting.keep),
        )

    def _make_layers(self) -> None:
        import torch
        from torch import nn

        layers: dict[str, nn.Module] = {}
        if self.network_name is not None:
            self.network = networks.find(self.network_name)(cast(Settings, self.network_shape))
            layers["network"] = self.network.layers
        self.layers = nn.ModuleDict({**layers, **self.build()})
        if self.channels_last:
            # After the first weights are drawn: the order of draws is that of the memory.
            self.layers.to(memory_format=torch.channels_last)

    def _outputs(self, samples: Samples) -> Outputs:
        arrays = self.in_batches(self.compute, samples)
        novelty = arrays.get("novelty")
        return Outputs(
            arrays.get("logits"),
            arrays.get("features"),
            None if novelty is None else novelty.astype(np.float64),
        )

    def in_batches(
        self,
        compute: Callable[[Batch], Mapping[str, torch.Tensor]],
        samples: Samples,
        batch_size: int | None = None,
    ) -> dict[str, np.ndarray]:
        """`compute` of every batch, without gradients; its tensors joined as arrays."""
        tf32, batch_size = self.settings.precision == "tf32", batch_size or self.scoring_batch()
        return compute_in_batches(compute, samples, self.device, batch_size, tf32=tf32)

    def state(self) -> dict[str, np.ndarray | torch.Tensor]:
        return dict(self.layers.state_dict())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        with seeded([0], self.device):
            self._make_layers()
        self.layers.load_state_dict(dict(state))
        self.layers.to(self.device).eval()
        compile_layers(self)


def _keep_epoch(model: NetworkModel, keep: Callable[[Model, int], None] | None, epoch: int) -> None:
    if keep is not None and model.keeps(epoch):
        keep(model, epoch)
