"""Networks without values, so that a model of any size can be tried on the stand-in."""

from typing import Any

import torch

from tasks.models.base import NetworkModel
from tasks.operations import gpu_check
from tests.learning.stand_in import NAME

PLAIN = ("classifier", "cross_entropy")
"""Models that are tried on every network in `make test`."""


def without_weights(monkeypatch: Any) -> None:
    """Layers are made on the stand-in, without values."""
    make = NetworkModel._make_layers

    def shapes_only(self: NetworkModel) -> None:
        with torch.device("meta"):
            make(self)
        self.layers.to_empty(device=NAME)

    monkeypatch.setattr(NetworkModel, "_make_layers", shapes_only)
    take = gpu_check._take_random_weights

    def take_shapes(model: Any, device: str) -> None:
        if model.modality != "clip":
            take(model, device)
            return
        model.prepare(device=device)
        with torch.device("meta"):
            network = model.load(None)
        model.network = network.to_empty(device=NAME)

    monkeypatch.setattr(gpu_check, "_take_random_weights", take_shapes)
