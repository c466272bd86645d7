"""Outputs, heads and references: equal to the layers they stand for, refused when wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from schemas.config import make_config
from schemas.errors import ConfigError, NoveltyError, SourceError
from storage.tensors import write_tensors
from tasks.scores import find, names
from tasks.scores.base import NEEDS, Head, Outputs, Reference
from tests.scores import make_world

HEADS = {
    "leaky": Head.of(nn.Linear(3, 2), nn.BatchNorm1d(3), 0.2),
    "relu, no bias": Head.of(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(3), 0.0),
    "linear alone": Head.of(nn.Linear(3, 2)),
    "batch norm without weights": Head.of(nn.Linear(3, 2), nn.BatchNorm1d(3, affine=False), 0.0),
}


def test_a_head_is_its_layers() -> None:
    for slope in (0.2, 0.0, 1.0):
        world = make_world(slope=slope)
        g = torch.from_numpy(world.test.features)
        with torch.no_grad():
            torch.testing.assert_close(world.head(g), world.layers(g))
            torch.testing.assert_close(world.head.activated(g), world.layers[:2](g))
        assert world.head(g.double()).dtype == torch.float64
        assert (world.head.classes, world.head.width) == (18, 32)


def test_a_head_does_not_follow_later_training() -> None:
    linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(3)
    head = Head.of(linear, norm)
    before = head(torch.ones(1, 3))
    with torch.no_grad():
        linear.weight.add_(1)
        norm.running_mean.add_(1)
    assert torch.equal(head(torch.ones(1, 3)), before)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_a_saved_head_is_the_same_head(kind: str, tmp_path: Path) -> None:
    head = HEADS[kind]
    head.save(tmp_path / "a.safetensors")
    head.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    g = torch.linspace(-2, 2, 12).view(4, 3)
    again = Head.load(tmp_path / "a.safetensors")
    assert torch.equal(again(g), head(g)) and torch.equal(again.activated(g), head.activated(g))
    assert (again.norm is None) == (head.norm is None) and again.slope == head.slope


def test_loading_something_else_as_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not found"):
        Head.load(tmp_path / "none")
    write_tensors(tmp_path / "other", {"x": torch.ones(1)}, {"detector": "vgg"})
    with pytest.raises(SourceError, match="holds no head"):
        Head.load(tmp_path / "other")


def test_a_plain_file_of_the_last_layer_is_a_head(tmp_path: Path) -> None:
    weight, bias, path = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.ones(2), tmp_path / "h"
    save_file({"weight": weight.double(), "bias": bias.half()}, path)
    assert Head.load(path)(torch.tensor([[3.0, -4.0]])).tolist() == [[-4.0, 5.0]]
    save_file({"weight": weight, "fc.bias": bias}, path)
    with pytest.raises(SourceError, match=r"holds fc\.bias, weight, expected weight and bias"):
        Head.load(path)
    save_file({"weight": weight, "bias": torch.ones(3)}, path)
    with pytest.raises(ConfigError, match=r"bias \(3,\) \(expected \(2,\)\)"):
        Head.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(SourceError, match="is no safetensors file"):
        Head.load(path)


def test_heads_of_mixed_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bias \(3,\) \(expected \(2,\)\)"):
        Head(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ConfigError, match="batch norm weight"):
        Head.of(nn.Linear(4, 2), nn.BatchNorm1d(5))
    with pytest.raises(ConfigError, match="running mean"):
        Head.of(nn.Linear(4, 2), nn.BatchNorm1d(4, track_running_stats=False))


@pytest.mark.parametrize(
    ("logits", "features", "message"),
    [
        (np.ones(3, np.float32), None, r"float32 \(3,\)"),
        (np.ones((3, 2), int), None, "int64"),
        (np.ones((3, 2), np.float32), np.ones((4, 2), np.float32), "as many"),
        (None, None, "found rows {}"),
        (np.array([[1.0], [np.nan]]), None, "row 1"),
    ],
    ids=["one axis", "integers", "other length", "nothing", "nan"],
)
def test_bad_outputs_are_refused(logits: object, features: object, message: str) -> None:
    with pytest.raises(NoveltyError, match=message):
        Outputs(logits, features)  # type: ignore[arg-type]


def test_a_reference_refuses_features_of_another_layer() -> None:
    world = make_world()
    train = world.reference.train
    after = world.head.activated(torch.from_numpy(train.features)).numpy()
    for name in ("train", "valid"):
        with pytest.raises(ConfigError, match=f"logits of {name}.*before the last BatchNorm"):
            Reference(**{name: replace(train, features=after)}, head=world.head)
    with pytest.raises(ConfigError, match="have 31 columns, the head takes 32"):
        Reference(replace(train, features=train.features[:, 1:]), head=world.head)


def test_a_reference_lets_half_precision_pass() -> None:
    world = make_world()
    train = world.reference.train
    half = train.logits.astype(np.float16).astype(np.float32)
    assert Reference(replace(train, logits=half), head=world.head).head is world.head


def test_a_reference_refuses_labels_that_do_not_fit() -> None:
    train = make_world().reference.train
    for labels in (np.zeros(3, np.int64), np.zeros(len(train), np.int32)):
        with pytest.raises(ConfigError, match="train labels"):
            Reference(train, labels)
        with pytest.raises(ConfigError, match="valid labels"):
            Reference(valid=train, valid_labels=labels)
    with pytest.raises(ConfigError, match="no rows"):
        Reference(valid=Outputs(np.zeros((0, 2), np.float32)))


def test_every_file_is_found_by_its_name() -> None:
    assert set(names()) >= {
        *("msp", "mls", "odin_without_step", "energy", "gradnorm", "react", "entropy", "nearest"),
        "cosine",
        "mahalanobis",
    }
    for name in names():
        kind = find(name)
        assert kind.name == name and kind.needs <= NEEDS
        assert kind.needs & {"logits", "features", "novelty"}
    with pytest.raises(ConfigError, match="no score 'base'; there are: ash"):
        find("base")


@pytest.mark.parametrize("name", names())
def test_what_a_score_needs_is_asked_for(name: str) -> None:
    world, kind = make_world(), find(name)
    for part in sorted(kind.needs & {"head", "train", "valid"}):
        without = replace(
            world.reference,
            **{part: None},
            **({f"{part}_labels": None} if part != "head" else {}),
        )
        with pytest.raises(ConfigError, match=f"score {name} needs {part}, which the reference"):
            kind().fit(without)
        with pytest.raises(ConfigError, match="not fitted"):
            kind().score(world.test)
    score = kind()
    score.fit(world.reference)
    for part in sorted(kind.needs & {"logits", "features"}):
        with pytest.raises(ConfigError, match=f"score {name} needs {part}, which the outputs"):
            score.score(replace(world.test, **{part: None}))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="percentile"):
        make_config(find("react").configuration, {"percentile": 101})
    with pytest.raises(ConfigError, match=r"takes tasks\.scores\.react\.Configuration"):
        find("react")(find("energy").configuration())
