"""`novelty models`, `novelty networks`, `novelty scores` and `novelty predictors`."""

import pytest

from flows.cli import main
from schemas.errors import ConfigError
from tasks.operations.plugin_list import KINDS, plugin_rows, setting_rows


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
