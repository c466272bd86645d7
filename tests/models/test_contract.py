"""What every model of pictures promises, whoever wrote it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError, NoveltyError, SourceError
from storage.tensors import read_tensors, write_tensors
from tasks import models
from tasks.learning.samples import NOVEL, Samples
from tasks.models import find, load_model
from tasks.models.base import Model
from tasks.scores.base import Reference
from tests.models.synthetic import NEEDS, fit, novelty, samples, tiny

NAMES = models.names()
# The others take arrays or networks that only their own tests know how to make.
COVERED = [
    n
    for n in NAMES
    if find(n).modality in NEEDS and "novelty" in find(n).gives and not find(n).uses_network
]


def arrays_of(model: Model) -> tuple[str, ...]:
    return NEEDS[model.modality]


def base_of(model: Model, classifier: Model) -> Model | None:
    wanted = [base for base in model.bases_of(model.settings) if base.reads == "model"]
    return classifier if wanted else None


@pytest.fixture(scope="module")
def fitted(classifier):
    """Each model is fitted once for this file: name -> (model, history)."""
    done = {}

    def get(name: str) -> tuple[Model, pl.DataFrame]:
        if name not in done:
            kind = find(name)
            model = kind(tiny(kind))
            history = fit(
                model,
                samples(arrays_of(model), 48, 0, seed=1),
                samples(arrays_of(model), 12, 8, seed=2),
                seed=5,
                base=base_of(model, classifier),
            )
            done[name] = model, history
        return done[name]

    return get


def test_the_visual_models_are_found():
    assert set(NAMES) >= {
        *("vgg_classifier", "deep_ensemble", "odin", "ndcc", "one_class_svm"),
        *("autoencoder_full", "autoencoder_patch"),
    }
    assert not {"base", "frames"} & set(NAMES)


def test_finding_models_and_their_settings_does_not_import_torch():
    program = (
        "import sys; from tasks.models import names, find\n"
        "assert [find(n).resolve('small').model_dump_json() for n in names()]\n"
        "heavy = {'torch', 'sklearn'} & sys.modules.keys(); assert not heavy, heavy"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=root)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="vgg_classifier"):
        find("base")


@pytest.mark.parametrize("name", NAMES)
def test_declaration(name):
    kind = find(name)
    assert kind.name == name
    assert kind.modality
    for preset in ("paper", "small"):
        settings = kind.resolve(preset)
        assert settings.model_config["frozen"]
        assert settings.model_config["extra"] == "forbid"
        for field, info in type(settings).model_fields.items():
            assert info.description and info.description.endswith("."), f"{name}.{field}"
            assert "\n" not in info.description


@pytest.mark.parametrize("name", COVERED)
def test_scores_are_finite_and_one_per_sample(name, fitted):
    model, history = fitted(name)
    assert isinstance(history, pl.DataFrame)
    given = samples(arrays_of(model), 6, 3, seed=4)
    scores = novelty(model, given)
    assert scores.dtype == np.float64
    assert scores.shape == (9,)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", COVERED)
def test_higher_is_more_novel(name, fitted):
    model, _ = fitted(name)
    given = samples(arrays_of(model), 36, 24, seed=3)
    assert roc_auc_score(given.labels == NOVEL, novelty(model, given)) > 0.7


@pytest.mark.parametrize("name", COVERED)
def test_a_sample_scores_the_same_in_any_company(name, fitted):
    model, _ = fitted(name)
    given = samples(arrays_of(model), 6, 3, seed=4)
    order = np.random.default_rng(0).permutation(len(given))
    turned = Samples(
        [given.ids[row] for row in order],
        given.labels[order],
        {array: values[order] for array, values in given.arrays.items()},
    )
    np.testing.assert_allclose(
        novelty(model, turned), novelty(model, given)[order], rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("name", COVERED)
def test_no_samples_no_scores(name, fitted):
    model, _ = fitted(name)
    given = samples(arrays_of(model), 3, 0, seed=4)
    empty = Samples([], given.labels[:0], {n: v[:0] for n, v in given.arrays.items()})
    assert novelty(model, empty).shape == (0,)


@pytest.mark.parametrize("name", COVERED)
def test_it_puts_out_what_it_says_it_gives(name, fitted):
    model, _ = fitted(name)
    outputs = model.outputs(samples(arrays_of(model), 6, 3, seed=4))
    given = {
        part for part in ("logits", "features", "novelty") if getattr(outputs, part) is not None
    }
    head = model.head()
    assert model.gives == given | ({"head"} if head else set())
    if head is not None:
        Reference(train=outputs, head=head)  # refuses a head that does not make the logits


@pytest.mark.parametrize("name", COVERED)
def test_saved_and_loaded_scores_are_equal(name, fitted, tmp_path):
    model, _ = fitted(name)
    given = samples(arrays_of(model), 6, 3, seed=4)
    model.save(tmp_path / "one.safetensors")
    again = load_model(tmp_path / "one.safetensors", device="cpu", bases=model.bases)
    assert again.settings == model.settings
    assert again.record == model.record
    np.testing.assert_array_equal(novelty(again, given), novelty(model, given))
    again.save(tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", COVERED)
def test_the_same_seed_gives_the_same_scores(name, fitted):
    model, history = fitted(name)
    given = samples(arrays_of(model), 6, 3, seed=4)
    again = type(model)(model.settings)
    repeated = fit(
        again,
        samples(arrays_of(model), 48, 0, seed=1),
        samples(arrays_of(model), 12, 8, seed=2),
        seed=5,
        base=model.bases[0] if model.bases else None,
    )
    assert repeated.equals(history)
    np.testing.assert_array_equal(novelty(again, given), novelty(model, given))


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", ["ndcc", "deep_ensemble", "autoencoder_patch"])
def test_models_take_up_their_checkpoints(name, classifier, train, tmp_path):
    kind = find(name)
    few = {} if name == "deep_ensemble" else {"epochs": 3, "checkpoint_every": 1}

    def fingerprint(work, progress=None):
        model = kind(tiny(kind, **few))
        base = base_of(model, classifier)
        fit(model, train, seed=3, work=work, progress=progress, base=base)
        return model.fingerprint()

    def kill(epoch, epochs, values):
        if epoch == epochs - 1:
            raise Killed

    undisturbed = fingerprint(None)
    with pytest.raises(Killed):
        fingerprint(tmp_path / "run", kill)
    assert fingerprint(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("name", ["odin", "one_class_svm", "deep_ensemble"])
def test_a_model_on_another_one_asks_for_it(name, fitted, classifier, tmp_path, train):
    model, _ = fitted(name)
    before = classifier.fingerprint()
    with pytest.raises(ConfigError, match="builds on a fitted"):
        fit(type(model)(model.settings), train)
    model.save(tmp_path / "saved.safetensors")
    with pytest.raises(ConfigError, match="builds on a fitted"):
        load_model(tmp_path / "saved.safetensors", device="cpu")
    other = changed(classifier, lambda n, v: v + 1 if n == "vgg.classifier.6.bias" else v)
    with pytest.raises(ConfigError, match="fitted on other bases"):
        load_model(tmp_path / "saved.safetensors", device="cpu", bases=(other,))
    assert classifier.fingerprint() == before


def changed(classifier: Model, change) -> Model:
    """The classifier with other weights."""
    other = type(classifier)(classifier.settings)
    other.classes = classifier.classes
    other.restore({n: change(n, v) for n, v in classifier.state().items()})
    return other


def test_where_the_weights_come_from_is_recorded(classifier, tmp_path):
    assert classifier.record == {"initial_weights": "random, seed 5"}
    path = tmp_path / "vgg.safetensors"
    classifier.save(path)
    assert load_model(path, device="cpu").record == classifier.record


def test_training_starts_from_the_named_file(classifier, train, tmp_path):
    import torch

    torch.save(classifier.layers["vgg"].state_dict(), tmp_path / "start.pth")
    changes = {"weights": tmp_path / "start.pth", "epochs": 1, "learning_rate": 1e-9}
    kind = type(classifier)
    model = kind(tiny(kind, **changes))
    fit(model, train)
    assert model.record["initial_weights"].startswith("start.pth sha256 ")
    weights, expected = (one.layers["vgg"].features[0].weight for one in (model, classifier))
    torch.testing.assert_close(weights, expected)


def test_an_unknown_preset_a_foreign_setting_and_an_unknown_key_are_refused():
    kind = find("one_class_svm")
    with pytest.raises(ConfigError, match="no preset 'large'"):
        kind("large")
    with pytest.raises(ConfigError, match=r"takes tasks\.models\.ndcc\.Configuration"):
        find("ndcc")(kind.resolve("paper"))
    with pytest.raises(ConfigError, match="one_class_svm: wrong settings: mu is not a setting"):
        kind.resolve("paper", {"mu": 1})


def test_what_changes_no_number_is_in_no_key():
    plain = find("vgg_classifier").resolve("small")
    changes = {"checkpoint_every": 3, "weights": "vgg.pth"}
    changed = find("vgg_classifier").resolve("small", changes)
    assert changed.model_dump() == plain.model_dump() and changed.checkpoint_every == 3


def test_training_on_novel_samples_is_refused(valid):
    with pytest.raises(ConfigError, match="8 training samples are labelled novel"):
        fit(find("ndcc")("small"), valid)


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
    broken = changed(classifier, lambda n, v: v * np.nan if v.is_floating_point() else v)
    with pytest.raises(NoveltyError, match="logits of row 0 are not all finite"):
        novelty(broken, test_set)


def test_a_gpu_that_is_not_there_is_said(classifier):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="no GPU"):
        find("ndcc")("small").prepare(device="cuda")
    with pytest.raises(ConfigError, match="unknown"):
        find("ndcc")("small").prepare(device="abacus")


def test_a_foreign_file_is_not_a_model(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(SourceError, match="not written by this project"):
        load_model(tmp_path / "a.safetensors")
    with pytest.raises(SourceError, match="not found"):
        load_model(tmp_path / "b.safetensors")


def test_a_model_of_another_version_is_named(classifier, tmp_path):
    header = {"model": "odin", "settings": {"heat": 3}, "network": None, "network_settings": None}
    write_tensors(tmp_path / "a.safetensors", {"epsilon": np.zeros(1)}, header)
    with pytest.raises(SourceError, match="settings of another version"):
        load_model(tmp_path / "a.safetensors", bases=(classifier,), device="cpu")


def test_tensors_come_back_as_they_were(tmp_path):
    state = {"a": np.arange(6).reshape(2, 3)[:, ::2], "b": np.array([1.5])}
    write_tensors(tmp_path / "x.safetensors", state, {"k": "v"})
    back = read_tensors(tmp_path / "x.safetensors")
    assert {n: v.numpy().tolist() for n, v in back.items()} == {"a": [[0, 2], [3, 5]], "b": [1.5]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
