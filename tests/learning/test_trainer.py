"""The trainer: exact resume at an epoch's end and within one, orders, rates, streams, refusals."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from schemas.errors import ConfigError, NoveltyError
from storage.tensors import read_header
from tasks.learning import trainer
from tasks.learning.devices import seeded
from tasks.learning.samples import NOVEL, Samples
from tasks.learning.trainer import (
    CHECKPOINT,
    Stream,
    Trainable,
    TrainingSettings,
    compute_in_batches,
    endless_rows,
    rate_at,
    train,
)

SETTINGS = {
    "epochs": 5, "batch_size": 8, "order": "balanced", "learning_rate": 0.01, "checkpoint_every": 2,
}  # fmt: skip


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pictures(known: int, novel: int, seed: int) -> Samples:
    """Noise whose brightness is the class."""
    labels = np.r_[np.arange(known) % 3, np.full(novel, NOVEL)].astype(np.int64)
    noise = np.random.default_rng(seed).integers(0, 60, (len(labels), 12, 12, 3))
    images = (noise + 60 * (labels[:, None, None, None] + 1)).astype(np.uint8)
    return Samples([f"{seed}/{row}" for row in range(len(labels))], labels, {"images": images})


SAMPLES, VALID = pictures(44, 0, 1), pictures(12, 8, 2)


class Small(Trainable):
    """Dropout and batch statistics: whatever is random or remembered must survive a kill."""

    name = "small"
    validates = True

    def __init__(self, **changes: object) -> None:
        self.settings = TrainingSettings(**{**SETTINGS, **changes})
        with seeded([7], "cpu"):
            self.layers = nn.Sequential(
                nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
                nn.Linear(4 * 5 * 5, 3),
            )  # fmt: skip

    def losses(self, batch):
        logits = self.layers(batch.array("images").permute(0, 3, 1, 2).float() / 255)
        return {"loss": functional.cross_entropy(logits, batch.labels)}


class InPhases(Small):
    """Two streams, two phases that measure different things, two optimisers; one keeps its rate."""

    phases = ("first", "second")

    def streams(self):
        return (*super().streams(), Stream(5, "endless"))

    def optimizers(self):
        parameters = list(self.layers.parameters())
        return {
            "main": trainer.make_optimizer(parameters[2:], self.settings),
            "other": trainer.make_optimizer(parameters[:2], self.settings, lr=0.02),
        }

    def step(self, batches, optimizers, phase):
        number = self.phases.index(phase)
        loss = self.losses(batches[number])["loss"]
        optimizers.descend(("main", "other")[number], loss, fill=bool(number))
        return {"loss": loss, phase: loss}


def run(samples=SAMPLES, work=None, kill_after=None, seed=1, valid=None, kind=Small, **changes):
    """Weights as bytes by name, and the history."""
    trainable = kind(**changes)

    def progress(epoch, epochs, values):
        if epoch == kill_after:
            raise Killed

    history = train(
        trainable, samples, seed=seed, device="cpu", valid=valid, work=work, progress=progress
    )
    state = trainable.layers.state_dict()
    return {name: value.numpy().tobytes() for name, value in state.items()}, history


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kill_after", [1, 2, 3, 4, 5])
def test_killed_and_started_again_gives_the_same_bits(tmp_path, optimizer, kill_after):
    changes = {"optimizer": optimizer, "weight_decay": 0.01, "milestones": (3,)}
    undisturbed, history = run(**changes)
    with pytest.raises(Killed):
        run(work=tmp_path / "run", kill_after=kill_after, **changes)
    checkpoint = tmp_path / "run" / CHECKPOINT
    assert checkpoint.is_file() == (kill_after >= 2)
    resumed, again = run(work=tmp_path / "run", **changes)
    assert resumed == undisturbed
    assert again.equals(history)
    assert again["epoch"].to_list() == [1, 2, 3, 4, 5]
    assert len(read_header(checkpoint)["history"]) == 5


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Small, {"schedule": "one_cycle", "optimizer": "sgd"}),
        (Small, {"schedule": "cosine", "warmup_epochs": 1, "order": "shuffled"}),
        (Small, {"order": "endless", "epoch_samples": 20, "nesterov": True, "optimizer": "sgd"}),
        (InPhases, {"milestones": (1,)}),
    ],
    ids=["one_cycle", "cosine", "endless", "phases"],
)
def test_killed_within_an_epoch_gives_the_same_bits(tmp_path, monkeypatch, kind, changes):
    """A checkpoint after every step, and a kill at every one of them."""
    changes = {**changes, "epochs": 2, "checkpoint_seconds": 0}
    undisturbed, history = run(kind=kind, valid=VALID, **changes)
    write, written = trainer.write_tensors, []

    def dying(path, state, header):
        write(path, state, header)
        written.append(header["under_way"].get("step", 0))
        if len(written) % 2 == 0:
            raise Killed

    monkeypatch.setattr(trainer, "write_tensors", dying)
    kills = 0
    while True:
        try:
            resumed, again = run(kind=kind, valid=VALID, work=tmp_path, **changes)
            break
        except Killed:
            kills += 1
    assert kills >= 3 and max(written) > 1
    assert resumed == undisturbed
    assert again.equals(history)


def test_a_finished_run_is_not_repeated(tmp_path):
    first, _ = run(work=tmp_path)
    written = (tmp_path / CHECKPOINT).read_bytes()
    second, _ = run(work=tmp_path, kill_after=5)
    assert first == second
    assert (tmp_path / CHECKPOINT).read_bytes() == written


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    run(work=tmp_path, epochs=1)
    changed = Samples(SAMPLES.ids, SAMPLES.labels, {"images": 255 - SAMPLES.array("images")[:]})
    for samples, changes in (
        (SAMPLES, {"seed": 2}), (SAMPLES, {"learning_rate": 0.1}), (changed, {}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="belongs to another training"):
            run(samples, tmp_path, **{"epochs": 1, **changes})
    with pytest.raises(ConfigError, match="belongs to another training"):
        train(Small(epochs=1), SAMPLES, seed=1, device="cpu", work=tmp_path, identity="other base")
    run(work=tmp_path, epochs=1, checkpoint_every=7)


PROGRAM = """
import os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.learning.test_trainer import run
from tasks.learning import trainer
write = trainer.write_tensors
def die(path, state, header):
    write(path, state, header)
    if len(header["history"]) == 4:
        os.kill(os.getpid(), 9)
