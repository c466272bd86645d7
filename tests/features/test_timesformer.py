"""TimeSformer is FAIR's divided space-time network, and reads FAIR's and Hugging Face's files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from schemas.errors import ConfigError, SourceError
from tasks.features.timesformer import (
    TimeSformer,
    TimesformerSize,
    load_timesformer,
    stretched,
)
from tasks.models.clips import pass_views

TINY = TimesformerSize(side=16, patch=8, width=12, depth=2, heads=3)
FRAMES = 4
FAIR, HUGGING_FACE = 0, 1
KINDS = pytest.mark.parametrize("kind", [FAIR, HUGGING_FACE], ids=["fair", "hugging_face"])
# FAIR's layers of a block, Hugging Face's, and outputs and inputs in widths (0: a norm).
LAYERS = (
    ("norm1", "layernorm_before", 0, 0),
    ("attn.qkv", "attention.attention.qkv", 3, 1),
    ("attn.proj", "attention.output.dense", 1, 1),
    ("temporal_norm1", "temporal_layernorm", 0, 0),
    ("temporal_attn.qkv", "temporal_attention.attention.qkv", 3, 1),
    ("temporal_attn.proj", "temporal_attention.output.dense", 1, 1),
    ("temporal_fc", "temporal_dense", 1, 1),
    ("norm2", "layernorm_after", 0, 0),
    ("mlp.fc1", "intermediate.dense", 4, 1),
    ("mlp.fc2", "output.dense", 1, 4),
)


def embed(*given, **named) -> np.ndarray:
    return pass_views(*given, **named)["features"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def official(size: TimesformerSize, classes: int) -> list[tuple[tuple[str, str], tuple[int, ...]]]:
    """Every tensor of the published files: its two names and its shape."""
    width, places = size.width, (size.side // size.patch) ** 2
    rows: list[tuple[tuple[str, str], tuple[int, ...]]] = []

    def add(fair, face, shape):
        face = face if face.startswith("classifier") else f"timesformer.{face}"
        rows.append(((f"model.{fair}", face), shape))

    def layer(fair, face, weight):
        add(f"{fair}.weight", f"{face}.weight", weight)
        add(f"{fair}.bias", f"{face}.bias", weight[:1])

    add("cls_token", "embeddings.cls_token", (1, 1, width))
    add("pos_embed", "embeddings.position_embeddings", (1, 1 + places, width))
    add("time_embed", "embeddings.time_embeddings", (1, FRAMES, width))
    layer(
        "patch_embed.proj",
        "embeddings.patch_embeddings.projection",
        (width, 3, size.patch, size.patch),
    )
    for block in range(size.depth):
        for fair, face, rows_of, columns in LAYERS:
            shape = (rows_of * width, columns * width) if rows_of else (width,)
            layer(f"blocks.{block}.{fair}", f"encoder.layer.{block}.{face}", shape)
    layer("norm", "layernorm", (width,))
    layer("head", "classifier", (classes, width))
    return rows


def fabricated(kind: int, classes: int = 7) -> dict[str, torch.Tensor]:
    """A file's state, the same numbers for both kinds."""
    draws = torch.Generator().manual_seed(0)
    return {
        names[kind]: torch.randn(shape, generator=draws) * 0.4
        for names, shape in official(TINY, classes)
    }


def written(folder: Path, state: dict, kind: int = FAIR) -> Path:
    path = folder / "timesformer.pyth"
    beside = {"state": {}, "param_groups": [{"lr": 0.005}]}
    whole = {"epoch": 14, "model_state": state, "optimizer_state": beside, "cfg": "A: 1"}
    torch.save(whole if kind == FAIR else state, path)
    return path


def load(path: Path, frames: int = FRAMES) -> TimeSformer:
    return load_timesformer(path, frames, size=TINY)


def clips(count: int = 2, frames: int = FRAMES) -> np.ndarray:
    shape = (count, frames, TINY.side, TINY.side, 3)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


# ---------------------------------------------------------------- the published network


def test_parameters_of_the_base_network():
    # ViT-B/16 without its classifier, and in each block a second attention, a linear layer, a norm.
    second = 4 * (768 * 768 + 768) + (768 * 768 + 768) + 2 * 768
    body = 85_798_656 + 12 * second + 8 * 768
    with torch.device("meta"):
        for classes in (400, 174):
            network = TimeSformer(classes)
            found = sum(parameter.numel() for parameter in network.parameters())
            assert found == body + classes * 769
        assert network.features(torch.empty(2, 3, 8, 224, 224)).shape == (2, 768)
    # The paper's 121.4 million are those with the 174 classes of Something-Something.
    assert found == 121_392_558
    assert (network.dim, network.frames, network.side) == (768, 8, 224)


