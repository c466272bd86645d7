"""Every model and every way through the trainer on a stand-in for a GPU; and what that catches."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flows.cli import main
from schemas.errors import ConfigError
from tasks import models
from tasks.features.backbones import KINDS
from tasks.learning import trainer
from tasks.learning.devices import arithmetic, to_device, to_host
from tasks.learning.samples import Samples
from tasks.learning.trainer import Batch, Losses, Trainable, compute_in_batches, train
from tasks.novelcraft import discovery
from tasks.operations import gpu_check
from tasks.predictors import find_predictor, predictor_names
from tests.learning import devices_lab as lab
from tests.learning.stand_in import MODULE, NAME, DeviceError, StandIn
from tests.learning.test_trainer import SAMPLES, VALID, InPhases, Killed, Small
from tests.predictors import examples


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- what it catches


class Careless(Small):
    """A training step with a mistake in it."""

    def __init__(self, mistake: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(epochs=1)
        self.mistake = mistake

    def losses(self, batch: Batch) -> Losses:
        self.mistake(batch.array("images").float())
        return super().losses(batch)


MISTAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another device": lambda x: x + torch.ones(12, 12, 3),
    "another device, a product": lambda x: x.flatten(1) @ torch.ones(432, 2),
    "a buffer that stays behind": lambda x: torch.ones(12)[x[:, 0, 0, 0].long() * 0],
    "another type": lambda x: x.flatten(1).double() @ torch.ones(432, 2, device=NAME),
    "cpu()": lambda x: x.cpu(),
    "to('cpu')": lambda x: x.to("cpu"),
    "numpy()": lambda x: x.numpy(),
    "numpy.asarray": lambda x: np.asarray(x),
    "to_host within a step": to_host,
    "item()": lambda x: x.sum().item(),
    "float()": lambda x: float(x.sum()),
    "tolist()": lambda x: x.tolist(),
    "if tensor": lambda x: 1 if x.sum() > 0 else 2,
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 3],
    "a number of the device as index": lambda x: x[x.argmax() * 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "an upload": lambda x: torch.ones(3).to(x.device),
    "a list as tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "a list as index": lambda x: x[[0, 1]],
    "a copy into a tensor of the host": lambda x: torch.ones(8, 12, 12, 3).copy_(x),
}


@pytest.mark.parametrize("backing", ["meta", "cpu"])
@pytest.mark.parametrize("name", MISTAKES)
def test_each_kind_of_mistake_is_caught(name: str, backing: str) -> None:
    with StandIn(backing), pytest.raises((DeviceError, TypeError, RuntimeError)):
        train(Careless(MISTAKES[name]), SAMPLES.take(np.arange(8)), seed=1, device=NAME)


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "to_device": lambda x: x[to_device(np.array([0, 1]), x.device)],
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "a number where a mask is": lambda x: x.masked_fill(x > 3, 0.0),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_does_well_is_no_mistake(name: str) -> None:
    with StandIn("meta"):
        train(Careless(ALLOWED[name]), SAMPLES.take(np.arange(8)), seed=1, device=NAME)


def test_autocast_is_that_of_cuda() -> None:
    with StandIn("cpu"):
        x, line = torch.ones(2, 4, device=NAME), nn.Linear(4, 3).to(NAME)
        with torch.autocast(NAME, torch.bfloat16):
            assert line(x).dtype == (x @ x.T).dtype == torch.bfloat16
            assert line(x).exp().dtype == line(x).softmax(1).dtype == torch.float32
            assert torch.cat([line(x), x], 1).dtype == torch.float32
            assert (line(x) + 1).dtype == torch.bfloat16
        assert line(x).dtype == torch.float32
        with pytest.raises(TypeError, match="BFloat16"):
            to_host(x.bfloat16())


# ---------------------------------------------------------------- the trainer


def run_there(kind: type[Trainable], device: str, work: Any = None, at: int = 0, **changes: Any):
    """Weights and history of a training, killed after an epoch where one is named."""
    trainable: Any = kind(**{"precision": "float32", **changes})

    def progress(epoch: int, epochs: int, row: Any) -> None:
        if epoch == at:
            raise Killed

    history = train(
        trainable, SAMPLES, seed=1, device=device, valid=VALID, work=work, progress=progress
    )
    state = trainable.layers.state_dict()
    return {name: to_host(value).tobytes() for name, value in state.items()}, history


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Small, {"schedule": "one_cycle", "optimizer": "sgd", "momentum": 0.8}),
        (Small, {"order": "endless", "epoch_samples": 20, "optimizer": "adam"}),
        (InPhases, {"milestones": (1,)}),
    ],
)
def test_a_training_there_has_the_bits_of_the_cpu(tmp_path, kind, changes) -> None:
    """Also one that was killed and went on from its checkpoint."""

    class Undropped(kind):
        def __init__(self, **changes: Any) -> None:
            super().__init__(**changes)
            self.layers[4] = nn.Identity()  # a GPU draws in another order

    changes = {**changes, "epochs": 2}
    expected, history = run_there(Undropped, "cpu", **changes)
    with StandIn("cpu"):
        with pytest.raises(Killed):
            run_there(Undropped, NAME, tmp_path, 1, checkpoint_every=1, **changes)
        state, again = run_there(Undropped, NAME, tmp_path, checkpoint_every=1, **changes)
    assert state == expected
    assert again.equals(history)


def test_a_training_there_goes_on_within_an_epoch(tmp_path, monkeypatch) -> None:
    changes = {"epochs": 2, "checkpoint_seconds": 0}
    write, written = trainer.write_tensors, []

    def dying(path: Any, state: Any, header: Any) -> None:
        write(path, state, header)
        written.append(header["under_way"])
        if len(written) == 4:
            raise Killed

    with StandIn("cpu"):
        expected, history = run_there(InPhases, NAME, **changes)
        monkeypatch.setattr(trainer, "write_tensors", dying)
        with pytest.raises(Killed):
            run_there(InPhases, NAME, tmp_path, **changes)
        state, again = run_there(InPhases, NAME, tmp_path, **changes)
    assert written[3]["step"] == 4
    assert state == expected and again.equals(history)


class Watching(Small):
    """Notes of each step the type of its convolution, and whether products may be TF32."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"epochs": 1, **changes})
        self.seen: list[tuple[torch.dtype, bool]] = []

    def losses(self, batch: Batch) -> Losses:
        hidden = self.layers[0](batch.array("images").permute(0, 3, 1, 2).float())
        self.seen.append((hidden.dtype, torch.backends.cuda.matmul.allow_tf32))
        return super().losses(batch)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("float32", (torch.float32, False)),
        ("tf32", (torch.float32, True)),
        ("bfloat16", (torch.bfloat16, False)),
        ("float16", (torch.float16, False)),
        ("auto", (torch.bfloat16, False)),
    ],
)
def test_a_training_there_is_in_the_arithmetic_that_was_named(precision, expected) -> None:
    watching = Watching(precision=precision)
    with StandIn("cpu"):
        history = train(watching, SAMPLES, seed=1, device=NAME, valid=VALID)
    assert set(watching.seen) == {expected}
    assert watching.settings.precision == ("bfloat16" if precision == "auto" else precision)
    assert history["loss"].is_finite().all()


