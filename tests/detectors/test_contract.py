"""What every detector in the package promises, whoever wrote it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError, NoveltyError, SourceError
from storage.tensors import read_tensors, write_tensors
from tasks.detectors import detector_names, find_detector, load_detector
from tasks.detectors.base import Detector
from tasks.learning.samples import NOVEL, Samples
from tasks.scores.base import Reference
from tests.detectors.synthetic import ARRAYS, samples, tiny

NAMES = detector_names()
# The others take arrays that only their own tests know how to make.
COVERED = [name for name in NAMES if set(find_detector(name).needs) <= ARRAYS.keys()]


@pytest.fixture(scope="module")
def fitted(classifier):
    """Each detector is fitted once for this file: name -> (detector, history)."""
    done = {}

    def get(name: str) -> tuple[Detector, pl.DataFrame]:
        if name not in done:
            kind = find_detector(name)
            base = classifier if kind.requires == "vgg_classifier" else None
            detector = kind(tiny(kind))
            history = detector.fit(
                samples(kind.needs, 48, 0, seed=1),
                samples(kind.needs, 12, 8, seed=2),
                seed=5,
                device="cpu",
                base=base,
            )
            done[name] = detector, history
        return done[name]

    return get


def test_the_visual_detectors_are_found():
    assert set(NAMES) >= {
        *("vgg_classifier", "deep_ensemble", "odin", "ndcc", "one_class_svm"),
        *("autoencoder_full", "autoencoder_patch"),
    }
    assert not {"base", "training"} & set(NAMES)


def test_finding_detectors_and_their_settings_does_not_import_torch():
    program = (
        "import sys; from tasks.detectors import detector_names, find_detector\n"
        "assert [find_detector(n).resolve('small').model_dump_json() for n in detector_names()]\n"
        "heavy = {'torch', 'sklearn'} & sys.modules.keys(); assert not heavy, heavy"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=root)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="vgg_classifier"):
        find_detector("base")


@pytest.mark.parametrize("name", NAMES)
def test_declaration(name):
    kind = find_detector(name)
    assert kind.name == name
    assert kind.needs
    assert {"paper", "small"} <= kind.presets.keys()
    assert kind.requires is None or kind.requires in NAMES
    for preset in kind.presets:
        settings = kind.resolve(preset)
        assert settings.model_config["frozen"]
        assert settings.model_config["extra"] == "forbid"
        for field, info in type(settings).model_fields.items():
            assert info.description and info.description.endswith("."), f"{name}.{field}"
            assert "\n" not in info.description


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(COVERED)))
def test_what_this_file_cannot_cover_has_tests_of_its_own(name):
    assert Path(__file__).with_name(f"test_{name}.py").is_file()


@pytest.mark.parametrize("name", COVERED)
def test_scores_are_finite_and_one_per_sample(name, fitted):
    detector, history = fitted(name)
    assert isinstance(history, pl.DataFrame)
    given = samples(detector.needs, 6, 3, seed=4)
    scores = detector.score(given)
    assert scores.dtype == np.float64
    assert scores.shape == (9,)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", COVERED)
def test_higher_is_more_novel(name, fitted):
    detector, _ = fitted(name)
    given = samples(detector.needs, 36, 24, seed=3)
    assert roc_auc_score(given.labels == NOVEL, detector.score(given)) > 0.7


@pytest.mark.parametrize("name", COVERED)
def test_a_sample_scores_the_same_in_any_company(name, fitted):
    detector, _ = fitted(name)
    given = samples(detector.needs, 6, 3, seed=4)
    order = np.random.default_rng(0).permutation(len(given))
    turned = Samples(
        [given.ids[row] for row in order],
        given.labels[order],
        {array: values[order] for array, values in given.arrays.items()},
    )
    np.testing.assert_allclose(
        detector.score(turned), detector.score(given)[order], rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("name", COVERED)
def test_no_samples_no_scores(name, fitted):
    detector, _ = fitted(name)
    given = samples(detector.needs, 3, 0, seed=4)
    empty = Samples([], given.labels[:0], {n: v[:0] for n, v in given.arrays.items()})
    assert detector.score(empty).shape == (0,)


@pytest.mark.parametrize("name", COVERED)
def test_it_puts_out_what_it_says_it_gives(name, fitted):
    detector, _ = fitted(name)
    outputs = detector.outputs(samples(detector.needs, 6, 3, seed=4))
    given = {
        part for part in ("logits", "features", "novelty") if getattr(outputs, part) is not None
    }
    head = detector.head()
    assert detector.gives == given | ({"head"} if head else set())
    if head is not None:
        Reference(train=outputs, head=head)  # refuses a head that does not make the logits


@pytest.mark.parametrize("name", COVERED)
def test_saved_and_loaded_scores_are_equal(name, fitted, tmp_path):
    detector, _ = fitted(name)
    given = samples(detector.needs, 6, 3, seed=4)
    detector.save(tmp_path / "one.safetensors")
    again = load_detector(tmp_path / "one.safetensors", device="cpu", base=detector.base)
    assert again.settings == detector.settings
    assert again.record == detector.record
    np.testing.assert_array_equal(again.score(given), detector.score(given))
    again.save(tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", COVERED)
def test_the_same_seed_gives_the_same_scores(name, fitted):
    detector, history = fitted(name)
    given = samples(detector.needs, 6, 3, seed=4)
    again = type(detector)(detector.settings)
    repeated = again.fit(
        samples(detector.needs, 48, 0, seed=1),
        samples(detector.needs, 12, 8, seed=2),
        seed=5,
        device="cpu",
        base=detector.base,
    )
    assert repeated.equals(history)
    np.testing.assert_array_equal(again.score(given), detector.score(given))


@pytest.mark.parametrize("name", [name for name in COVERED if find_detector(name).requires])
def test_a_detector_on_another_one_asks_for_it(name, fitted, classifier, tmp_path, train):
    detector, _ = fitted(name)
    before = classifier.fingerprint()
    with pytest.raises(ConfigError, match="builds on a fitted"):
        type(detector)(detector.settings).fit(train, device="cpu")
    detector.save(tmp_path / "saved.safetensors")
    with pytest.raises(ConfigError, match="builds on a fitted"):
        load_detector(tmp_path / "saved.safetensors", device="cpu")
    other = type(classifier)(classifier.settings)
    other.restore(
        {n: v + 1 if n == "classifier.6.bias" else v for n, v in classifier.state().items()}
    )
    with pytest.raises(ConfigError, match="fitted on another"):
        load_detector(tmp_path / "saved.safetensors", device="cpu", base=other)
    assert classifier.fingerprint() == before


def test_where_the_weights_come_from_is_recorded(classifier, tmp_path):
    assert classifier.record == {"initial_weights": "random, seed 5"}
    path = tmp_path / "vgg.safetensors"
    classifier.save(path)
    assert load_detector(path, device="cpu").record == classifier.record


def test_training_starts_from_the_named_file(classifier, train, tmp_path):
    import torch

    torch.save(classifier.network.state_dict(), tmp_path / "start.pth")
    changes = {"weights": tmp_path / "start.pth", "epochs": 1, "learning_rate": 1e-9}
    kind = type(classifier)
    detector = kind(tiny(kind, **changes))
    detector.fit(train, device="cpu")
    assert detector.record["initial_weights"].startswith("start.pth sha256 ")
    weights = detector.network.features[0].weight
    torch.testing.assert_close(weights, classifier.network.features[0].weight)


def test_an_unknown_preset_a_foreign_setting_and_an_unknown_key_are_refused():
    kind = find_detector("odin")
    with pytest.raises(ConfigError, match="no preset 'large'"):
        kind("large")
    with pytest.raises(ConfigError, match="takes Configuration"):
        find_detector("ndcc")(kind.resolve("paper"))
    with pytest.raises(ConfigError, match="odin: wrong settings: temprature is not a setting"):
        kind.resolve("paper", {"temprature": 1})


def test_what_changes_no_number_is_in_no_key():
    plain = find_detector("vgg_classifier").resolve("small")
    changes = {"checkpoint_every": 3, "weights": "vgg.pth"}
    changed = find_detector("vgg_classifier").resolve("small", changes)
    assert changed.model_dump() == plain.model_dump() and changed.checkpoint_every == 3


def test_training_on_novel_samples_is_refused(valid):
    with pytest.raises(ConfigError, match="8 training samples are labelled novel"):
        find_detector("ndcc")("small").fit(valid, device="cpu")


def test_samples_of_different_lengths_are_refused():
    images = np.zeros((3, 8, 8, 3), np.uint8)
    with pytest.raises(ConfigError, match="2 ids"):
        Samples(["a", "b"], None, {"images": images})
    with pytest.raises(ConfigError, match="labels are float64"):
        Samples(["a"], np.zeros(1), {})
    with pytest.raises(ConfigError, match="expected uint8"):
        Samples(["a"], None, {"images": images[:1].astype(float)}).images()
    with pytest.raises(ConfigError, match="no array 'images'"):
        Samples(["a"], None, {}).images()


def test_scores_that_are_not_numbers_are_an_error(classifier, test_set):
    broken = type(classifier)(classifier.settings)
    broken.restore(
        {n: v * float("nan") if v.is_floating_point() else v for n, v in classifier.state().items()}
    )
    with pytest.raises(NoveltyError, match="logits of row 0 are not all finite"):
        broken.score(test_set)


def test_a_gpu_that_is_not_there_is_said(classifier):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="no GPU"):
        find_detector("ndcc")("small").prepare(device="cuda", base=None)
    with pytest.raises(ConfigError, match="unknown"):
        find_detector("ndcc")("small").prepare(device="abacus", base=None)


def test_a_foreign_file_is_not_a_detector(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(SourceError, match="not written by this project"):
        load_detector(tmp_path / "a.safetensors")
    with pytest.raises(SourceError, match="not found"):
        load_detector(tmp_path / "b.safetensors")


def test_a_detector_of_another_version_is_named(classifier, tmp_path):
    header = {"detector": "odin", "settings": '{"heat": 3}', "record": {}, "base": ""}
    write_tensors(tmp_path / "a.safetensors", {"epsilon": np.zeros(1)}, header)
    with pytest.raises(SourceError, match="settings of another version"):
        load_detector(tmp_path / "a.safetensors", base=classifier, device="cpu")


def test_tensors_come_back_as_they_were(tmp_path):
    state = {"a": np.arange(6).reshape(2, 3)[:, ::2], "b": np.array([1.5])}
    write_tensors(tmp_path / "x.safetensors", state, {"k": "v"})
    back = read_tensors(tmp_path / "x.safetensors")
    assert {n: v.numpy().tolist() for n, v in back.items()} == {"a": [[0, 2], [3, 5]], "b": [1.5]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
