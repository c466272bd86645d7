"""The alternating steps of an epoch: first one of the auxiliary task, then one of the classes.

Rules 9 to 11 of docs/semantic.md. The auxiliary step minimises lambda * loss + L2 over the
task's own layers and what it shares with the classifier, the class step cross entropy + L2 over the
whole classifier; each has an optimiser, so a momentum, of its own. Rows of pictures enter, the
layers are changed in place, means over the epoch leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.semantic.models import views
from tasks.semantic.models.base import NetworkModel
from tasks.semantic.presets import Setup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.semantic.models.views import Pictures
    from tasks.semantic.training import Trained

LEARNED = ("loss", "accuracy", "auxiliary_loss")
_CLASS_ORDER, _AUXILIARY_ORDER = 0, 1


@dataclass(frozen=True, eq=False)
class Updates:
    """The model that is changed in place, the task with its own layers, and what they learn."""

    model: Trained
    task: NetworkModel
    own: nn.ModuleDict
    pictures: Pictures
    labels: np.ndarray
    seed: int

    def epoch(
        self, number: int, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> dict[str, float]:
        """Means over the epoch's steps."""
        import torch

        setup, device = self.model.setup, self.model.device
        count, size, aside = len(self.labels), setup.batch_size, self.task.pictures()
        steps = max(1, (setup.epoch_pictures or count) // size)
        first = (number - 1) * steps
        order = rows_of(self.seed, _CLASS_ORDER, count, first * size, steps * size)
        beside = rows_of(self.seed, _AUXILIARY_ORDER, count, first * aside, steps * max(aside, 1))
        sums = torch.zeros(len(LEARNED), dtype=torch.float64, device=device)
        rate = 0.0
        self.model.layers.train()
        self.own.train()
        for step in range(steps):
            rate = rate_at(setup, first + step, steps)
            for optimizer in optimizers.values():
                optimizer.param_groups[0]["lr"] = rate
            values = [torch.zeros((), device=device)]
            if aside:
                rows = beside[step * aside : (step + 1) * aside]
                values = [self.auxiliary_step(rows, optimizers["auxiliary"])]
            rows = order[step * size : (step + 1) * size]
            values = [*self.class_step(rows, optimizers["classes"]), *values]
            sums += torch.stack([value.double() for value in values])
        self.model.layers.eval()
        means = dict(zip(LEARNED, (sums / steps).tolist(), strict=True))
        if not aside:
            del means["auxiliary_loss"]
        return {"rate": rate, **means}

    def auxiliary_step(self, rows: np.ndarray, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """One step of the auxiliary task; its loss without lambda."""
        setup: Any = self.task.setup
        batch = self._batch(rows, augmented=self.task.augmented)
        with (
            precision(setup, self.model.device),
            _kept_statistics(self.model.layers, not setup.auxiliary_statistics),
        ):
            loss = self.task.loss(self.own, self.model.layers, batch)
        optimizer.zero_grad(set_to_none=True)
        (setup.auxiliary_weight * loss).backward()
        optimizer.step()
        return loss.detach()

    def class_step(
        self, rows: np.ndarray, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the classifier; cross entropy and accuracy of the batch."""
        import torch
        from torch.nn import functional

        batch = self.task.class_view(self._batch(rows, augmented=True))
        labels = torch.from_numpy(self.labels[rows]).to(self.model.device)
        with precision(self.model.setup, self.model.device):
            logits = self.model.forward(batch)[0].float()
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        _fill_gradients(optimizer)
        optimizer.step()
        return loss.detach(), (logits.argmax(1) == labels).float().mean()

    def _batch(self, rows: np.ndarray, *, augmented: bool) -> torch.Tensor:
        import torch

        raw = torch.from_numpy(views.decoded(self.pictures, rows)).to(self.model.device)
        setup = self.model.setup
        seen = views.augmented(raw, setup) if augmented else views.plain(raw, setup)
        return self.model.normalised(seen)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Torch's weight_decay is the gradient of weight_decay times half the sum of squares."""
        import torch

        setup = self.model.setup

        def make(parameters: list[nn.Parameter], decay: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(
                parameters,
                setup.learning_rate,
                momentum=setup.momentum,
                nesterov=True,
                weight_decay=decay,
            )

        made = {"classes": make(list(self.model.layers.parameters()), setup.weight_decay)}
        if self.task.pictures():
            shared = [*self.task.shared(self.model.layers), *self.own.parameters()]
            made["auxiliary"] = make(shared, setup.weight_decay if self.task.decays else 0.0)
        return made

    def state(
        self, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> dict[str, np.ndarray | torch.Tensor]:
        state: dict[str, np.ndarray | torch.Tensor] = {}
        for prefix, module in (("layers.", self.model.layers), ("own.", self.own)):
            state |= {f"{prefix}{name}": value for name, value in module.state_dict().items()}
        for name, optimizer in optimizers.items():
            for index, values in optimizer.state_dict()["state"].items():
                if values["momentum_buffer"] is not None:
                    state[f"momentum.{name}.{index}"] = values["momentum_buffer"]
        return state

    def restore(
        self, state: dict[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        self.model.layers.load_state_dict(under("layers.", state))
        self.own.load_state_dict(under("own.", state))
        for name, optimizer in optimizers.items():
            kept = under(f"momentum.{name}.", state)
            momenta = {int(index): {"momentum_buffer": value} for index, value in kept.items()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": momenta})


def rate_at(setup: Setup, step: int, steps: int) -> float:
    """Rate of a step, counted from 0, of an epoch of `steps`."""
    if setup.schedule == "steps":
        epoch = step // steps + 1
        passed = sum(epoch > milestone for milestone in setup.milestones)
        return setup.learning_rate * setup.decay**passed
    share = (step + 1) / (steps * setup.epochs)
    rise = setup.rise
    height = share / rise if share < rise else (1 - share) / (1 - rise)
    return setup.learning_rate * max(height, 1e-3)


def rows_of(seed: int, order: int, count: int, first: int, length: int) -> np.ndarray:
    """Rows `first` to `first + length` of an endless series of shuffled passes over `count`."""
    passes = range(first // count, (first + length - 1) // count + 1)
    series = [np.random.default_rng([seed, order, number]).permutation(count) for number in passes]
    start = first - passes[0] * count
    return np.concatenate(series)[start : start + length]


def _fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """L2 is on all variables: those that the loss did not reach have a gradient of zero."""
    import torch

    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextlib.contextmanager
def _kept_statistics(layers: nn.ModuleDict, kept: bool) -> Iterator[None]:
    """Leave the running means and variances of all norms as they are."""
    from torch import nn

    norms = [m for m in layers.modules() if kept and isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def precision(setup: Setup, device: str) -> contextlib.AbstractContextManager:
    import torch

    on_gpu = torch.device(device).type == "cuda"
    mixed = setup.mixed_precision and on_gpu and torch.cuda.is_bf16_supported(False)
    return torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext()


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n[len(prefix) :]: value for n, value in tensors.items() if n.startswith(prefix)}
