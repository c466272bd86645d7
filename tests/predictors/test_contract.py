"""What every predictor in the package promises."""

import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from schemas.errors import ConfigError, NoveltyError, SourceError
from storage.tensors import write_tensors
from tasks.predictors import (
    find_predictor,
    load_predictor,
    predictor_names,
    resolved_predictors,
)
from tasks.predictors.base import Examples, held_out, with_unknown
from tests.predictors import WIDTH, examples, named, samples

NAMES = predictor_names()


@pytest.fixture(scope="module")
def fitted():
    """Each predictor is fitted once on labels a to d."""
    done = {}

    def get(name: str):
        if name not in done:
            predictor = find_predictor(name)("small", device="cpu")
            predictor.fit(examples("abcd", 40, 1), examples("abcd", 20, 2), seed=[3, 0])
            done[name] = predictor
        return done[name]

    return get


def grown(name: str, seed: int = 3):
    """Fitted on a to d, then on a to f with some samples left unlabelled."""
    predictor = find_predictor(name)("small", device="cpu")
    predictor.fit(examples("abcd", 30, 1), examples("abcd", 20, 2), seed=[seed, 0])
    features, labels = samples("abcdef", 30, 4)
    labels = labels.scatter(np.arange(0, len(labels), 3), None)
    predictor.fit(Examples(features, labels), examples("abcdefg", 10, 5), seed=[seed, 1])
    return predictor


def test_all_are_found():
    assert NAMES == ("ann", "clustering", "evm", "gmm_finch", "threshold")
    with pytest.raises(ConfigError, match="gmm_finch"):
        find_predictor("base")