@pytest.mark.parametrize(
    ("bfloat16", "capability", "expected"),
    [(True, (8, 0), "bfloat16"), (False, (7, 5), "float16"), (False, (6, 1), "float32")],
)
def test_what_a_device_lacks_is_refused(monkeypatch, bfloat16, capability, expected) -> None:
    monkeypatch.setattr(MODULE, "bfloat16", bfloat16, raising=False)
    monkeypatch.setattr(MODULE, "capability", capability, raising=False)
    with StandIn("cpu"):
        assert arithmetic("auto", NAME) == expected
        assert arithmetic("float32", NAME) == "float32" and arithmetic("float16", NAME) == "float16"
        if bfloat16:
            return
        for name in ("bfloat16", "tf32"):
            with pytest.raises(ConfigError, match=f"precision {name}: {NAME} has none; use"):
                arithmetic(name, NAME)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_step_in_float16_that_overflows_is_left_out_there(optimizer) -> None:
    """And nothing waits for the device to know it."""

    class Overflowing(Small):
        steps = 0

        def losses(self, batch: Batch) -> Losses:
            self.steps += 1
            factor = 1e38 if self.steps == 2 else 1.0
            return {"loss": super().losses(batch)["loss"] * factor}

        def step(self, batches, optimizers, phase):
            losses = super().step(batches, optimizers, phase)
            weights.append(self.layers[0].weight.detach().clone())
            return {name: loss.clamp(max=9) for name, loss in losses.items()}

    weights: list[torch.Tensor] = []
    with StandIn("cpu"):
        small = Overflowing(epochs=1, precision="float16", optimizer=optimizer)
        train(small, SAMPLES.take(np.arange(32)), seed=1, device=NAME)
        moved = [bool((a != b).any().inner) for a, b in pairwise(weights)]
    assert moved == [False, True, True]


