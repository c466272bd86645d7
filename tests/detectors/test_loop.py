"""The training loop: exact resume, balanced sampling, rates, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from schemas.errors import ConfigError, NoveltyError
from storage.tensors import read_header
from tasks.detectors import find_detector
from tasks.learning.devices import seeded
from tasks.learning.loop import TrainingSettings, in_batches, train
from tasks.learning.samples import Samples
from tests.detectors.synthetic import samples, tiny

SETTINGS = {"epochs": 5, "batch_size": 8, "learning_rate": 0.01, "checkpoint_every": 2}


class Killed(Exception):
    pass


def network() -> nn.Module:
    """Dropout and batch statistics: whatever is random or remembered must survive a kill."""
    with seeded([7], "cpu"):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(4 * 31 * 31, 3),
        )  # fmt: skip


def run(data, checkpoint=None, kill_after=None, seed=1, valid=None, **changes):
    net = network()

    def loss(images, labels):
        logits = net(images.permute(0, 3, 1, 2).float() / 255)
        return {"loss": functional.cross_entropy(logits, labels)}

    def progress(epoch, epochs, values):
        if epoch == kill_after:
            raise Killed

    history = train(
        net,
        loss,
        data,
        TrainingSettings(**{**SETTINGS, **changes}),
        seed=seed,
        device="cpu",
        valid=valid,
        checkpoint=checkpoint,
        progress=progress,
    )
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}, history


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kill_after", [1, 2, 3, 4, 5])
def test_killed_and_started_again_gives_the_same_bits(train, tmp_path, optimizer, kill_after):
    checkpoint = tmp_path / "run" / "network.safetensors"
    changes = {"optimizer": optimizer, "weight_decay": 0.01, "milestones": (3,)}
    undisturbed, history = run(train, **changes)
    with pytest.raises(Killed):
        run(train, checkpoint, kill_after, **changes)
    assert checkpoint.is_file() == (kill_after >= 2)
    resumed, again = run(train, checkpoint, **changes)
    assert_same_bits(resumed, undisturbed)
    assert again.equals(history)
    assert again["epoch"].to_list() == [1, 2, 3, 4, 5]
    assert len(read_header(checkpoint)["history"]) == 5


def test_a_finished_run_is_not_repeated(train, tmp_path):
    first, _ = run(train, tmp_path / "c.safetensors")
    written = (tmp_path / "c.safetensors").read_bytes()
    second, _ = run(train, tmp_path / "c.safetensors", kill_after=5)
    assert_same_bits(first, second)
    assert (tmp_path / "c.safetensors").read_bytes() == written


def test_a_checkpoint_of_another_run_is_refused(train, tmp_path):
    path = tmp_path / "c.safetensors"
    run(train, path, epochs=1)
    changed = Samples(train.ids, train.labels, {"images": 255 - train.array("images")})
    for data, changes in ((train, {"seed": 2}), (train, {"learning_rate": 0.1}), (changed, {})):
        with pytest.raises(ConfigError, match="belongs to another run"):
            run(data, path, **{"epochs": 1, **changes})
    run(train, path, epochs=1, checkpoint_every=7)


@pytest.mark.parametrize("name", ["ndcc", "deep_ensemble", "autoencoder_patch"])
def test_detectors_take_up_their_checkpoints(name, classifier, train, tmp_path):
    kind = find_detector(name)
    base = classifier if kind.requires else None
    settings = tiny(kind) if name == "deep_ensemble" else tiny(kind, epochs=3, checkpoint_every=1)

    def fit(folder, progress=None):
        detector = kind(settings)
        detector.fit(train, seed=3, device="cpu", checkpoints=folder, progress=progress, base=base)
        return {
            key: value.numpy() for key, value in detector.state().items() if key != "input_size"
        }

    def kill(epoch, epochs, values):
        if epoch == epochs - 1:
            raise Killed

    undisturbed = fit(None)
    with pytest.raises(Killed):
        fit(tmp_path / "run", kill)
    assert_same_bits(fit(tmp_path / "run"), undisturbed)


PROGRAM = """
import os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.detectors.test_loop import run
from tests.detectors.synthetic import samples
from tasks.learning import loop as training
write = training.write_tensors
def die(path, state, header):
    write(path, state, header)
    if len(header["history"]) == 4:
        os.kill(os.getpid(), 9)
