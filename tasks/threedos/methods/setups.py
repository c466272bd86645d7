"""All settings of one training, resolved: a preset, what the track asks for, what the user changed.

Preset `paper` is 3DOS's: DGCNN with SGD .1 to 1e-4, other networks with Adam 1e-3 to 1e-5; each
method names what it does differently. `small` is for a CPU and few shapes; it was chosen on
training shapes of ModelNet40 only; averaging four draws of 256 points raised AUROC of the nearest
distance there by .01 to .04.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SerializeAsAny

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.threedos import methods, networks
from tasks.threedos.methods.base import Method, TrainingSettings


class Setup(Settings):
    """All settings of one training."""

    model: SerializeAsAny[TrainingSettings]
    """The loop, the method's layers and its loss."""
    network: SerializeAsAny[Settings] | None
    """Sizes of the network; none for a method that has its own."""

    def values(self) -> dict[str, Any]:
        """All that decides numbers, as JSON; the network's by its name."""
        model = self.model.model_dump(mode="json")
        return model | ({"network": self.network.model_dump(mode="json")} if self.network else {})


def setup_of(
    method: str,
    network: str | None,
    preset: str | None,
    changes: Mapping[str, Any] | None = None,
    network_changes: Mapping[str, Any] | None = None,
) -> Setup:
    """The named preset with changes; without a preset the changes are all settings."""
    kind = methods.find(method)
    check_network(kind, network)
    return Setup(
        model=kind.resolve(preset, changes, network),
        network=networks.find(network).resolve(preset, network_changes) if network else None,
    )


def check_network(kind: type[Method], network: str | None) -> None:
    """A method takes a network or has layers of its own."""
    if kind.uses_network != (network is not None):
        wanted = f"one of {', '.join(networks.names())}" if kind.uses_network else "none"
        raise ConfigError(f"method {kind.name}: network is {network}, expected {wanted}")