def test_names_and_shapes_are_fairs():
    with torch.device("meta"):
        network = TimeSformer(7, FRAMES, TINY)
    found = {f"model.{name}": tuple(value.shape) for name, value in network.state_dict().items()}
    assert found == {names[FAIR]: shape for names, shape in official(TINY, 7)}


# Of the first of two clips, from FAIR's code in the release.
FAIR_FEATURES = [
    *(0.024378, -0.487274, -0.609187, -1.839776, -1.266015, -0.252348),
    *(-0.470053, 0.882794, 0.30321, 0.227711, 1.805079, 0.162734),
]
FAIR_LOGITS = [-0.018671, -0.042152, 0.217599, 0.438694, 0.284382, -0.245663, -0.770633]


def test_the_same_weights_put_out_what_fairs_network_does():
    """Weights are sines of 1, 2, 3, ..., tensor by tensor, scaled by what enters; those of norms
    about 1."""
    network, start = TimeSformer(7, FRAMES, TINY).eval(), 1
    state = {}
    for name, value in network.state_dict().items():
        sines = torch.arange(start, start + value.numel(), dtype=torch.float64).sin()
        start += value.numel()
        scaled = sines * (2 / value[0].numel()) ** 0.5 if value.ndim > 1 else sines * 0.5
        about = 1 if value.ndim == 1 and name.endswith("weight") else 0
        state[name] = (scaled + about).view(value.shape).float()
    network.load_state_dict(state)
    pixels = torch.arange(2 * 3 * FRAMES * 16 * 16, dtype=torch.float64)
    with torch.no_grad():
        features = network.features((pixels * 0.37).cos().view(2, 3, FRAMES, 16, 16).float())
        logits = network.classifier(features)
    assert features[0].tolist() == pytest.approx(FAIR_FEATURES, abs=3e-6)
    assert logits[0].tolist() == pytest.approx(FAIR_LOGITS, abs=3e-6)


def test_impossible_sizes_are_refused():
    for frames, size in ((0, TINY), (4, TimesformerSize(side=20)), (4, TimesformerSize(heads=7))):
        with pytest.raises(ConfigError, match="expected at least one frame"):
            TimeSformer(4, frames, size)


# ---------------------------------------------------------------- an independent reference


