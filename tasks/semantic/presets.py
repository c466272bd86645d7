"""Settings of a training by name: `paper` has the constants of the code, `small` is for a CPU.

Rules 5 to 12 of docs/semantic.md. `small` was chosen on a fifth of the CIFAR-10 training pictures
kept aside, never on test pictures. A model has the settings of its class: `Setup`, or one below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.semantic.networks import NAMES, NetworkSettings
from tasks.semantic.odin import OdinSettings

PRESETS = ("paper", "small")


class CpcSettings(Settings):
    """Patches and context of contrastive predictive coding; defaults are the paper's."""

    patch: int = Field(64, ge=4)
    """Side of a patch."""
    stride: int = Field(32, ge=1)
    """Distance of two patches."""
    margin: int = Field(4, ge=0)
    """A patch is cut at random to its side less twice this, then padded by reflection."""
    context: int = Field(256, ge=1)
    """Channels of the context network."""
    layers: int = Field(4, ge=0)
    """Residual layers of the context network after the one that sees rows above."""
    batch_size: int = Field(32, ge=1)
    """Pictures per auxiliary step."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.patch <= 3 * self.margin:
            raise ValueError(f"margin {self.margin} is too wide for a patch of {self.patch}")
        return self


class MaskSettings(Settings):
    """The control's mask, in shares of the picture's side; defaults are the paper's on CIFAR-10."""

    side: float = Field(16 / 32, gt=0, lt=1)
    """Side of the mask."""
    region: float = Field(21 / 32, gt=0, le=1)
    """Side of the region that the mask stays in."""
    offset: float = Field(5 / 32, ge=0, lt=1)
    """Where the region begins; the middle would be 5.5 pixels."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.side > self.region or self.offset + self.region > 1:
            raise ValueError("the mask must lie in its region and the region in the picture")
        return self


class Setup(Settings):
    """Settings of every training; defaults are the paper's for CIFAR-10."""

    network_name: Literal["cifar", "stl", "imagenet"] = "cifar"
    """The variant, which decides the weight of an auxiliary loss where that is not set."""
    network: NetworkSettings = NetworkSettings()
    """Shape of the network."""
    epochs: int = Field(200, ge=1)
    """Epochs of training."""
    epoch_pictures: int | None = Field(50_000, ge=1)
    """Pictures that count as one epoch, whatever the training set's size; none: that size."""
    batch_size: int = Field(512, ge=4)
    """Pictures per class step; the rotation tasks take a quarter of it, four times each."""
    learning_rate: float = Field(0.1, gt=0)
    """Size of the first steps."""
    momentum: float = Field(0.9, gt=0, lt=1)
    """Nesterov momentum, of each of the two optimisers."""
    schedule: Literal["steps", "one_cycle"] = "steps"
    """Rate: lower after each milestone, or one rise and fall over all steps."""
    rise: float = Field(0.2, gt=0, lt=1)
    """Share of the steps in which the rate of one_cycle rises."""
    milestones: tuple[int, ...] = (60, 120, 160)
    """Epochs after which the rate drops."""
    decay: float = Field(0.2, gt=0, le=1)
    """Factor of the rate at each milestone."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 = this times half the sum of squares of all variables, norms and biases included."""
    padding: float = Field(1 / 8, ge=0, lt=1)
    """Share of the side that is added by reflection before the random crop."""
    crop: int | None = Field(None, ge=1)
    """Side of the crop, in the middle outside training; none: the picture's."""
    flip: bool = True
    """Mirror half of the pictures."""
    shrink: int = Field(1, ge=1)
    """Squares of this many pixels become their mean before the network (small presets)."""
    odin: OdinSettings = OdinSettings()
    """ODIN on test after the last epochs; the model odin starts from these settings."""
    evaluations: int = Field(10, ge=1)
    """Evaluations on test, the last one after the last epoch; a trial's number is their mean."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs between evaluations."""
    scoring_batch: int = Field(128, ge=1)
    """Pictures per batch outside training."""
    mixed_precision: bool = True
    """bfloat16 where a GPU has it; never on a CPU."""
    threads: int = Field(1, ge=1)
    """CPU threads, which order the sums; as many networks as there are cores train at once."""

    def evaluated(self, epoch: int) -> bool:
        """Whether test is looked at after this epoch, counted from 1."""
        left = self.epochs - epoch
        return left % self.evaluate_every == 0 and left // self.evaluate_every < self.evaluations