trainer.write_tensors = die
run(work=Path(sys.argv[1]))
"""


def test_kill_minus_nine(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert len(read_header(tmp_path / CHECKPOINT)["history"]) == 4
    resumed, _ = run(work=tmp_path)
    assert resumed == run()[0]


def test_balanced_order_draws_every_class_equally():
    labels = np.r_[np.zeros(90), np.ones(10)].astype(np.int64)
    samples = Samples([str(row) for row in range(100)], labels, {})
    shares = {}
    for order in ("balanced", "shuffled"):
        epochs = [Stream(10, order).batches(samples, 0, epoch, 0, None) for epoch in range(1, 21)]
        drawn = labels[np.concatenate([rows for batches in epochs for rows in batches])]
        assert len(drawn) == 2000
        shares[order] = drawn.mean()
    assert abs(shares["balanced"] - 0.5) < 0.05
    assert shares["shuffled"] == 0.1


def test_shuffled_batches_are_equal_and_hold_each_sample_once():
    batches = Stream(8, "shuffled").batches(SAMPLES, 3, 2, 0, None)
    assert sorted(map(len, batches)) == [7, 7, 7, 7, 8, 8]
    assert sorted(np.concatenate(batches)) == list(range(44))


@pytest.mark.parametrize("size, counts", [(8, [8, 8, 8]), (9, [9, 9]), (50, [24])])
def test_full_batches_leave_the_rest_of_an_epoch_out(size: int, counts: list[int]) -> None:
    samples = SAMPLES.take(np.arange(24))
    epochs = [Stream(size, "full").batches(samples, 0, epoch, 0, None) for epoch in range(1, 9)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == counts
        assert len(np.unique(np.concatenate(batches))) == sum(counts)
    # Another rest is left out each time.
    assert len({row for batches in epochs for batch in batches for row in batch}) == 24
    assert len(Stream(9, "full").batches(samples, 0, 1, 1, 5)) == 5


def test_endless_batches_go_on_where_the_epoch_before_ended():
    stream = Stream(8, "endless", 30)
    epochs = [np.concatenate(stream.batches(SAMPLES, 3, epoch, 1, None)) for epoch in range(1, 12)]
    assert {len(rows) for rows in epochs} == {24}
    joined = np.concatenate(epochs)
    np.testing.assert_array_equal(joined, endless_rows(3, 1, 44, 0, 264))
    for start in range(0, 264, 44):
        assert sorted(joined[start : start + 44]) == list(range(44))
    # As many steps as the first stream has.
    assert len(stream.batches(SAMPLES, 3, 1, 1, 5)) == 5


def test_every_step_has_a_batch_of_each_stream_in_each_phase():
    seen = []

    class Watching(InPhases):
        def step(self, batches, optimizers, phase):
            seen.append((phase, *(len(batch) for batch in batches)))
            return super().step(batches, optimizers, phase)

    _, history = run(kind=Watching, epochs=1, order="shuffled")
    assert [phase for phase, *_ in seen] == ["first"] * 6 + ["second"] * 6
    assert {second for *_, second in seen} == {5} and sum(first for _, first, _ in seen) == 88
    assert history.columns == ["epoch", "rate", "loss", "first", "second"]
    assert history["loss"][0] == pytest.approx(history["first"][0] + history["second"][0])


def test_rates_of_each_schedule():
    def rates(steps: int = 1, **changes: object) -> list[float]:
        settings = TrainingSettings(**{**SETTINGS, "epochs": 4, **changes})
        return [rate_at(settings, 1.0, e, s, steps) for e in range(1, 5) for s in range(steps)]

    assert rates(milestones=(1, 3)) == pytest.approx([1, 0.1, 0.1, 0.01])
    cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * e / 4)) / 2 for e in range(4)]
    assert rates(schedule="cosine", final_rate=0.1) == pytest.approx(cosine)
    warm = rates(schedule="cosine", final_rate=0.1, warmup_epochs=2, warmup_rate=0.5)
    assert warm == pytest.approx([0.5, 0.75, *cosine[2:]])
    halved = rates(schedule="cosine", schedule_epochs=2)
    assert halved == pytest.approx([1, 0.5, 0, 0], abs=1e-12)
    cycle = rates(2, schedule="one_cycle", rise=0.5)
    assert cycle == pytest.approx([0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0.001])


def test_only_scheduled_optimisers_follow_the_schedule():
    seen = []

    class Watching(InPhases):
        def step(self, batches, optimizers, phase):
            seen.append(tuple(optimizers[name].param_groups[0]["lr"] for name in optimizers))
            return super().step(batches, optimizers, phase)

    _, history = run(kind=Watching, epochs=2, milestones=(1,), batch_size=44)
    assert [main for main, _ in seen] == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert {other for _, other in seen} == {0.02}
    assert history["rate"].to_list() == pytest.approx([0.01, 0.001])


def test_validation_is_measured_and_changes_nothing():
    alone, _ = run()
    measured, history = run(valid=VALID)
    assert alone == measured
    assert history.columns == ["epoch", "rate", "loss", "valid_loss"]
    assert history["loss"][-1] < history["loss"][0]


def test_what_an_epoch_closes_with_is_in_its_checkpoint(tmp_path):
    class Counting(Small):
        def __init__(self, **changes: object) -> None:
            super().__init__(**changes)
            self.layers.register_buffer("sum", torch.zeros((), dtype=torch.float64))

        def close_epoch(self, epoch, measures):
            self.layers.sum += measures["valid_loss"]

    with pytest.raises(Killed):
        run(work=tmp_path, kill_after=4, valid=VALID, kind=Counting, checkpoint_every=1)
    resumed, history = run(work=tmp_path, valid=VALID, kind=Counting, checkpoint_every=1)
    total = np.frombuffer(resumed["sum"], np.float64)[0]
    assert total == pytest.approx(history["valid_loss"].sum(), rel=1e-12)


def test_the_seed_matters():
    assert run(seed=1)[0] != run(seed=2)[0]


def test_a_loss_that_is_not_a_number_stops_the_training():
    with pytest.raises(NoveltyError, match=r"small diverged in epoch \d .*lower learning_rate"):
        run(optimizer="sgd", learning_rate=1e20)


def test_labels_that_are_needed_and_not_there_are_refused():
    without = Samples(SAMPLES.ids, None, SAMPLES.arrays)
    with pytest.raises(ConfigError, match="balanced training needs labels"):
        run(without)
    with pytest.raises(ConfigError, match="this training needs labels"):
        run(without, order="shuffled")


def test_the_result_does_not_depend_on_the_callers_threads():
    one, _ = run(epochs=2)
    torch.set_num_threads(2)
    two, _ = run(epochs=2)
    assert torch.get_num_threads() == 2
    assert one == two


def test_the_callers_random_state_and_switches_come_back():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(epochs=1)
    compute_in_batches(lambda batch: {"x": batch.array("images").sum((1, 2, 3))}, SAMPLES, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_batches_are_joined_in_order():
    joined = compute_in_batches(
        lambda batch: {"x": batch.array("images").double().sum((1, 2, 3))}, SAMPLES, "cpu", 7
    )
    images = SAMPLES.array("images")[:]
    np.testing.assert_array_equal(joined["x"], images.sum((1, 2, 3), dtype=np.float64))


def test_the_checkpoint_is_readable_json_and_tensors(tmp_path):
    run(work=tmp_path, epochs=2)
    header = read_header(tmp_path / CHECKPOINT)
    name, settings, seed, shapes, samples, _ = json.loads(header["identity"])
    assert (name, settings["epochs"], seed, shapes["5.bias"]) == ("small", 2, 1, [3])
    assert samples == SAMPLES.fingerprint()


# ---------------------------------------------------------------- reading ahead


class Encoded:
    """Rows that are made when they are asked for, which is noted."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.changed = values, threading.Condition()
        self.shape, self.dtype = values.shape, values.dtype
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows):
        with self.changed:
            self.read += np.arange(len(self))[rows].tolist()
            self.changed.notify_all()
        return self.values[rows]

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.read) >= count, 120)