def test_finding_predictors_and_their_settings_does_not_import_torch():
    program = (
        "import sys; from tasks.predictors import predictor_names, find_predictor\n"
        "assert [find_predictor(n).resolve('paper').model_dump_json() for n in predictor_names()]\n"
        "heavy = {'torch', 'sklearn'} & sys.modules.keys(); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_declaration(name):
    kind = find_predictor(name)
    assert not kind.presets or {"paper", "released", "small"} <= kind.presets.keys()
    for preset in kind.presets or ("paper", "small"):
        settings = kind.resolve(preset)
        assert settings.model_config["frozen"] and settings.model_config["extra"] == "forbid"
        for field, info in type(settings).model_fields.items():
            assert info.description and info.description.endswith("."), f"{name}.{field}"
    if kind.presets:
        with pytest.raises(ConfigError, match="preset"):
            kind("large")


@pytest.mark.parametrize("name", NAMES)
def test_probabilities(name, fitted):
    predictor = fitted(name)
    labels, probabilities = predictor.predict(samples("abcdxyz", 20, 6)[0])
    assert labels[:5] == ("unknown", "a", "b", "c", "d")
    assert probabilities.dtype == np.float32 and probabilities.shape == (140, len(labels))
    assert (probabilities >= 0).all()
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_known_labels_are_named_and_others_are_unknown(name, fitted):
    predictor = fitted(name)
    features, labels = samples("abcd", 50, 7)
    assert (named(predictor, features) == labels.to_numpy()).mean() > 0.8
    found = named(predictor, samples("uvwxyz", 20, 8)[0])
    assert np.char.startswith(found, "unknown").mean() > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_novelty_is_higher_for_labels_it_was_never_given(name, fitted):
    predictor = fitted(name)
    known, novel = samples("abcd", 30, 17)[0], samples("uvwxyz", 20, 18)[0]
    values = predictor.novelty(np.concatenate([known, novel]))
    assert values.shape == (240,) and values.dtype == np.float64 and np.isfinite(values).all()
    assert (values[:120, None] < values[120:]).mean() > 0.9
    np.testing.assert_allclose(predictor.novelty(known[:1]), values[:1], rtol=1e-4, atol=1e-6)
    assert predictor.novelty(known[:0]).shape == (0,)


def test_settings_of_all_predictors_are_resolved_and_wrong_ones_refused():
    found = resolved_predictors({"all": {}, "ann": {"dropout": 0.3}}, "small", {"epochs": 2})
    assert tuple(found) == NAMES
    ann = found["ann"]
    assert (ann.settings.dropout, ann.settings.epochs, ann.settings.hidden) == (0.3, 2, 64)
    assert ann.changed == {"dropout": 0.3, "epochs": 2} and found["evm"].changed == {}
    assert "checkpoint_every" not in ann.settings.model_dump()
    own = resolved_predictors({"ann": {"epochs": 5}}, "small", {"epochs": 2})
    assert own["ann"].settings.epochs == 5
    for choice, train, said in (
        ({"svm": {}}, {}, "no predictor 'svm'"),
        ({"ann": {"drop": 1}}, {}, "ann: .*drop is not a setting"),
        ({"ann": {"dropout": 2}}, {}, "ann: .*dropout"),
        ({"evm": {}}, {"epochs": 2}, "train.epochs is a setting of no predictor"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolved_predictors(choice, "small", train)
    with pytest.raises(ConfigError, match="no preset 'large'"):
        resolved_predictors({"ann": {}}, "large")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_company(name, fitted):
    predictor = fitted(name)
    features = samples("abxy", 15, 9)[0]
    whole = predictor.predict(features).probabilities
    order = np.random.default_rng(0).permutation(len(features))
    np.testing.assert_allclose(
        predictor.predict(features[order]).probabilities, whole[order], atol=2e-5
    )
    np.testing.assert_allclose(predictor.predict(features[:1]).probabilities, whole[:1], atol=2e-5)
    assert predictor.predict(features[:0]).probabilities.shape == (0, whole.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_new_labels_come_after_the_old(name):
    predictor = grown(name)
    assert predictor.known == ("a", "b", "c", "d", "e", "f")
    assert predictor.predict(samples("a", 1, 1)[0]).labels[:7] == ("unknown", *"abcdef")
    features, labels = samples("abcdef", 40, 10)
    assert (named(predictor, features) == labels.to_numpy()).mean() > 0.75


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits(name, tmp_path):
    for run in (1, 2):
        grown(name).save(tmp_path / f"{run}.safetensors")
    first, second = (tmp_path / f"{run}.safetensors" for run in (1, 2))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_is_the_same(name, tmp_path):
    predictor = grown(name)
    path = tmp_path / "predictor.safetensors"
    predictor.save(path)
    loaded = load_predictor(path, device="cpu")
    assert loaded.settings == predictor.settings
    features = samples("abcdefgh", 20, 11)[0]
    assert loaded.predict(features).labels == predictor.predict(features).labels
    np.testing.assert_array_equal(
        loaded.predict(features).probabilities, predictor.predict(features).probabilities
    )
    # It also learns on as the original does.
    more = examples("abcdefgh", 25, 12)
    for one in (predictor, loaded):
        one.fit(more, examples("abcdefgh", 10, 13), seed=[3, 2])
    np.testing.assert_array_equal(
        loaded.predict(features).probabilities, predictor.predict(features).probabilities
    )


@pytest.mark.parametrize("name", NAMES)
def test_feedback_order_is_a_seeded_permutation(name, fitted):
    predictor = fitted(name)
    features = samples("abcx", 12, 14)[0]
    order = predictor.feedback_order(features, seed=[1, 2])
    assert sorted(order) == list(range(len(features)))
    np.testing.assert_array_equal(order, predictor.feedback_order(features, seed=[1, 2]))


@pytest.mark.parametrize("name", NAMES)
def test_an_unfitted_predictor_can_be_saved_but_not_asked(name, tmp_path):
    predictor = find_predictor(name)("small", device="cpu")
    with pytest.raises(ConfigError, match="not fitted"):
        predictor.predict(np.zeros((1, WIDTH)))
    predictor.save(tmp_path / "new.safetensors")
    assert load_predictor(tmp_path / "new.safetensors").known == ()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_features(name, fitted):
    with pytest.raises(ConfigError, match="expected"):
        fitted(name).predict(np.zeros((3, WIDTH + 1)))
    with pytest.raises(ConfigError, match="same model"):
        fitted(name).fit(Examples(np.zeros((2, 3)), pl.Series(["a", "b"])))
    fresh = find_predictor(name)("small", device="cpu")
    with pytest.raises(ConfigError, match="no labelled sample"):
        fresh.fit(Examples(np.zeros((2, 3)), pl.Series([None, None], dtype=pl.String)))
    with pytest.raises(NoveltyError, match="finite"):
        fresh.fit(Examples(np.full((2, 3), np.nan), pl.Series(["a", "b"])))


@pytest.mark.parametrize("label", ["unknown", "known", "unknown_3"])
def test_reserved_labels_are_refused(label):
    with pytest.raises(ConfigError, match="rename"):
        Examples(np.zeros((2, 3)), pl.Series(["a", label]))
    Examples(np.zeros((2, 3)), pl.Series(["unknown sport", "well known"]))


def test_what_is_not_a_predictor_is_not_loaded(tmp_path):
    with pytest.raises(SourceError, match="not found"):
        load_predictor(tmp_path / "absent.safetensors")
    write_tensors(tmp_path / "other.safetensors", {}, {"detector": "odin"})
    with pytest.raises(SourceError, match="no predictor"):
        load_predictor(tmp_path / "other.safetensors")


def test_a_detected_row_keeps_its_sum_and_names_unknown():
    rows = np.array([[0.0, 0.6, 0.4], [0.0, 0.5, 0.5], [0.2, 0.5, 0.3]])
    changed = with_unknown(rows, np.array([True, False, True]))
    np.testing.assert_allclose(changed[0], [0.6, 0.24, 0.16])
    np.testing.assert_allclose(changed[1], rows[1])
    np.testing.assert_allclose(changed[2], [0.6, 0.25, 0.15])
    assert rows[0, 1] == 0.6


def test_a_share_is_held_out_by_groups_where_there_are_any():
    labels = pl.Series(["a"] * 30 + ["b"] * 30 + ["c"])
    groups = np.append(np.repeat(np.arange(20), 3), -1)
    train = Examples(np.zeros((61, 2)), labels, groups)
    held = held_out(train, 0.3, [1])
    assert np.array_equal(held, held_out(train, 0.3, [1]))
    assert all(len(set(held[groups == group])) == 1 for group in range(20))
    assert [held[:30].sum(), held[30:60].sum(), held[60]] == [9, 9, False]
    # A label of one group is held out by single examples; part of an example set keeps its groups.
    one = Examples(np.zeros((20, 2)), pl.Series(["a"] * 20), np.zeros(20, np.int64))
    assert held_out(one, 0.3, [1]).sum() == 6
    assert train.take(held).groups.tolist() == groups[held].tolist()
    with pytest.raises(ConfigError, match="examples: 61 labels and 60 groups"):
        Examples(np.zeros((61, 2)), labels, groups[:60])
