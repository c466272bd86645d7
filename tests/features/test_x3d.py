"""X3D-M is the published network, and reads the three public kinds of files and nothing else."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from schemas.errors import ConfigError, SourceError
from tasks.features.clips import prepare
from tasks.features.x3d import X3D, X3DSize, load_x3d, squeezed, theirs
from tasks.models.clips import pass_views

TINY = X3DSize(widths=(4, 4, 8, 12, 16), depths=(2, 1, 3, 1), dim=10, frames=4, side=32)
EPS = 1e-5
PYSLOWFAST, PYTORCHVIDEO, MULTIGRID = range(3)
KINDS = pytest.mark.parametrize("kind", [PYSLOWFAST, PYTORCHVIDEO, MULTIGRID], ids=str)
STATISTICS = ("weight", "bias", "running_mean", "running_var")
SQUEEZED = {9: 8, 18: 8, 27: 8, 36: 8, 54: 8, 108: 8, 216: 16, 432: 32}


def embed(*given, **named) -> np.ndarray:
    return pass_views(*given, **named)["features"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def official(size: X3DSize, classes: int) -> list[tuple[tuple[str | None, ...], tuple[int, ...]]]:
    """Every tensor of the published files: its three names (None: not there) and its shape."""
    rows: list[tuple[tuple[str | None, ...], tuple[int, ...]]] = []

    def conv(names, *shape):
        rows.append((tuple(name and f"{name}.weight" for name in names), shape))

    def norm(names, width):
        slow, video, multi = names
        for tensor in STATISTICS:
            split = "split_bn." if tensor.startswith("running") else ""
            there = video and f"{video}.{tensor}"
            rows.append(((f"{slow}.{tensor}", there, f"{multi}.{split}{tensor}"), (width,)))

    def bias(names, width):
        rows.append((tuple(f"{name}.bias" for name in names), (width,)))

    stem = size.widths[0]
    conv(("s1.pathway0_stem.conv_xy", "blocks.0.conv.conv_t", "conv1_s"), stem, 3, 1, 3, 3)
    conv(("s1.pathway0_stem.conv", "blocks.0.conv.conv_xy", "conv1_t"), stem, 1, 5, 1, 1)
    norm(("s1.pathway0_stem.bn", "blocks.0.norm", "bn1"), stem)
    for stage, depth in enumerate(size.depths):
        inside, outside = size.widths[stage : stage + 2]
        inner = outside * 9 // 4
        for block in range(depth):
            s = f"s{stage + 2}.pathway0_res{block}"
            v = f"blocks.{stage + 1}.res_blocks.{block}"
            m = f"layer{stage + 1}.{block}"
            before = inside if block == 0 else outside
            if block == 0:
                conv(
                    (f"{s}.branch1", f"{v}.branch1_conv", f"{m}.downsample.0"),
                    *(outside, inside, 1, 1, 1),
                )
                plain = None if inside == outside else f"{v}.branch1_norm"
                norm((f"{s}.branch1_bn", plain, f"{m}.downsample.1"), outside)
            s, v = f"{s}.branch2", f"{v}.branch2"
            conv((f"{s}.a", f"{v}.conv_a", f"{m}.conv1"), inner, before, 1, 1, 1)
            norm((f"{s}.a_bn", f"{v}.norm_a", f"{m}.bn1"), inner)
            conv((f"{s}.b", f"{v}.conv_b", f"{m}.conv2"), inner, 1, 3, 3, 3)
            norm((f"{s}.b_bn", f"{v}.norm_b.0", f"{m}.bn2"), inner)
            if block in (0, 2, 4, 6, 8, 10):
                narrow = SQUEEZED[inner]
                up = (f"{s}.se.fc1", f"{v}.norm_b.1.block.0", f"{m}.fc1")
                down = (f"{s}.se.fc2", f"{v}.norm_b.1.block.2", f"{m}.fc2")
                conv(up, narrow, inner, 1, 1, 1)
                bias(up, narrow)
                conv(down, inner, narrow, 1, 1, 1)
                bias(down, inner)
            conv((f"{s}.c", f"{v}.conv_c", f"{m}.conv3"), outside, inner, 1, 1, 1)
            norm((f"{s}.c_bn", f"{v}.norm_c", f"{m}.bn3"), outside)
    last, inner = size.widths[-1], size.widths[-1] * 9 // 4
    conv(("head.conv_5", "blocks.5.pool.pre_conv", "conv5"), inner, last, 1, 1, 1)
    norm(("head.conv_5_bn", "blocks.5.pool.pre_norm", "bn5"), inner)
    conv(("head.lin_5", "blocks.5.pool.post_conv", "fc1"), size.dim, inner, 1, 1, 1)
    scores = ("head.projection", "blocks.5.proj", "fc2")
    conv(scores, classes, size.dim)
    bias(scores, classes)
    return rows


def fabricated(kind: int, classes: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """A file's state with the same numbers for every kind; the shortcut norms that one kind lacks
    do nothing."""
    draws = torch.Generator().manual_seed(seed)
    state = {}
    for names, shape in official(TINY, classes):
        value = torch.randn(shape, generator=draws) / max(1, np.prod(shape[1:])) ** 0.5
        if names[0].endswith("running_var"):
            value = value.abs() + 0.5
        if names[PYTORCHVIDEO] is None:
            neutral = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1 - EPS}
            value = torch.full(shape, neutral[names[0].rpartition(".")[2]])
        if names[kind] is not None:
            state[names[kind]] = value
    if kind == MULTIGRID:
        # What the release overwrites before use.
        for name in [name for name in state if ".split_bn." in name]:
            state[name.replace(".split_bn.", ".bn.")] = torch.full_like(state[name], 99.0)
            state[name.rpartition(".")[0] + ".num_batches_tracked"] = torch.tensor(3)
    return state


def written(folder: Path, state: dict, kind: int = PYSLOWFAST) -> Path:
    """With what training leaves beside the state."""
    path = folder / "x3d.pyth"
    key = "model_state_dict" if kind == MULTIGRID else "model_state"
    beside = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"epoch": 300, key: state, "optimizer_state": beside, "cfg": "X3D:\n  X: 1"}, path)
    return path


def clips(count: int = 2, seed: int = 0) -> np.ndarray:
    shape = (count, TINY.frames, TINY.side, TINY.side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# ---------------------------------------------------------------- the published network


def test_parameters_of_x3d_m():
    # pytorchvideo publishes 3.79 million; PySlowFast has one norm of 24 channels more.
    with torch.device("meta"):
        for norm, expected in ((False, 3_794_274), (True, 3_794_322)):
            network = X3D(even_shortcut_norm=norm)
            assert sum(parameter.numel() for parameter in network.parameters()) == expected
        assert network.features(torch.empty(2, 3, 16, 224, 224)).shape == (2, 2048)
        assert network(torch.empty(2, 3, 16, 224, 224)).shape == (2, 400)
    assert (network.dim, network.frames, network.side) == (2048, 16, 224)


@KINDS
def test_names_and_shapes_are_those_of_the_files(kind):
    with torch.device("meta"):
        network = X3D(even_shortcut_norm=kind != PYTORCHVIDEO)
    ours = {
        theirs(name, kind): tuple(value.shape)
        for name, value in network.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert ours == {
        names[kind]: shape for names, shape in official(X3DSize(), 400) if names[kind] is not None
    }


@pytest.mark.parametrize("channels", [54, 108, 216, 432])
def test_width_of_squeeze_and_excitation(channels):
    assert squeezed(channels) == SQUEEZED[channels]


@given(st.integers(1, 4000))
def test_squeeze_is_a_multiple_of_eight_and_hardly_less_than_a_sixteenth(channels):
    assert squeezed(channels) % 8 == 0
    assert max(8, 0.9 * channels / 16) <= squeezed(channels) <= channels / 16 + 8


# ---------------------------------------------------------------- an independent reference


def reference(state: dict[str, torch.Tensor], clip: np.ndarray) -> np.ndarray:
    """Class features of one clip (3, T, H, W) by the definition, from PySlowFast's names."""
    tensors = {name: value.double().numpy() for name, value in state.items()}

    def convolve(values, name, stride=1, alone=False):
        kernel = tensors[f"{name}.weight"]
        reach = [side // 2 for side in kernel.shape[2:]]
        padded = np.pad(values, [(0, 0), *((side, side) for side in reach)])
        _, times, rows, columns = values.shape
        out = 0
        for t, r, c in np.ndindex(*kernel.shape[2:]):
            seen = padded[:, t : t + times, r : r + rows : stride, c : c + columns : stride]
            if alone:
                out = out + kernel[:, 0, t, r, c, None, None, None] * seen
            else:
                out = out + np.einsum("oi,i...->o...", kernel[:, :, t, r, c], seen)
        return out

    def normalise(values, name):
        weight, bias, mean, variance = (
            tensors[f"{name}.{tensor}"][:, None, None, None] for tensor in STATISTICS
        )
        return (values - mean) / np.sqrt(variance + EPS) * weight + bias

    def excite(values, name):
        mean = values.mean((1, 2, 3))
        for layer, act in (
            ("fc1", lambda x: np.maximum(x, 0)),
            ("fc2", lambda x: 1 / (1 + np.exp(-x))),
        ):
            weight = tensors[f"{name}.{layer}.weight"][:, :, 0, 0, 0]
            mean = act(weight @ mean + tensors[f"{name}.{layer}.bias"])
        return values * mean[:, None, None, None]

    stem = "s1.pathway0_stem"
    values = convolve(clip.astype(float), f"{stem}.conv_xy", stride=2)
    values = np.maximum(normalise(convolve(values, f"{stem}.conv", alone=True), f"{stem}.bn"), 0)
    for stage, depth in enumerate(TINY.depths):
        for block in range(depth):
            name, stride = f"s{stage + 2}.pathway0_res{block}", 2 if block == 0 else 1
            inner = f"{name}.branch2"
            wide = np.maximum(normalise(convolve(values, f"{inner}.a"), f"{inner}.a_bn"), 0)
            wide = normalise(convolve(wide, f"{inner}.b", stride, alone=True), f"{inner}.b_bn")
            if block % 2 == 0:
                wide = excite(wide, f"{inner}.se")
            wide = wide / (1 + np.exp(-wide))
            added = normalise(convolve(wide, f"{inner}.c"), f"{inner}.c_bn")
            if block == 0:
                values = normalise(
                    convolve(values, f"{name}.branch1", stride), f"{name}.branch1_bn"
                )
            values = np.maximum(values + added, 0)
    values = np.maximum(normalise(convolve(values, "head.conv_5"), "head.conv_5_bn"), 0)
    pooled = values.mean((1, 2, 3), keepdims=True)
    return np.maximum(convolve(pooled, "head.lin_5"), 0)[:, 0, 0, 0]


def test_features_and_scores_by_the_definition(tmp_path):
    state = fabricated(PYSLOWFAST)
    network = load_x3d(written(tmp_path, state), size=TINY)
    clip = torch.randn(1, 3, 4, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = reference(state, clip[0].numpy())
    assert 0 < (expected > 0).sum() < TINY.dim
    np.testing.assert_allclose(network.features(clip)[0].numpy(), expected, rtol=1e-4, atol=1e-5)
    weight, bias = (state[f"head.projection.{name}"].numpy() for name in ("weight", "bias"))
    np.testing.assert_allclose(network(clip)[0], weight @ expected + bias, rtol=1e-4, atol=1e-5)


def test_larger_pictures_are_pooled_at_every_place_of_the_trained_size():
    network = load_x3d(None, 1, allow_random=True, size=TINY)
    maps = torch.randn(2, 16, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    places = [maps[..., top : top + 7, left : left + 7] for top in (0, 1) for left in (0, 1)]
    expected = torch.stack([network.head(place) for place in places]).mean(0)
    torch.testing.assert_close(network.head(maps), expected)
    assert (network.head(maps) - network.head(maps[..., :7, :7])).abs().max() > 1e-3


def formula_weights(network: X3D) -> dict[str, torch.Tensor]:
    """Sines of 1, 2, 3, ..., tensor by tensor, scaled so that no layer bursts."""
    state, start = {}, 1
    for name, value in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        sines = torch.arange(start, start + value.numel(), dtype=torch.float64).sin()
        start += value.numel()
        if name.endswith("running_var"):
            sines = 1 + 0.5 * sines
        elif name.endswith("norm.weight"):
            sines = 0.5 + 0.25 * sines
        else:
            sines = sines * ((2 / value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1)
        state[name] = sines.view(value.shape).float()
    return state


@pytest.mark.slow
def test_the_same_weights_put_out_what_pytorchvideo_does_at_the_size_of_fairs_test():
    """The numbers are from pytorchvideo 0.1.5: the mean over the 2 x 2 places of its last maps."""
    network = X3D(400, X3DSize(side=256), even_shortcut_norm=False).eval()
    network.load_state_dict(formula_weights(network), strict=False)
    places = torch.arange(3 * 16 * 256 * 256, dtype=torch.float64)
    clip = (places * 0.37).cos().view(1, 3, 16, 256, 256).float()
    with torch.no_grad():
        features = network.features(clip)
        logits = network.classifier(features)[0, [0, 100, 399]]
    assert features.mean().item() == pytest.approx(0.355953, abs=2e-6)
    found = features[0, [0, 700, 1400, 2047]].tolist()
    assert found == pytest.approx([0.61489, 0.0, 1.02101, 0.0], abs=2e-5)
    assert logits.tolist() == pytest.approx([-0.0142, -0.06413, 0.01146], abs=2e-5)


# ---------------------------------------------------------------- files


@KINDS
def test_a_fabricated_official_file_fills_every_tensor(tmp_path, kind):
    state = fabricated(kind)
    network = load_x3d(written(tmp_path, state, kind), size=TINY)
    used = set()
    for name, value in network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, state[theirs(name, kind)])
            used.add(theirs(name, kind))
    if kind == MULTIGRID:
        state = {
            name: value
            for name, value in state.items()
            if ".bn." not in name and not name.endswith("num_batches_tracked")
        }
    assert used == state.keys()
    assert network.record.startswith("x3d.pyth sha256 ")
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_the_same_numbers_give_the_same_features_from_every_kind_of_file(tmp_path):
    found = [
        embed(load_x3d(written(tmp_path, fabricated(kind), kind), size=TINY), clips(), "cpu")
        for kind in range(3)
    ]
    np.testing.assert_allclose(found[PYTORCHVIDEO], found[PYSLOWFAST], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[MULTIGRID], found[PYSLOWFAST])


def test_statistics_of_parts_of_a_batch_are_joined(tmp_path):
    state = fabricated(MULTIGRID)
    means, variances = torch.tensor([[1.0, 2, 3, 4], [3, 2, 1, 8]]), torch.ones(2, 4) * 0.5
    state["bn1.split_bn.running_mean"] = means.flatten()
    state["bn1.split_bn.running_var"] = variances.flatten()
    norm = load_x3d(written(tmp_path, state, MULTIGRID), size=TINY).stem.norm
    assert norm.running_mean.tolist() == [2, 2, 2, 6]
    assert norm.running_var.tolist() == [1.5, 0.5, 1.5, 4.5]


def test_safetensors_and_a_bare_state_are_read_too(tmp_path):
    state = fabricated(PYSLOWFAST)
    expected = embed(load_x3d(written(tmp_path, state), size=TINY), clips(), "cpu")
    save_file(state, tmp_path / "x3d.safetensors")
    torch.save(state, tmp_path / "x3d.pt")
    for name in ("x3d.safetensors", "x3d.pt"):
        found = embed(load_x3d(tmp_path / name, size=TINY), clips(), "cpu")
        np.testing.assert_array_equal(found, expected)


def test_number_of_classes_is_the_files(tmp_path):
    network = load_x3d(written(tmp_path, fabricated(PYSLOWFAST, classes=11)), size=TINY)
    assert network(torch.zeros(1, 3, 4, 32, 32)).shape == (1, 11)


@KINDS
def test_a_missing_tensor_is_refused(tmp_path, kind):
    for name in ("s3.pathway0_res0.branch2.se.fc1.bias", "head.projection.bias"):
        gone = next(names[kind] for names, _ in official(TINY, 7) if names[0] == name)
        state = fabricated(kind)
        del state[gone]
        with pytest.raises(SourceError, match=f"1 missing: {gone}"):
            load_x3d(written(tmp_path, state, kind), size=TINY)


def test_missing_statistics_are_refused_by_the_files_name(tmp_path):
    state = fabricated(MULTIGRID)
    del state["bn5.split_bn.running_var"]
    with pytest.raises(SourceError, match=r"1 missing: bn5\.split_bn\.running_var"):
        load_x3d(written(tmp_path, state, MULTIGRID), size=TINY)


def test_only_the_first_few_missing_tensors_are_named(tmp_path):
    state = {n: v for n, v in fabricated(PYSLOWFAST).items() if not n.startswith("s5.")}
    with pytest.raises(SourceError, match=r"\d\d missing: (s5\S+, ){3}\.\.\."):
        load_x3d(written(tmp_path, state), size=TINY)


def test_an_unexpected_tensor_is_refused(tmp_path):
    state = fabricated(PYSLOWFAST) | {"head.lin_5_bn.weight": torch.ones(10)}
    with pytest.raises(SourceError, match=r"1 unexpected: head\.lin_5_bn\.weight"):
        load_x3d(written(tmp_path, state), size=TINY)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    state = fabricated(PYSLOWFAST)
    state["s2.pathway0_res0.branch2.b.weight"] = torch.ones(9, 1, 1, 3, 3)
    with pytest.raises(
        SourceError, match=r"b\.weight \(9, 1, 1, 3, 3\) instead of \(9, 1, 3, 3, 3\)"
    ):
        load_x3d(written(tmp_path, state), size=TINY)


def test_values_that_are_not_finite_are_refused(tmp_path):
    state = fabricated(PYSLOWFAST)
    state["head.lin_5.weight"][3] = float("nan")
    with pytest.raises(SourceError, match=r"not finite, first in head\.lin_5\.weight"):
        load_x3d(written(tmp_path, state), size=TINY)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_a_pickle_that_would_run_code_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    path = tmp_path / "x3d.pyth"
    torch.save({"model_state": fabricated(PYSLOWFAST), "cfg": Evil()}, path)
    with pytest.raises(SourceError, match=r"not a plain torch state file .*mkdir.*safetensors"):
        load_x3d(path, size=TINY)
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "made").exists(), "the pickle was harmless, so the test showed nothing"


def test_files_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "x3d.pyth"
    with pytest.raises(SourceError, match=r"not found; name X3D-M of PySlowFast \(x3d_m\.pyth\)"):
        load_x3d(path, size=TINY)
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(SourceError, match="not a plain torch state file"):
        load_x3d(path, size=TINY)
    for other in ([1, 2], {"model_state": {}}, {"epoch": 3}, {"model_state": {"a": "text"}}):
        torch.save(other, path)
        with pytest.raises(SourceError, match="holds no state of a network"):
            load_x3d(path, size=TINY)
    torch.save({"features.0.weight": torch.ones(3)}, path)
    with pytest.raises(SourceError, match=r"features\.0\.weight, \.\.\., which is not a known"):
        load_x3d(path, size=TINY)
    (tmp_path / "x3d.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(SourceError, match="not a plain torch state file"):
        load_x3d(tmp_path / "x3d.safetensors", size=TINY)


# ---------------------------------------------------------------- use


def test_random_weights_only_when_asked_for():
    with pytest.raises(ConfigError, match=r"x3d_m\.pyth.*allow_random"):
        load_x3d(None)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = [
        embed(load_x3d(None, seed, allow_random=True, size=TINY), clips(), "cpu")
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.allclose(found[0], found[2])
    assert load_x3d(None, 4, allow_random=True, size=TINY).record == "random weights, seed 4"


def test_prepare_is_the_releases_normalisation():
    frames = torch.zeros(1, 2, 3, 4, 3, dtype=torch.uint8)
    frames[0, 1, 2, 3] = torch.tensor([255, 100, 0])
    found = prepare(frames)
    assert found.shape == (1, 3, 2, 3, 4)
    assert found.is_contiguous()
    expected = [
        (255 - 110.63666788) / 38.7568578,
        (100 - 103.16065604) / 37.88248729,
        -96.29023126 / 40.02898126,
    ]
    torch.testing.assert_close(found[0, :, 1, 2, 3], torch.tensor(expected))
    assert found[0, 0, 0, 0, 0].item() == pytest.approx(-110.63666788 / 38.7568578)
    torch.testing.assert_close(
        prepare(frames, "fair")[0, :, 1, 2, 3],
        torch.tensor([22 / 9, (100 / 255 - 0.45) / 0.225, -2]),
    )


@pytest.mark.parametrize(
    "frames",
    [torch.zeros(1, 2, 4, 4, 3), torch.zeros(2, 4, 4, 3, dtype=torch.uint8)],
    ids=["float", "no_clips"],
)
def test_prepare_refuses_other_arrays(frames):
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, T, H, W, 3\)"):
        prepare(frames)


def test_embed_gives_the_features_of_each_clip_in_order():
    network = load_x3d(None, allow_random=True, size=TINY)
    some = clips(5)
    found = embed(network, some, "cpu", batch=2)
    assert found.shape == (5, 10)
    assert found.dtype == np.float32
    for row in range(5):
        alone = network.features(prepare(torch.from_numpy(some[row : row + 1])))
        np.testing.assert_allclose(found[row], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(embed(network, some, "cpu", 2, precision="auto"), found)
    assert not np.allclose(embed(network, some, "cpu", normalisation="fair"), found)
    assert embed(network, some[:0], "cpu").shape == (0, 10)


def test_the_order_of_the_frames_matters():
    network = load_x3d(None, allow_random=True, size=TINY)
    some = clips()
    assert not np.allclose(embed(network, some, "cpu"), embed(network, some[:, ::-1], "cpu"))


def test_clips_of_other_sizes_are_refused():
    network = load_x3d(None, allow_random=True, size=TINY)
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, 4, 32, 32, 3\)"):
        embed(network, clips()[:, :3], "cpu")
    with pytest.raises(ConfigError, match=r"X3D expects \(N, 3, 4, 32, 32\)"):
        network.features(torch.zeros(1, 3, 4, 16, 32))


@pytest.mark.slow
def test_full_size():
    network = load_x3d(None, allow_random=True)
    shape = (1, 16, 224, 224, 3)
    found = embed(network, np.random.default_rng(0).integers(0, 256, shape, np.uint8), "cpu")
    assert found.shape == (1, 2048)
    assert np.isfinite(found).all()
    assert 0.1 < (found > 0).mean() < 0.9
