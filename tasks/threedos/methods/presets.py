"""The settings of a training by name: `paper` is 3DOS's, `small` is for a CPU and few shapes.

`paper` (spec threedos 1.5, 1.6): DGCNN with SGD .1 to 1e-4, other networks with Adam 1e-3 to 1e-5;
each method names what it does differently. `small` was chosen on training shapes of ModelNet40
only; averaging four draws of 256 points raised AUROC of the nearest distance there by .01 to .04.
"""

from __future__ import annotations

from typing import Any

from pydantic import SerializeAsAny

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.threedos import methods, networks
from tasks.threedos.methods.base import Method, TrainingSettings

PRESETS = ("paper", "small")
ADAM = {"optimizer": "adam", "learning_rate": 1e-3, "final_rate": 1e-5}
SMALL: dict[str, Any] = {
    "epochs": 60,
    "batch_size": 32,
    "points": 256,
    "votes": 4,
    "learning_rate": 3e-3,
    "initial_weights": "torch",
}


class Setup(Settings):
    """All settings of one training."""

    training: TrainingSettings
    """The loop."""
    method: SerializeAsAny[Settings]
    """The method's layers and loss."""
    network: SerializeAsAny[Settings] | None
    """Sizes of the network; none for a method that has its own."""


def setup_of(method: str, network: str | None, preset: str) -> Setup:
    """The named preset; change it with `model_copy` for a training of one's own."""
    kind = methods.find(method)
    if preset not in PRESETS:
        raise ConfigError(f"there is no preset {preset!r}, only {', '.join(PRESETS)}")
    values = {} if network == "dgcnn" and preset == "paper" else dict(ADAM)
    if preset == "small":
        values |= SMALL
    base = TrainingSettings(**values)
    changes = kind.training(preset, base.optimizer)
    return Setup(
        training=TrainingSettings(**base.model_dump() | changes),
        method=kind.presets[preset],
        network=network_settings(kind, network, preset),
    )


def network_settings(kind: type[Method], network: str | None, preset: str) -> Settings | None:
    """Sizes of the network in the preset; none where the method has its own layers."""
    if kind.uses_network != (network is not None):
        wanted = f"one of {', '.join(networks.NAMES)}" if kind.uses_network else "none"
        raise ConfigError(f"method {kind.name}: network is {network}, expected {wanted}")
    return networks.find(network).PRESETS[preset] if network else None
