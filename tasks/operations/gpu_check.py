"""Whether every model works on this machine's GPU: a forward pass, a training step, the same again.

`novelty doctor --gpu` prints a line for each model: whether two trainings from one seed give the
same bits (or how far they are apart), how many samples a second it trains on and passes, and how
many the CPU does. Samples are drawn and weights are random; nothing is read or written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.errors import ConfigError, NoveltyError
from storage.tensors import as_tensors
from tasks import models, networks
from tasks.learning.devices import arithmetic, choose_device
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.training import Progress
from tasks.models.base import Fitting, Model, NetworkModel
from tasks.scores.base import Outputs

if TYPE_CHECKING:
    import torch

PRESETS = ("small", "paper")
EPOCHS = 3
ONE_EPOCH = {"epochs": 1, "epoch_samples": 1, "evaluations": 1, "choose": "fixed"}
# So that few samples are enough, and one base is.
CHANGES: dict[str, dict[str, Any]] = {
    "odin": {"base": "vgg_classifier"},
    "pixel_gaussian": {"side": 1},
    "patch_memory": {"candidates": 500},
    "deep_ensemble": {"members": 2},
}
ON_HOST = ("colour_rarity", "multimodal", "pixel_gaussian")
"""Models that compute in NumPy, whatever the device."""
SIDES = {"cifar": 32, "stl": 96, "imagenet": 256}
CLASSES, POINTS, SIDE = 3, 2048, 256
WORDS = np.array(["", "log", "sand"])

Choice = tuple[str, str | None, str]


def choices(presets: Sequence[str] = PRESETS) -> list[Choice]:
    """Every model on every network that it fits, in each of the presets."""
    return [
        (name, network, preset)
        for name in models.names()
        for network in _networks(name)
        for preset in presets
        if not _unfit(name, network, preset)
    ]


def _networks(name: str) -> tuple[str | None, ...]:
    kind = models.find(name)
    return networks.names_of(kind.modality) if kind.uses_network else (None,)


def _unfit(name: str, network: str | None, preset: str) -> bool:
    """Whether the pictures that the network is for are too small for the model."""
    kind, side = models.find(name), SIDES.get(network or "")
    if side is None:
        return False
    reason: Any = getattr(kind, "unfit")  # noqa: B009
    return reason(kind.resolve(preset, {}, network), side, side) is not None


def made(name: str, network: str | None, preset: str, **changes: Any) -> Model:
    """In that preset, but for one epoch of one step."""
    kind = models.find(name)
    changes = {**ONE_EPOCH, **CHANGES.get(name, {}), **changes}
    fields = kind.configuration.model_fields
    fitting = {key: value for key, value in changes.items() if key in fields}
    settings = kind.resolve(preset, fitting, network)
    below = None if network is None else kind.network_settings(network, preset)
    return kind(settings, network, below)


def samples_for(model: Model, count: int = 8) -> Samples:
    """Drawn samples of the kind and size that it was made for."""
    draws = np.random.default_rng(0)
    ids, labels = [str(row) for row in range(count)], np.arange(count, dtype=np.int64) % CLASSES
    arrays: dict[str, Any]
    if model.modality == "clip":
        shown = model.settings
        shape = (count, shown.views, shown.count, shown.crop, shown.crop, 3)
        return Samples.unnamed(clips=draws.integers(0, 256, shape, dtype=np.uint8))
    if model.modality == "cloud":
        clouds = draws.normal(size=(count, POINTS, 3)).astype(np.float32)
        arrays = {"clouds": clouds / np.linalg.norm(clouds, axis=2).max(1)[:, None, None]}
    elif model.modality == "states":
        frames = (count, model.settings.context + 1)
        arrays = {"counts": draws.integers(0, 9, (*frames, 4)).astype(np.float32)}
        arrays |= {"selected_item": WORDS[draws.integers(0, 3, frames)]}
    elif model.modality == "runs":
        arrays = {name: draws.normal(size=count) for name in ("visual", "symbolic")}
    else:
        side = SIDES.get(model.network_name or "", SIDE)
        arrays = {"images": draws.integers(0, 256, (count, side, side, 3), dtype=np.uint8)}
    return Samples(ids, labels, arrays)


def fit(
    model: Model, samples: Samples, preset: str, device: str, progress: Progress | None = None
) -> None:
    """From seed 1, after its bases; frozen networks get random weights."""
    if model.needs_weights:
        _take_random_weights(model, device)
        return
    bases = [
        made(base.model, model.network_name, preset, **_shared(model))
        for base in model.bases_of(model.settings)
        if base.reads == "model"
    ]
    for base in bases:
        fit(base, samples, preset, device)
    valid = samples
    if samples.labels is not None:
        labels = np.where(np.arange(len(samples)) % 4 == 3, NOVEL, samples.labels)
        valid = Samples(samples.ids, labels, samples.arrays, about=samples.about)
    model.fit(samples, valid, Fitting(seed=1, device=device, progress=progress), bases)


def _shared(model: Model) -> dict[str, Any]:
    """Settings that its base has as it has them."""
    names = ("cpu_threads", "precision", "dropout")
    return {name: getattr(model.settings, name) for name in names if hasattr(model.settings, name)}


def _take_random_weights(model: Any, device: str) -> None:
    from tasks.features.resnet import ResNet
    from tasks.learning.devices import seeded

    model.prepare(device=device)
    model.classes = CLASSES
    with seeded([0], "cpu"):
        if model.modality == "clip":
            network: Any = model.load(None)
        else:
            groups: list[tuple[int, int, int | None, int, bool]]
            groups = [(3, width, None, 1, False) for width in (16, 32, 64)]
            network = ResNet(stem=(16, 3), groups=groups, last=CLASSES).requires_grad_(False).eval()
    model.network = network.to(device)


# ---------------------------------------------------------------- what is printed


def examine_device(
    device: str = "cuda", presets: Sequence[str] = ("small",), names: Sequence[str] = ()
) -> int:
    """A line for each model; 0 if all work, 1 if not. A device that is not there is refused."""
    for name in names:
        models.find(name)  # refuses what is none
        if name in ON_HOST:
            raise ConfigError(f"model {name} computes in NumPy, on no device; name others")
    device = choose_device(device)
    print(_described(device))
    print(f"{'model':42} {'again':>16} {'trained/s':>10} {'passed/s':>10}  on the CPU")
    failed = 0
    for line, works in _lines(device, presets, names):
        failed += not works
        print(line, flush=True)
    print(f"{failed} models fail" if failed else "all models work")
    return 1 if failed else 0


def _described(device: str) -> str:
    import torch

    precision = arithmetic("auto", device)
    if torch.device(device).type != "cuda":
        return f"device {device}, {torch.get_num_threads()} threads, mixed precision is {precision}"
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device)
    return (
        f"device {device}: {name}, {memory.total_memory / 2**30:.0f} GiB, mixed precision is "
        f"{precision}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
    )


def _lines(device: str, presets: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    for name, network, preset in choices(presets):
        if name in ON_HOST or (names and name not in names):
            continue
        title = " ".join(part for part in (name, network, preset) if part)
        try:
            yield f"{title:42} {_measured(device, name, network, preset)}", True
        except (NoveltyError, RuntimeError, TypeError, ValueError) as error:
            yield f"{title:42} FAILS: {str(error).splitlines()[0]}", False


def _measured(device: str, name: str, network: str | None, preset: str) -> str:
    first, second = (_Trial(device, name, network, preset) for _ in range(2))
    text = f"{_difference(first, second):>16} {second.rates()}"
    if device == "cpu":
        return text
    return f"{text}  {_Trial('cpu', name, network, preset).rates()}"


class _Trial:
    """A model that is fitted for a step and put to use, and how long both took."""

    def __init__(self, device: str, name: str, network: str | None, preset: str) -> None:
        model = made(name, network, preset, epochs=EPOCHS)
        samples, ends = samples_for(model), [time.perf_counter()]

        def progress(epoch: int, epochs: int, row: object) -> None:
            ends.append(time.perf_counter())

        fit(model, samples, preset, device, progress)
        ends.append(time.perf_counter())
        self.trained = 0.0
        self.state: dict[str, torch.Tensor] = {}
        if not model.needs_weights:
            # The last epoch: the first ones load kernels.
            seconds = ends[-2] - ends[-3] if len(ends) > EPOCHS else ends[-1] - ends[0]
            self.trained = _in_an_epoch(model, samples) / seconds
            self.state = as_tensors(model.state())
        model.outputs(samples)
        started = time.perf_counter()
        self.outputs = model.outputs(samples)
        self.passed = len(samples) / (time.perf_counter() - started)

    def rates(self) -> str:
        trained = f"{self.trained:10.1f}" if self.trained else f"{'frozen':>10}"
        return f"{trained} {self.passed:10.1f}"


def _in_an_epoch(model: Model, samples: Samples) -> int:
    if not isinstance(model, NetworkModel):
        return len(samples)
    return sum(map(len, model.streams()[0].batches(samples, 1, 1, 0, None)))


def _difference(first: _Trial, second: _Trial) -> str:
    """How far two trials are apart: in weights and in what the models put out."""
    pairs = [(value.numpy(), second.state[name].numpy()) for name, value in first.state.items()]
    pairs += list(zip(_arrays(first.outputs), _arrays(second.outputs), strict=True))
    if all(np.array_equal(left, right, equal_nan=True) for left, right in pairs):
        return "same bits"
    apart = max(float(np.max(np.abs(left - right), initial=0)) for left, right in pairs)
    return f"within {apart:.1e}"


def _arrays(outputs: Outputs) -> list[np.ndarray]:
    every = (outputs.logits, outputs.features, outputs.novelty)
    return [array for array in every if array is not None]