def test_a_training_in_float16_goes_on_with_its_scale_there(tmp_path) -> None:
    changes = {"epochs": 3, "precision": "float16", "checkpoint_every": 1}
    with StandIn("cpu"):
        expected, history = run_there(Small, NAME, **changes)
        with pytest.raises(Killed):
            run_there(Small, NAME, tmp_path, 2, **changes)
        state, again = run_there(Small, NAME, tmp_path, **changes)
    assert state == expected and again.equals(history)


def test_batches_come_back_in_the_bits_of_the_cpu() -> None:
    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        return {"x": batch.array("images").double().sum((1, 2, 3))}

    expected = compute_in_batches(compute, SAMPLES, "cpu", 7)["x"]
    with StandIn("cpu"):
        np.testing.assert_array_equal(compute_in_batches(compute, SAMPLES, NAME, 7)["x"], expected)


# ---------------------------------------------------------------- models, predictors

EVERY = gpu_check.choices()
# `rotation_released` differs from `rotation` by how a picture is turned.
FEW = [
    (name, network, preset)
    for name, network, preset in EVERY
    if (network in (None, "cifar", "dgcnn") or name in lab.PLAIN)
    and (name, preset) != ("rotation_released", "paper")
]
REST = [pytest.param(*choice, marks=pytest.mark.slow) for choice in EVERY if choice not in FEW]


@pytest.mark.parametrize(("name", "network", "preset"), [*FEW, *REST])
def test_a_model_makes_no_mistake(name, network, preset, monkeypatch) -> None:
    """An epoch of one step and a pass, by shapes alone: no network is too large."""
    lab.without_weights(monkeypatch)
    with StandIn("meta") as device:
        model = gpu_check.made(name, network, preset)
        samples = gpu_check.samples_for(model)
        gpu_check.fit(model, samples, preset, NAME)
        outputs = model.outputs(samples)
        model.head()
    assert bool(device.operations) != (name in gpu_check.ON_HOST)
    assert len(outputs) == len(samples)


