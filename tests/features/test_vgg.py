"""VGG-16 is the published network, and reads torchvision's files and nothing else."""

import hashlib
import pickle

import pytest
import torch

from schemas.errors import ConfigError, SourceError
from tasks.features.vgg import Vgg, load_weights

NARROW = {"layers": (8, "M", 16, "M"), "hidden": 12, "pool": 2}


@pytest.fixture(scope="module")
def full() -> Vgg:
    with torch.device("meta"):
        return Vgg(1000)


def narrow(classes: int, seed: int = 0, **changes) -> Vgg:
    torch.manual_seed(seed)
    return Vgg(classes, **{**NARROW, **changes})


def test_parameters_of_vgg16(full):
    assert sum(parameter.numel() for parameter in full.parameters()) == 138_357_544


def test_names_and_shapes_are_torchvisions(full):
    shapes = {name: tuple(value.shape) for name, value in full.state_dict().items()}
    convolutions = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    expected = {f"features.{i}.{part}" for i in convolutions for part in ("weight", "bias")}
    expected |= {f"classifier.{i}.{part}" for i in (0, 3, 6) for part in ("weight", "bias")}
    assert shapes.keys() == expected
    assert shapes["features.0.weight"] == (64, 3, 3, 3)
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25088)
    assert shapes["classifier.6.weight"] == (1000, 4096)


def test_batch_norm_has_the_names_of_vgg16_bn():
    with torch.device("meta"):
        names = Vgg(1000, batch_norm=True).state_dict().keys()
    assert {"features.1.running_mean", "features.40.weight", "features.41.bias"} <= names


def test_features_are_4096_values_before_the_last_layer(full):
    assert full.embed(torch.empty((1, 3, 234, 256), device="meta")).shape == (1, 4096)
    network = narrow(3).eval()
    images = torch.rand((2, 3, 20, 24))
    features = network.embed(images)
    assert (features >= 0).all()
    assert torch.equal(network.classifier[6](features), network(images))


def test_a_file_with_the_same_classes_is_taken_whole(tmp_path):
    torch.save(narrow(3, seed=1).state_dict(), tmp_path / "vgg.pth")
    network = narrow(3)
    origin = load_weights(network, tmp_path / "vgg.pth")
    assert origin.startswith("vgg.pth sha256 ")
    assert all(
        torch.equal(a, b)
        for a, b in zip(network.parameters(), narrow(3, seed=1).parameters(), strict=True)
    )


def test_other_classes_keep_the_new_last_layer(tmp_path):
    torch.save(narrow(1000, seed=1).state_dict(), tmp_path / "vgg.pth")
    network = narrow(5)
    last = network.classifier[6].weight.clone()
    load_weights(network, tmp_path / "vgg.pth")
    assert torch.equal(network.classifier[6].weight, last)
    assert torch.equal(network.features[0].weight, narrow(1000, seed=1).features[0].weight)


def test_a_file_of_another_network_is_refused(tmp_path):
    torch.save(narrow(5, hidden=16).state_dict(), tmp_path / "vgg.pth")
    with pytest.raises(ConfigError, match=r"classifier\.0\.bias: found \(16,\), expected \(12,\)"):
        load_weights(narrow(5), tmp_path / "vgg.pth")


def test_a_file_that_lacks_a_layer_is_refused(tmp_path):
    state = narrow(5).state_dict()
    del state["features.3.bias"]
    torch.save(state, tmp_path / "vgg.pth")
    with pytest.raises(ConfigError, match=r"features\.3\.bias: found nothing"):
        load_weights(narrow(5), tmp_path / "vgg.pth")


def test_the_hash_in_the_name_is_checked(tmp_path):
    torch.save(narrow(5).state_dict(), tmp_path / "vgg.pth")
    digest = hashlib.sha256((tmp_path / "vgg.pth").read_bytes()).hexdigest()
    good = (tmp_path / "vgg.pth").rename(tmp_path / f"vgg16-{digest[:8]}.pth")
    load_weights(narrow(5), good)
    bad = good.rename(tmp_path / "vgg16-397923af.pth")
    with pytest.raises(SourceError, match="promises 397923af"):
        load_weights(narrow(5), bad)


class Harmful:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"no torch file at all" * 9])
def test_only_plain_tensors_are_read(tmp_path, capsys, content):
    (tmp_path / "vgg.pth").write_bytes(content)
    with pytest.raises(SourceError, match=r"vgg\.pth"):
        load_weights(narrow(5), tmp_path / "vgg.pth")
    assert capsys.readouterr().out == ""


def test_a_zip_with_code_is_not_run(tmp_path, capsys):
    torch.save({"features.0.weight": Harmful()}, tmp_path / "vgg.pth")
    with pytest.raises(SourceError, match="not a plain torch state file"):
        load_weights(narrow(5), tmp_path / "vgg.pth")
    assert capsys.readouterr().out == ""


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"none\.pth not found"):
        load_weights(narrow(5), tmp_path / "none.pth")