class AuxiliarySetup(Setup):
    """With a second loss, learnt beside the classes."""

    auxiliary_weight: float | None = Field(None, ge=0)
    """Weight lambda of the auxiliary loss; none: what the paper has for the task and network."""
    auxiliary_statistics: bool = True
    """Auxiliary batches move the running statistics of norms that both tasks share (code: yes)."""


class CpcSetup(AuxiliarySetup):
    """With contrastive predictive coding."""

    cpc: CpcSettings = CpcSettings()
    """Patches and context."""


class MaskSetup(Setup):
    """With a square hidden from the class step."""

    mask: MaskSettings = MaskSettings()
    """The mask and where it may lie."""


PAPER: dict[str, dict[str, Any]] = {
    "cifar": {},
    "stl": {
        "network": {"width": 64, "groups": 4},
        "epoch_pictures": 10_000,
        "batch_size": 256,
    },
    "imagenet": {
        "network": {
            "width": 64,
            "groups": 4,
            "dropout": 0.0,
            "stem": 7,
            "stem_bias": False,
            "pooling": "average",
        },
        "epoch_pictures": None,
        "batch_size": 64,
        "padding": 0.0,
        "crop": 224,
        "odin": {"space": "pixel1"},
        "scoring_batch": 32,
    },
}
SMALL: dict[str, Any] = {
    "epochs": 7,
    "batch_size": 64,
    "schedule": "one_cycle",
    "evaluations": 2,
    "auxiliary_statistics": False,
}
SMALL_CPC = {"margin": 1, "context": 64, "layers": 1, "batch_size": 8}
SMALL_NETWORK = {"width": 16, "blocks": 1, "dropout": 0.0, "pooling": "max"}
# Pictures of 32, 32 and 56 pixels enter the small networks; patches of them stand 6 x 6.
SMALL_OF: dict[str, dict[str, Any]] = {
    "cifar": {
        "epoch_pictures": None,
        "network": SMALL_NETWORK,
        "cpc": {**SMALL_CPC, "patch": 12, "stride": 4},
    },
    "stl": {
        "network": {**SMALL_NETWORK, "groups": 4},
        "shrink": 3,
        "cpc": {**SMALL_CPC, "patch": 12, "stride": 4},
    },
    "imagenet": {
        "network": {**PAPER["imagenet"]["network"], "width": 16, "blocks": 1},
        "shrink": 4,
        "cpc": {**SMALL_CPC, "patch": 16, "stride": 8},
    },
}


Kind = TypeVar("Kind", bound=Setup)


def preset_values(network: str, preset: str, kind: type[Setup]) -> Mapping[str, Any]:
    """What the named preset of a network variant changes of the defaults of `kind`."""
    if network not in NAMES:
        raise ConfigError(f"there is no network {network!r}, only {', '.join(NAMES)}")
    if preset not in PRESETS:
        raise ConfigError(f"there is no preset {preset!r}, only {', '.join(PRESETS)}")
    small = {**SMALL, **SMALL_OF[network]} if preset == "small" else {}
    values = {"network_name": network, **PAPER[network], **small}
    return {name: value for name, value in values.items() if name in kind.model_fields}


def setup_of(network: str, preset: str, kind: type[Kind] = Setup) -> Kind:  # type: ignore[assignment]
    """The named preset of a network variant."""
    return kind(**preset_values(network, preset, kind))