def test_batches_are_decoded_while_the_ones_before_are_computed() -> None:
    images, other = Encoded(SAMPLES.arrays["images"]), Encoded(SAMPLES.arrays["images"])
    samples = replace(SAMPLES, arrays={"images": images, "other": other})
    steps = []

    def compute(batch):
        mean = batch.array("images").double().mean((1, 2, 3))
        steps.append(len(batch))
        if 4 <= len(steps) < 11:
            assert images.wait_for(sum(steps) + 4), "the next one is not read"
        return {"mean": mean}

    means = compute_in_batches(compute, samples, "cpu", 4)["mean"]
    assert sorted(images.read) == list(range(44)), "each once"
    assert not other.read, "what nobody asks for is not read"
    np.testing.assert_array_equal(means, compute_in_batches(compute, SAMPLES, "cpu", 4)["mean"])


@pytest.mark.parametrize("kind", [Small, InPhases])
def test_a_training_has_the_same_bits_whether_it_reads_ahead_or_not(kind, tmp_path) -> None:
    """Also one that was killed, whose reader ends with it."""
    lazy = replace(SAMPLES, arrays={"images": Encoded(SAMPLES.arrays["images"])})
    before = threading.active_count()
    assert run(lazy, kind=kind)[0] == run(kind=kind)[0]
    with pytest.raises(Killed):
        run(lazy, tmp_path, kill_after=2, kind=kind)
    assert threading.active_count() == before
    assert run(lazy, tmp_path, kind=kind)[0] == run(kind=kind)[0]


class Overlapped(Small):
    """A step ends only when the batch of the next one is there."""

    steps, before = 0, 0

    def losses(self, batch):
        images = batch.samples.array("images")
        self.steps += 1
        if self.steps == 1:
            self.before = len(images.read)
        losses = super().losses(batch)
        if 4 <= self.steps < 6:
            assert images.wait_for(self.before + self.steps * 7 + 7), "the next one is not read"
        return losses


def test_a_training_reads_the_next_batch_while_it_takes_a_step() -> None:
    lazy = replace(SAMPLES, arrays={"images": Encoded(SAMPLES.arrays["images"])})
    run(lazy, kind=Overlapped, epochs=1, order="shuffled")