training.write_tensors = die
run(samples(("images",), 48, 0, seed=1), Path(sys.argv[1]))
"""


def test_kill_minus_nine(train, tmp_path):
    path = tmp_path / "c.safetensors"
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert len(read_header(path)["history"]) == 4
    resumed, _ = run(train, path)
    assert_same_bits(resumed, run(train)[0])


def test_balanced_sampling_draws_every_class_equally():
    labels = np.r_[np.zeros(90), np.ones(10)].astype(np.int64)
    data = Samples([str(i) for i in labels], labels, {"images": np.zeros((100, 2, 2, 3), np.uint8)})
    weight = nn.Linear(1, 1)
    seen = {True: [], False: []}
    for balanced, drawn in seen.items():

        def loss(images, labels, drawn=drawn):
            drawn += labels.tolist()
            return {"loss": weight.weight.sum()}

        settings = TrainingSettings(epochs=20, batch_size=10, learning_rate=1e-3, balanced=balanced)
        train(weight, loss, data, settings, seed=0, device="cpu")
        assert len(drawn) == 2000
    assert abs(np.mean(seen[True]) - 0.5) < 0.05
    assert sum(seen[False]) == 200


def test_rates_fall_after_the_milestones():
    weight = nn.Parameter(torch.zeros(1))
    holder = nn.Module()
    holder.weight = weight
    data = Samples(["a"], None, {"images": np.zeros((1, 2, 2, 3), np.uint8)})
    values = []

    def loss(images, labels):
        values.append(weight.item())
        return {"loss": -weight.sum()}

    settings = TrainingSettings(
        epochs=6, batch_size=1, learning_rate=1.0, optimizer="sgd", momentum=0.0,
        milestones=(2, 4), balanced=False,
    )  # fmt: skip
    train(holder, loss, data, settings, seed=0, device="cpu")
    np.testing.assert_allclose(
        np.diff([*values, weight.item()]), [1, 1, 0.1, 0.1, 0.01, 0.01], 1e-4
    )


def test_validation_is_measured_and_changes_nothing(train, valid):
    alone, _ = run(train)
    measured, history = run(train, valid=valid)
    assert_same_bits(alone, measured)
    assert history.columns == ["epoch", "loss", "valid_loss"]
    assert history["loss"][-1] < history["loss"][0]


def test_the_seed_matters(train):
    assert any((run(train, seed=1)[0][n] != run(train, seed=2)[0][n]).any() for n in run(train)[0])


def test_a_loss_that_is_not_a_number_stops_the_training(train):
    with pytest.raises(NoveltyError, match="lower learning_rate"):
        run(train, optimizer="sgd", learning_rate=1e20)


def test_balance_without_labels_is_refused(train):
    with pytest.raises(ConfigError, match="needs labels"):
        run(Samples(train.ids, None, train.arrays))


def test_the_result_does_not_depend_on_the_callers_threads(train):
    one, _ = run(train, epochs=2)
    torch.set_num_threads(2)
    try:
        two, _ = run(train, epochs=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert_same_bits(one, two)


def test_the_callers_random_state_and_switches_come_back(train):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(train, epochs=1)
    in_batches(lambda images: {"x": images.sum((1, 2, 3))}, train.images(), "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_batches_are_joined_in_order(train):
    found = in_batches(
        lambda images: {"x": images.double().sum((1, 2, 3))}, train.images(), "cpu", 7
    )
    np.testing.assert_array_equal(found["x"], train.images().sum((1, 2, 3), dtype=np.float64))


def test_the_checkpoint_is_readable_json_and_tensors(train, tmp_path):
    run(train, tmp_path / "c.safetensors", epochs=2)
    header = read_header(tmp_path / "c.safetensors")
    settings, seed, shapes, data = json.loads(header["identity"])
    assert (settings["epochs"], seed, shapes["5.bias"], len(data)) == (2, 1, [3], 64)
    assert samples(("images",), 48, 0, seed=1).fingerprint() == data
