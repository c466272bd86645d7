"""Which runs a configuration asks for, what is in their keys, what is refused before any work."""

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, SourceError
from schemas.novelcraft import Config
from tasks import models
from tasks.evaluation.model_runs import PlannedRun, plan_facts
from tasks.evaluation.stages import check_scores
from tasks.novelcraft.runs import CONVENTIONS, chosen_runs

KEYS = {name: {"fit_key": f"{name} fit", "data_key": f"{name} all"} for name in CONVENTIONS}
MODELS: dict[str, dict[str, Any]] = {
    "colour_rarity": {},
    "vgg_classifier": {},
    "odin": {},
    "ndcc": {},
    "symbolic_mlp": {"contexts": [2, 5]},
    "multimodal": {"visual": "colour_rarity"},
}


def planned(keys: Any = KEYS, **options: Any) -> list[PlannedRun]:
    config = Config(source=Path("x"), **({"models": MODELS} | options))
    return plan_facts("novelcraft", config, chosen_runs(config), keys)


def ids(keys: Any = KEYS, **options: Any) -> dict[str, str]:
    """run_id of each model, and context where it has one; `all` on the protocol of all classes."""
    found = {}
    for run in planned(keys, **options):
        place = "all" if run.facts.protocol == "symbolic_all" else ""
        words = (run.facts.model, str(run.facts.settings.get("context", "")), place)
        found[" ".join(word for word in words if word)] = run.mark.run_id
    return found


def in_all(names: set[str]) -> set[str]:
    return {f"{name} all" for name in names}


def with_setting(model: str, **changes: Any) -> dict[str, Any]:
    return MODELS | {model: MODELS[model] | changes}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


FUSED = "multimodal 5"
VISUAL = ("vgg_classifier", "odin", "ndcc")
SYMBOLIC = {"symbolic_mlp 2", "symbolic_mlp 5"}


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"models": with_setting("vgg_classifier", epochs=11)}, {"vgg_classifier", "odin"}),
        ({"models": with_setting("odin", temperature=10)}, {"odin"}),
        ({"models": with_setting("colour_rarity", bits=4)}, {"colour_rarity", FUSED}),
        ({"models": with_setting("vgg_classifier", checkpoint_every=3)}, set()),
        ({"train": {"batch_size": 8}}, {*VISUAL, *SYMBOLIC, *in_all(SYMBOLIC), FUSED}),
        ({"models": with_setting("ndcc", batch_size=32), "train": {"radius": 8}}, {"ndcc"}),
        ({"device": "cpu"}, set()),
    ],
    ids=["vgg", "odin", "rarity", "checkpoints", "all", "specific", "device"],
)  # fmt: skip
def test_a_setting_changes_the_keys_of_exactly_its_runs(options, other):
    assert changed(ids(), ids(**options)) == other


def test_a_preset_a_version_and_rows_change_the_keys_of_exactly_their_runs(monkeypatch):
    before = ids()
    same_visual = with_setting("multimodal", visual="colour_rarity")
    paper = ids(preset="paper", models=same_visual)
    # These have the same settings under both names.
    assert changed(before, paper) == before.keys() - {"colour_rarity"}
    other = {"fit_key": "other", "data_key": "other"}
    assert changed(before, ids(KEYS | {"symbolic": other})) == SYMBOLIC
    assert changed(before, ids(KEYS | {"symbolic_all": other})) == {FUSED, *in_all(SYMBOLIC)}
    assert changed(before, ids(KEYS | {"visual": KEYS["visual"] | {"data_key": "more"}})) == set()
    monkeypatch.setattr(models.find("vgg_classifier"), "version", 2)
    # ndcc is the same network with another loss.
    assert changed(before, ids()) == {"vgg_classifier", "odin", "ndcc"}
    assert "tasks" not in str([run.facts for run in planned()])


def test_weights_count_by_content_and_not_by_path(tmp_path):
    one, two = tmp_path / "one.pth", tmp_path / "two.pth"
    one.write_bytes(b"weights")
    two.write_bytes(b"weights")
    started = ids(vgg_weights=one)
    assert changed(ids(), started) == {"vgg_classifier", "odin", "ndcc"}
    assert changed(started, ids(vgg_weights=two)) == set()
    two.write_bytes(b"others")
    assert changed(started, ids(vgg_weights=two)) == {"vgg_classifier", "odin", "ndcc"}
    with pytest.raises(SourceError, match="does not exist"):
        ids(vgg_weights=tmp_path / "none.pth")


def test_what_a_model_builds_on_comes_first_and_is_named():
    runs = planned(
        models={"odin": {}, "multimodal": {"visual": "odin", "context": 10}}, seeds=(0, 1)
    )
    names = [run.facts.model for run in runs]
    assert names.index("vgg_classifier") < names.index("odin") < names.index("multimodal")
    by_id = {run.mark.run_id: run.facts for run in runs}
    for run in runs:
        if run.facts.model != "multimodal":
            continue
        visual, symbolic = (by_id[base] for base in run.facts.base_runs)
        assert (visual.model, visual.seed) == ("odin", run.facts.seed)
        assert (symbolic.settings["context"], symbolic.seed) == (10, run.facts.seed)
        assert symbolic.protocol == "symbolic_all"
    assert len(runs) == 2 * (1 + 1 + 3 + 1)