@pytest.mark.parametrize("name", ["x3d", "timesformer"])
def test_a_clip_network_casts_on_the_device_it_is_on(name, monkeypatch) -> None:
    lab.without_weights(monkeypatch)
    types = []
    with StandIn("meta"):
        model: Any = gpu_check.made(name, None, "paper", precision="bfloat16")
        samples = gpu_check.samples_for(model, 1)
        gpu_check.fit(model, samples, "paper", NAME)
        layer = next(m for m in model.network.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
        layer.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
        model.outputs(samples)
    assert set(types) == {torch.bfloat16}


def test_every_model_is_there() -> None:
    assert {name for name, _, _ in EVERY} == set(models.names())


@pytest.mark.parametrize("name", ["cross_entropy", "classifier", "symbolic_mlp", "ndcc"])
def test_a_small_model_there_has_the_bits_of_the_cpu(name) -> None:
    kind = models.find(name)
    network = {"cloud": "dgcnn", "image": "cifar"}.get(kind.modality) if kind.uses_network else None
    outputs = {}
    for device in ("cpu", NAME):
        with StandIn("cpu"):
            plain = {"precision": "float32", "cpu_threads": 1, "dropout": 0.0}
            model = gpu_check.made(name, network, "small", **plain)
            samples = gpu_check.samples_for(model, 6)
            gpu_check.fit(model, samples, "small", device)
            outputs[device] = model.outputs(samples), model.fingerprint()
    assert outputs[NAME][1] == outputs["cpu"][1]
    for part in ("logits", "features", "novelty"):
        values = [getattr(one, part) for one, _ in outputs.values()]
        assert values[0] is None or np.array_equal(*values)


BY_FILE: dict[str, dict[str, Any]] = {
    "resnet": {"stem": (64, 7), "groups": [(2, 64, 256, 2, True)] * 4, "last": 3},
    "clip": {
        "embedding": 512,
        "image_size": 224,
        "patch": 32,
        "width": 768,
        "depth": 2,
        "heads": 12,
    },
    "vit": {"image_size": 224, "patch": 16, "width": 384, "depth": 2, "heads": 6, "scaled": True},
    "vgg": {"classes": 3, "layers": [64, "M", 8, "M"], "hidden": 16, "pool": 7, "batch_norm": True},
}


def test_every_network_that_a_file_may_hold_is_there() -> None:
    assert BY_FILE.keys() == KINDS.keys()


@pytest.mark.parametrize("name", ["backbone", "frame_backbone", "view_backbone", "pretrained"])
@pytest.mark.parametrize("kind", BY_FILE)
def test_a_network_by_file_makes_no_mistake(kind, name) -> None:
    """In every model that takes one."""
    with torch.device("meta"):
        network = KINDS[kind](**BY_FILE[kind]).requires_grad_(False).eval()
    if name == "pretrained" and network.last is None:
        pytest.skip("such a file has no classes")
    with StandIn("meta") as device:
        network = network.to_empty(device=NAME)
        model: Any = gpu_check.made(name, None, "paper")
        headed = name in ("backbone", "view_backbone")
        setattr(model, "frozen" if headed else "network", network)
        samples = gpu_check.samples_for(model, 4)
        model.prepare(device=NAME)
        model.classes = 3
        if headed:
            gpu_check.fit(model, samples, "paper", NAME)
        before, outputs = device.operations, model.outputs(samples)
    assert device.operations > before and len(outputs) == 4


PREDICTORS = [(n, preset) for n in predictor_names() for preset in find_predictor(n).presets]


@pytest.mark.parametrize(("name", "preset"), PREDICTORS)
def test_a_predictor_there_has_the_numbers_of_the_cpu(name, preset) -> None:
    features = examples("abcde", 6, 9).features
    predicted = {}
    for device in ("cpu", NAME):
        with StandIn("cpu", patient=True):
            predictor = find_predictor(name)(preset, device=device)
            predictor.fit(examples("abcd", 12, 1), examples("abcd", 8, 2), seed=[3, 0])
            predicted[device] = predictor.predict(features), predictor.novelty(features)
    assert predicted[NAME][0].labels == predicted["cpu"][0].labels
    for left, right in zip(
        (predicted[NAME][0].probabilities, predicted[NAME][1]),
        (predicted["cpu"][0].probabilities, predicted["cpu"][1]),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("preset", list(discovery.PRESETS))
def test_category_discovery_makes_no_mistake(preset) -> None:
    settings = discovery.PRESETS[preset].model_copy(update={"epochs": 1, "batch_size": 4})
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(6, dtype=np.int64) % 2
    labelled = Samples(list("abcdef"), labels, {"images": images})
    with torch.device("meta"):
        backbone, _ = discovery.new_backbone(settings, seed=0)
    with StandIn("meta"):
        discovery.fine_tune(
            backbone.to_empty(device=NAME), labelled, labelled, settings, device=NAME
        )
        discovery.embed(backbone, images, settings, device=NAME)


# ---------------------------------------------------------------- the command


def test_the_command_says_in_a_sentence_that_there_is_no_gpu(capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr()
    assert "torch sees no GPU" in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    ("names", "reason"),
    [("symbolic_mpl", "did you mean symbolic_mlp"), ("symbolic_mlp,colour_rarity", "in NumPy")],
)
def test_the_command_refuses_a_model_that_it_would_not_try(names, reason, capsys) -> None:
    assert main(["doctor", "--gpu", "--device", "cpu", "--models", names]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_tries_models_and_says_which_fail(capsys, monkeypatch) -> None:
    assert main(["doctor", "--gpu", "--device", "cpu", "--models", "symbolic_mlp"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if "symbolic_mlp" in row)
    assert "same bits" in line
    with StandIn("cpu"):
        assert main(["doctor", "--gpu", "--device", NAME, "--models", "symbolic_mlp"]) == 0
        monkeypatch.setattr(models.find("symbolic_mlp"), "kept_epoch", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a defect is not hidden
            main(["doctor", "--gpu", "--device", NAME, "--models", "symbolic_mlp"])
        monkeypatch.setattr(
            models.find("symbolic_mlp"), "kept_epoch", lambda self: torch.ones(2) @ torch.ones(3)
        )
        capsys.readouterr()
        assert main(["doctor", "--gpu", "--device", NAME, "--models", "symbolic_mlp"]) == 1
    assert "FAILS: inconsistent tensor size" in capsys.readouterr().out


def test_a_difference_between_two_trainings_is_said() -> None:
    first, second = (gpu_check._Trial("cpu", "symbolic_mlp", None, "small") for _ in range(2))
    assert gpu_check._difference(first, second) == "same bits"
    name = next(iter(second.state))
    second.state[name] = second.state[name] + 0.25
    assert gpu_check._difference(first, second) == "within 2.5e-01"
