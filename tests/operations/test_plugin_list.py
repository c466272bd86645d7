"""`novelty models`, `novelty networks`, `novelty scores` and `novelty predictors`."""

from pathlib import Path

import numpy as np
import pytest

from flows.cli import main
from schemas.errors import ConfigError, NoveltyError
from tasks.engine.plugins import Plugins
from tasks.operations.plugin_list import KINDS, plugin_rows, setting_rows
from tasks.scores.base import Outputs, Score


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_plugin_is_listed_with_its_settings(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plugin_rows(kind)
    assert rows.height and rows["about"].str.len_chars().min() > 0
    for name in rows["name"]:
        assert setting_rows(kind, name).height
    assert main([kind]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in rows["name"])


def test_values_are_those_of_the_preset() -> None:
    def epochs(preset: str) -> list[str]:
        return setting_rows("models", "ndcc", preset).filter(setting="epochs")["value"].to_list()

    assert epochs("paper") != epochs("small")
    with pytest.raises(ConfigError, match="models: no 'nothing'; there are: arpl"):
        setting_rows("models", "nothing")
    with pytest.raises(ConfigError, match="ndcc has no preset 'large'"):
        setting_rows("models", "ndcc", "large")


def test_a_model_fits_where_there_are_samples_of_its_modality() -> None:
    rows = {row["name"]: row for row in plugin_rows("models").to_dicts()}
    assert rows["vgg_classifier"]["benchmarks"] == "novelcraft, semantic"
    assert rows["cross_entropy"]["benchmarks"] == "threedos"
    assert rows["frame_backbone"]["benchmarks"] == "kowl"
    assert "none" not in {row["benchmarks"] for row in rows.values()}


def test_a_preset_that_a_score_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="nearest has no preset 'large'; there are: none"):
        setting_rows("scores", "nearest", "large")


SOURCE = """
from tasks.scores.base import Score
class Mine(Score):
    name = "{name}"
    version = {version}
    needs = frozenset({{"novelty"}})
    def _score(self, outputs):
        return outputs.novelty.tolist()
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_there", r"/mine.py does not load \(ModuleNotFoundError: No module"),
        ("def f(:", r"/mine.py does not load \(SyntaxError: .*line 1\)"),
        ("1 / 0", r"/mine.py does not load \(ZeroDivisionError: division by zero\); mend it"),
        (SOURCE.format(name="other", version=1), "defines no Score with name = 'mine'"),
        (SOURCE.format(name="mine", version="'two'"), "version is 'two', expected a whole number"),
        (SOURCE.format(name="mine", version="True"), "version is True, expected a whole number"),
    ],
)
def test_a_broken_file_is_named_in_a_sentence(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = package(text, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        plugins.find("mine")


def package(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins[Score]:
    """A package of one plug-in, called like the folder of its test."""
    folder = path / path.name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(path))
    return Plugins(folder.name, [str(folder)], "score", Score)


def test_a_score_that_gives_no_array_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = package(SOURCE.format(name="mine", version=3), tmp_path, monkeypatch)
    score = plugins.find("mine")()
    with pytest.raises(TypeError, match="score mine gave a list, expected an array of float64"):
        score.score(Outputs(novelty=np.zeros(2)))


def test_numbers_that_are_not_finite_are_told_from_outputs_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score's own mistake is not laid to the network."""
    root = "__import__('numpy').sqrt(outputs.novelty)"
    text = SOURCE.format(name="mine", version=1).replace("outputs.novelty.tolist()", root)
    score = package(text, tmp_path, monkeypatch).find("mine")()
    said = "^score mine gave NaN for 2 of 3 samples whose outputs are finite, first row 1; mend"
    with np.errstate(invalid="ignore"), pytest.raises(NoveltyError, match=said):
        score.score(Outputs(novelty=np.array([1.0, -1.0, -9.0])))
    with pytest.raises(NoveltyError, match=r"^novelty of row 1 is nan; the network diverged"):
        score.score(Outputs(novelty=np.array([1.0, np.nan])))
    assert score.score(Outputs(novelty=np.array([4.0]))).tolist() == [2.0]