def reference(state: dict[str, torch.Tensor], clip: np.ndarray) -> np.ndarray:
    """The class token of one clip (3, T, H, W) by the definition, token by token, from FAIR's
    names."""
    tensors = {n.removeprefix("model."): value.double().numpy() for n, value in state.items()}
    width, heads, patch = TINY.width, TINY.heads, TINY.patch
    frames, grid = clip.shape[1], TINY.side // TINY.patch
    places = grid * grid

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def attention(x, name):
        query, key, value = np.split(linear(x, f"{name}.qkv"), 3, 1)
        parts = []
        for head in range(heads):
            own = slice(head * width // heads, (head + 1) * width // heads)
            scores = np.exp(query[:, own] @ key[:, own].T / np.sqrt(width // heads))
            parts.append(scores / scores.sum(1, keepdims=True) @ value[:, own])
        return linear(np.concatenate(parts, 1), f"{name}.proj")

    def perceptron(x, name):
        hidden = torch.from_numpy(linear(x, f"{name}.fc1"))
        gelu = (hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))).numpy()
        return linear(gelu, f"{name}.fc2")

    kernel = tensors["patch_embed.proj.weight"].reshape(width, -1)
    tokens = np.zeros((frames, places, width))
    for frame, place in np.ndindex(frames, places):
        row, column = (patch * index for index in divmod(place, grid))
        pixels = clip[:, frame, row : row + patch, column : column + patch].reshape(-1)
        tokens[frame, place] = kernel @ pixels + tensors["patch_embed.proj.bias"]
        tokens[frame, place] += tensors["pos_embed"][0, 1 + place] + tensors["time_embed"][0, frame]
    first = tensors["cls_token"][0, 0] + tensors["pos_embed"][0, 0]
    for block in range(TINY.depth):
        name = f"blocks.{block}"
        for place in range(places):
            seen = attention(
                norm(tokens[:, place], f"{name}.temporal_norm1"), f"{name}.temporal_attn"
            )
            tokens[:, place] = tokens[:, place] + linear(seen, f"{name}.temporal_fc")
        said = []
        for frame in range(frames):
            together = np.concatenate([first[None], tokens[frame]])
            seen = attention(norm(together, f"{name}.norm1"), f"{name}.attn")
            said.append(seen[0])
            tokens[frame] = tokens[frame] + seen[1:]
        first = first + np.mean(said, 0)
        first = first + perceptron(norm(first, f"{name}.norm2"), f"{name}.mlp")
        tokens = tokens + perceptron(norm(tokens, f"{name}.norm2"), f"{name}.mlp")
    return norm(first, "norm")


def test_features_and_scores_by_the_definition(tmp_path):
    state = fabricated(FAIR)
    network = load(written(tmp_path, state))
    clip = torch.randn(1, 3, FRAMES, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = reference(state, clip[0].numpy())
    np.testing.assert_allclose(network.features(clip)[0].numpy(), expected, rtol=1e-4, atol=1e-5)
    weight, bias = (state[f"model.head.{name}"].numpy() for name in ("weight", "bias"))
    np.testing.assert_allclose(network(clip)[0], weight @ expected + bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frames", [FRAMES, 7])
def test_features_are_those_of_transformers(tmp_path, frames):
    transformers = pytest.importorskip("transformers", reason="transformers is no dependency")
    config = transformers.TimesformerConfig(
        image_size=TINY.side,
        patch_size=TINY.patch,
        num_frames=frames,
        hidden_size=TINY.width,
        num_hidden_layers=TINY.depth,
        num_attention_heads=TINY.heads,
        intermediate_size=4 * TINY.width,
        num_labels=7,
    )
    state = fabricated(HUGGING_FACE)
    other = transformers.TimesformerForVideoClassification(config).eval()
    # transformers stretches the embedding in each pass.
    other.timesformer.embeddings.time_embeddings = torch.nn.Parameter(torch.zeros(1, FRAMES, 12))
    other.load_state_dict(state)
    network = load(written(tmp_path, state, HUGGING_FACE), frames)
    some = torch.randn(2, 3, frames, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        token = other.timesformer(some.transpose(1, 2)).last_hidden_state[:, 0]
        torch.testing.assert_close(network.features(some), token)
        torch.testing.assert_close(network(some), other(some.transpose(1, 2)).logits)


# ---------------------------------------------------------------- files


@KINDS
def test_a_fabricated_official_file_fills_every_tensor(tmp_path, kind):
    state = fabricated(kind)
    network = load(written(tmp_path, state, kind))
    own = network.state_dict()
    assert len(own) == len(state)
    for names, _ in official(TINY, 7):
        torch.testing.assert_close(own[names[FAIR].removeprefix("model.")], state[names[kind]])
    assert network.record.startswith("timesformer.pyth sha256 ")
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_the_same_numbers_give_the_same_features_from_every_kind_of_file(tmp_path):
    fair, face = fabricated(FAIR), fabricated(HUGGING_FACE)
    found = [embed(load(written(tmp_path, fair)), clips(), "cpu")]
    found.append(embed(load(written(tmp_path, face, HUGGING_FACE)), clips(), "cpu"))
    alone = {n.removeprefix("timesformer."): v for n, v in face.items() if "classifier" not in n}
    for number, state in enumerate(
        ({n.removeprefix("model."): v for n, v in fair.items()}, face, alone)
    ):
        path = tmp_path / f"{number}.safetensors"
        save_file(state, path)
        found.append(embed(load(path), clips(), "cpu"))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    with pytest.raises(ConfigError, match="without a classifier"):
        load(path)(torch.zeros(1, 3, FRAMES, 16, 16))


def test_number_of_classes_is_the_files(tmp_path):
    network = load(written(tmp_path, fabricated(FAIR, classes=11)))
    assert network(torch.zeros(1, 3, FRAMES, 16, 16)).shape == (1, 11)


@KINDS
def test_a_missing_tensor_is_refused(tmp_path, kind):
    for name in ("model.blocks.1.temporal_fc.bias", "model.head.bias", "model.time_embed"):
        gone = next(names[kind] for names, _ in official(TINY, 7) if names[FAIR] == name)
        state = fabricated(kind)
        del state[gone]
        with pytest.raises(SourceError, match=rf"TimeSformer \(1 missing: {gone}"):
            load(written(tmp_path, state, kind))


def test_an_unexpected_tensor_is_refused(tmp_path):
    state = fabricated(FAIR) | {"model.blocks.2.norm1.bias": torch.ones(12)}
    with pytest.raises(SourceError, match=r"1 unexpected: model\.blocks\.2\.norm1\.bias"):
        load(written(tmp_path, state))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.pos_embed", (1, 10, 12)),
        ("model.time_embed", (1, 9, 8)),
        ("model.time_embed", (4, 12)),
    ],
    ids=["side", "width", "rank"],
)
def test_a_tensor_of_another_shape_is_refused(tmp_path, name, shape):
    state = fabricated(FAIR) | {name: torch.ones(shape)}
    with pytest.raises(SourceError, match=rf"1 of another shape: {name} .* instead of"):
        load(written(tmp_path, state))


def test_files_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "timesformer.pyth"
    with pytest.raises(SourceError, match=r"not found; name .*TimeSformer_divST_8x32_224_K400"):
        load(path)
    path.write_bytes(b"<html>too many downloads</html>")
    with pytest.raises(SourceError, match="not a plain torch state file"):
        load(path)
    torch.save({"model_state": {"s1.pathway0_stem.conv.weight": torch.ones(3)}}, path)
    with pytest.raises(SourceError, match="not a known layout"):
        load(path)


# ---------------------------------------------------------------- frames


@given(st.integers(1, 12), st.integers(1, 64))
def test_each_frame_takes_the_embedding_of_the_nearest(stored, frames):
    own = torch.arange(float(stored)).view(1, stored, 1)
    found = stretched(own, frames)
    assert found.shape == (1, frames, 1)
    # Half-open cells; torch's own rounding may move a frame at a border by one.
    exact = torch.arange(frames) * stored / frames
    assert ((exact - 1e-4).floor().clamp(min=0) <= found[0, :, 0]).all()
    assert (found[0, :, 0] <= exact + 1e-4).all()


def test_the_releases_300_frames():
    found = stretched(torch.arange(8.0).view(1, 8, 1), 300)[0, :, 0]
    assert found.tolist() == [frame * 8 // 300 for frame in range(300)]


def test_a_file_of_four_frames_serves_six(tmp_path):
    state = fabricated(FAIR)
    network = load(written(tmp_path, state), frames=6)
    assert network.frames == 6
    expected = state["model.time_embed"][0, [0, 0, 1, 2, 2, 3]]
    torch.testing.assert_close(network.time_embed[0], expected)
    assert embed(network, clips(frames=6), "cpu").shape == (2, 12)


def test_the_order_of_the_frames_matters_by_the_time_embedding_alone(tmp_path):
    some = clips()
    network = load(written(tmp_path, fabricated(FAIR)))
    assert not np.allclose(embed(network, some, "cpu"), embed(network, some[:, ::-1], "cpu"))
    network.time_embed.zero_()
    np.testing.assert_allclose(
        embed(network, some, "cpu"), embed(network, some[:, ::-1], "cpu"), rtol=1e-3, atol=1e-4
    )


# ---------------------------------------------------------------- use


def test_random_weights_only_when_asked_for():
    with pytest.raises(ConfigError, match=r"TimeSformer_divST_8x32_224_K400\.pyth.*allow_random"):
        load_timesformer(None)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    networks = [
        load_timesformer(None, FRAMES, seed, allow_random=True, size=TINY) for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    found = [embed(network, clips(), "cpu") for network in networks]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.allclose(found[0], found[2])
    assert not np.allclose(found[0], embed(networks[0], clips()[:, ::-1], "cpu"))
    assert networks[2].record == "random weights, seed 2"


def test_embed_gives_the_features_of_each_clip_in_order():
    network = load_timesformer(None, FRAMES, allow_random=True, size=TINY)
    some = clips(5)
    found = embed(network, some, "cpu", batch=2)
    assert found.dtype == np.float32
    for row in range(5):
        alone = embed(network, some[row : row + 1], "cpu")
        np.testing.assert_allclose(found[row], alone[0], rtol=1e-4, atol=1e-5)
    assert embed(network, some[:0], "cpu").shape == (0, 12)


def test_clips_of_other_sizes_are_refused():
    network = load_timesformer(None, FRAMES, allow_random=True, size=TINY)
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, 4, 16, 16, 3\)"):
        embed(network, clips(frames=5), "cpu")
    with pytest.raises(ConfigError, match=r"TimeSformer expects \(N, 3, 4, 16, 16\)"):
        network.features(torch.zeros(1, 3, 5, 16, 16))


@pytest.mark.slow
def test_full_size():
    network = load_timesformer(None, allow_random=True)
    shape = (1, 8, 224, 224, 3)
    found = embed(network, np.random.default_rng(0).integers(0, 256, shape, np.uint8), "cpu")
    assert found.shape == (1, 768)
    assert np.isfinite(found).all()
    assert found.std() == pytest.approx(1, abs=1e-3)