def test_what_draws_nothing_has_one_run_without_a_seed():
    runs = planned(models={"colour_rarity": {}, "ndcc": {}}, seeds=(0, 1, 2))
    assert [(run.facts.model, run.facts.seed) for run in runs] == [
        ("colour_rarity", None), ("ndcc", 0), ("ndcc", 1), ("ndcc", 2),
    ]  # fmt: skip


def test_all_are_all_that_fit():
    assert {run.facts.model for run in planned(models={"all": {}}, protocols=("symbolic",))} == {
        "symbolic_mlp"
    }
    everything = {run.facts.model for run in planned(models={"all": {}})}
    kinds = [models.find(name) for name in models.names()]
    fitting = [kind for kind in kinds if kind.modality in ("image", "states", "runs")]
    assert everything == {
        kind.name for kind in fitting if not kind.uses_network and not kind.needs_weights
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models": {"nonsense": {}}}, "no model 'nonsense'; there are: "),
        ({"models": {"ndcc": {"epoch": 3}}}, "ndcc: wrong settings: epoch is not a setting"),
        ({"models": {"ndcc": {"epochs": "x"}}}, "ndcc: wrong settings: epochs: "),
        ({"models": {"ndcc": {}}, "preset": "huge"}, "ndcc has no preset 'huge'"),
        ({"models": {"ndcc": {}}, "train": {"members": 3}}, "train.members: none of the models"),
        ({"models": {}, "train": {"epochs": 3}}, "train.epochs: there is no model"),
        ({"protocols": ("audio",)}, "novelcraft has no protocol 'audio'; there are: visual"),
        ({"models": {"ndcc": {}}, "protocols": ("fused",)}, "ndcc has protocol visual, which is"),
        ({"models": {"symbolic_mlp": {"context": 7}}}, "context 7 has no windows: windows"),
        ({"models": {"multimodal": {"context": 4}}}, "one run of symbolic_mlp with context 4"),
        ({"networks": {"nonsense": {}}}, "no network 'nonsense'"),
        ({"models": {"odin": {"base": "multimodal"}}}, "base is multimodal, expected a classifier"),
        ({"predictors": {"evm": {}}}, "predictors evm do not fit novelcraft"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_before_any_work(options, said):
    with pytest.raises(ConfigError, match=said) as found:
        planned(**options)
    assert "\n" not in str(found.value)


def test_a_score_that_fits_no_model_is_refused():
    def gives(*names: str) -> dict[str, frozenset[str]]:
        config = Config(source=Path("x"), models={name: {} for name in names})
        return {run.kind.name: run.kind.gives for run in chosen_runs(config)}

    with pytest.raises(ConfigError, match="score energy fits none of the models colour_rarity"):
        check_scores(["energy"], gives("colour_rarity"))
    check_scores(["energy"], gives("colour_rarity", "ndcc"))


def test_what_only_novelcraft_asks_for_comes_from_its_offer():
    runs = {run.facts.model: run.facts for run in planned()}
    assert {runs[name].settings["item_bar_rows"] for name in ("ndcc", "colour_rarity")} == {22}
    chosen = {name: runs["odin"].settings[name] for name in ("base", "temperature", "epsilon")}
    assert chosen == {"base": "vgg_classifier", "temperature": 1000, "epsilon": 0}
    assert not any(runs[name].changed for name in ("ndcc", "colour_rarity", "odin"))
    own = planned(models={"odin": {"base": "ndcc", "epsilon": 0.002}, "ndcc": {}})
    (odin,) = [run for run in own if run.facts.model == "odin"]
    assert odin.facts.changed == {"base": "ndcc", "epsilon": 0.002}
    assert [base.facts.model for base in odin.bases] == ["ndcc"]
    both = planned(models={"odin": {"base": "all"}, "ndcc": {}, "vgg_classifier": {}})
    bases = [run.bases[0].facts.model for run in both if run.facts.model == "odin"]
    assert sorted(bases) == ["ndcc", "vgg_classifier"]


def test_odin_of_the_paper_is_chosen_on_validation_unless_a_number_is_given():
    for given, choose in (({}, "validation"), ({"temperature": 10}, "fixed")):
        runs = planned(preset="paper", models={"odin": given})
        (odin,) = [run.facts for run in runs if run.facts.model == "odin"]
        assert odin.settings["choose"] == choose
        assert (odin.settings["space"], odin.settings["step"]) == ("pixel1", "corrected")
        assert odin.changed.keys() == given.keys() | ({"choose", "epsilon"} if given else set())
    assert (odin.settings["temperature"], odin.settings["epsilon"]) == (10, 0)


def test_a_model_of_another_modality_is_refused(monkeypatch):
    monkeypatch.setattr(models.find("colour_rarity"), "modality", "cloud")
    with pytest.raises(ConfigError, match="colour_rarity does not fit novelcraft"):
        planned(models={"colour_rarity": {}})
    names = {run.facts.model for run in planned(models={"all": {}})}
    assert "colour_rarity" not in names and "ndcc" in names
