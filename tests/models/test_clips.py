"""Frozen models of clips: what they are shown, what they put out, and with which weights."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tasks.evaluation.model_runs import differing
from tasks.features import timesformer, x3d
from tasks.learning.samples import Samples
from tasks.models import find, load_model, make_model
from tasks.models.base import Fitting

NAMES = ("frame_backbone", "timesformer", "x3d")
WIDTH = {"frame_backbone": 1280, "x3d": 8192, "timesformer": 768}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clips(name: str, count: int = 2, **changed) -> Samples:
    """Noise of the shape that the model asks for."""
    shown = find(name).resolve(None, changed)
    shape = (count, shown.crops, shown.count, shown.crop, shown.crop, 3)
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Samples([str(number) for number in range(count)], None, {"clips": values})


def checkpoint(name: str, path, seed: int = 0):
    """Random weights under the official names."""
    if name == "x3d":
        network = x3d.load_x3d(None, seed, allow_random=True)
        names = {n: x3d.theirs(n, x3d.PYSLOWFAST) for n in network.state_dict()}
    else:
        network = timesformer.load_timesformer(None, seed=seed, allow_random=True)
        names = {n: timesformer.theirs(n, timesformer.LAYOUTS[0]) for n in network.state_dict()}
    state = {names[key]: value for key, value in network.state_dict().items()}
    torch.save({"model_state": state, "epoch": 1}, path)
    return path


def test_finding_them_and_their_settings_does_not_import_torch():
    program = (
        "import sys; from tasks.models import find\n"
        f"assert [find(name).resolve('small').model_dump_json() for name in {NAMES}]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_declaration(name):
    kind = find(name)
    gives = {"features"} if name == "frame_backbone" else {"features", "logits"}
    assert (kind.modality, kind.gives, kind.seeded) == ("clip", gives, False)
    assert kind.needs_weights == (name != "frame_backbone")
    settings = kind.resolve("paper")
    small = differing(kind.resolve("small"), settings)
    assert small == ({"side": 128} if name == "frame_backbone" else {})
    assert "weights" not in settings.model_dump()
    for field, info in type(settings).model_fields.items():
        assert info.description and info.description.endswith("."), f"{name}.{field}"


def test_the_frames_are_those_of_the_paper():
    def shown(name: str, preset: str | None = None, **changed) -> tuple:
        settings = find(name).resolve(preset, changed)
        geometry = (settings.count, settings.step, settings.short_side, settings.crop)
        return settings.preprocessing, settings.views, *geometry

    assert shown("x3d") == ("release", 4, 16, 5, 224, 224)
    assert shown("x3d", preprocessing="fair") == ("fair", 30, 16, 5, 256, 256)
    assert shown("x3d", preprocessing="spread") == ("spread", 4, 16, 5, 256, 224)
    assert shown("timesformer") == ("release", 1, 8, 32, 224, 224)
    assert shown("timesformer", preprocessing="fair") == ("fair", 3, 8, 32, 224, 224)
    assert shown("timesformer", preprocessing="spread") == ("spread", 1, 8, 32, 256, 224)
    assert shown("timesformer", "released") == ("release", 1, 300, 1, 224, 224)
    assert shown("frame_backbone") == ("spread", 8, 1, 1, 256, 256)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_of_predictors_alone_changes_nothing(name):
    assert find(name).resolve("paper_100") == find(name).resolve()


def test_what_goes_with_a_name_can_be_set_by_itself():
    settings = find("x3d").resolve(None, {"preprocessing": "fair", "crops": 2, "short_side": 300})
    assert (settings.crops, settings.short_side, settings.crop) == (2, 300, 256)
    with pytest.raises(ConfigError, match=r"preprocessing: .*'release', 'fair' or 'spread'"):
        find("x3d").resolve(None, {"preprocessing": "paper"})


TINY = {"x3d": x3d.X3DSize((4, 4, 8, 12, 16), (2, 1, 3, 1), 10, side=32)}
TINY["timesformer"] = timesformer.TimesformerSize(32, 8, width=12, depth=2, heads=3)


def tiny(name: str, monkeypatch, **changed):
    """The model with a small random network of pictures of 32 pixels, and two clips for it."""
    model = make_model(name, {"weights": "none.pyth", "batch": 2, **changed})
    loader = x3d.load_x3d if name == "x3d" else timesformer.load_timesformer
    network = loader(None, allow_random=True, size=TINY[name])
    monkeypatch.setitem(model.__dict__, "network", network)
    shown = model.settings.model_copy(update={"crop": 32})
    monkeypatch.setattr(model, "settings", shown)
    shape = (2, shown.views, shown.count, 32, 32, 3)
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return model, network, Samples(["a", "b"], None, {"clips": values})


@pytest.mark.parametrize("name", ["x3d", "timesformer"])
def test_views_stand_side_by_side_or_are_averaged_and_logits_are_averaged(name, monkeypatch):
    from tasks.models.clips import pass_views

    for preprocessing in ("release", "fair"):
        changed = {"preprocessing": preprocessing, "crops": 2}
        model, network, samples = tiny(name, monkeypatch, **changed)
        found = model.outputs(samples)
        views = samples.array("clips")[1]
        rows = pass_views(network, views, normalisation=preprocessing)
        assert rows["logits"].shape == (len(views), 400)
        features = rows["features"]
        expected = features.mean(0) if preprocessing == "fair" else features.ravel()
        np.testing.assert_allclose(found.features[1], expected, atol=1e-5)
        np.testing.assert_allclose(found.logits[1], rows["logits"].mean(0), atol=1e-5)
        # The mean is the file's own classifier on the mean of the features.
        last = network.classifier
        line = last.weight.numpy() @ features.mean(0) + last.bias.numpy()
        np.testing.assert_allclose(found.logits[1], line, atol=1e-5)


def test_a_file_without_a_classifier_gives_features_alone(monkeypatch):
    model, network, samples = tiny("timesformer", monkeypatch)
    network.head = None
    found = model.outputs(samples)
    assert found.logits is None and found.features.shape == (2, 12)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("x3d", {"count": 4}), ("x3d", {"crop": 112}), ("timesformer", {"crop": 9})],
)
def test_frames_that_a_network_does_not_take_are_refused(name, changes):
    with pytest.raises(ConfigError, match=f"{name}: .*{next(iter(changes))}"):
        find(name).resolve(None, changes)


def test_efficientnet_gives_the_mean_over_the_frames_of_a_clip():
    model = make_model("frame_backbone", {"crops": 3, "batch": 2})
    model.prepare(device="cpu")
    samples = clips("frame_backbone", 3, crops=3)
    found = model.outputs(samples).features
    assert found.shape == (3, 1280) and found.dtype == np.float32
    one = make_model("frame_backbone", {"crops": 1})
    one.prepare(device="cpu")
    frames = samples.array("clips")[1][:, None]  # each frame a clip of its own
    alone = one.outputs(Samples(list("abc"), None, {"clips": frames})).features
    np.testing.assert_array_equal(found[1], alone.mean(0))
    assert model.outputs(clips("frame_backbone", 0, crops=3)).features.shape == (0, 1280)


def test_it_is_saved_as_the_digest_of_its_weights(tmp_path):
    model = make_model("frame_backbone", {"crops": 1})
    samples = clips("frame_backbone", crops=1)
    history = model.fit(samples, None, Fitting(device="cpu"))
    assert history.is_empty()
    model.save(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors", device="cpu")
    assert loaded.fingerprint() == model.fingerprint()
    np.testing.assert_array_equal(loaded.outputs(samples).features, model.outputs(samples).features)
    loaded = load_model(tmp_path / "model.safetensors", device="cpu")
    loaded.digest = bytes(32)
    with pytest.raises(ConfigError, match="was saved with other weights"):
        loaded.outputs(samples)


def test_clips_of_another_form_are_refused():
    model = make_model("frame_backbone", {"crops": 2})
    model.prepare(device="cpu")
    with pytest.raises(ConfigError, match=r"expected uint8 \(N, 2, 1, 256, 256, 3\)"):
        model.outputs(clips("frame_backbone", crops=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x3d", "timesformer"])
def test_crops_stand_side_by_side(tmp_path, name):
    model = make_model(name, {"weights": str(checkpoint(name, tmp_path / "w.pyth")), "batch": 1})
    model.prepare(device="cpu")
    samples = clips(name, 1)
    found = model.outputs(samples).features
    assert found.shape == (1, WIDTH[name]) and np.isfinite(found).all()
    one = make_model(name, {"weights": str(tmp_path / "w.pyth"), "batch": 1, "crops": 1})
    one.prepare(device="cpu")
    last = samples.array("clips")[:, -1:]
    alone = one.outputs(Samples(["0"], None, {"clips": last})).features
    np.testing.assert_array_equal(found[:, -alone.shape[1] :], alone)
