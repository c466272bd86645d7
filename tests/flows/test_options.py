"""Options of plug-ins: names, settings of each, the same in a file; wrong ones are sentences."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from flows.options import add_options, chosen_values, split_settings
from schemas.config import Settings
from schemas.errors import ConfigError
from schemas.runs import RunChoices
from tasks import models
from tasks.engine.plugins import Plugin


class Small(RunChoices):
    """A benchmark: with no more than runs."""

    source: str = "x"


def config(*words: str) -> Small:
    parser = argparse.ArgumentParser()
    add_options(parser, Small)
    known, settings = split_settings(words, Small)
    return chosen_values(parser.parse_args(known), Small, settings)


def test_names_and_settings_of_plugins() -> None:
    made = config("--models", "a,b", "--models.a.epochs", "40", "--models.b.odin.step=0.1")
    assert made.models == {"a": {"epochs": "40"}, "b": {"odin": {"step": "0.1"}}}
    assert config("--models", "a", "--models", "b").models == {"a": {}, "b": {}}
    assert config("--scores.knn.k", "50").scores == {"all": {}, "knn": {"k": "50"}}
    assert config("--train.batch-size", "8").train == {"batch_size": "8"}
    assert config("--seeds", "0,1,2", "--source", "y").seeds == (0, 1, 2)


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("models: [a, b]\nscores: {knn: {k: 50}}\ntrain: {epochs: 3}\n")
    made = config("--config", str(path))
    assert made.models == {"a": {}, "b": {}} and made.scores == {"knn": {"k": 50}}
    path.write_text("models: {a: {epochs: 3, rate: 1}, b: }\n")
    over = config("--config", str(path), "--models.a.epochs", "4")
    assert over.models == {"a": {"epochs": "4", "rate": 1}, "b": {}}
    assert config("--config", str(path), "--models", "a").models == {"a": {"epochs": 3, "rate": 1}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--models.a.epochs", "4"), "--models.a: a is not among the models; name it with"),
        (("--models", "a", "--models.a", "4"), "--models.a: expected --models.a.SETTING VALUE"),
        (("--models", "a", "--models.a.epochs"), "--models.a.epochs: expected a value after it"),
        (("--train.epochs", "4", "--train.epochs=5"), "--train.epochs is given twice; it takes"),
        (
            ("--models", "a", "--models.a.rate-x", "4", "--models.a.rate_x", "5"),
            "--models.a.rate_x is given twice; it takes one value",
        ),
        (("--train.epochs", "--source", "y"), "--train.epochs: expected a value after it"),
    ],
)
def test_wrong_words_are_sentences(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(*words)


class Odin(Settings):
    step: float = 0.1
    """Length of the step."""


class Configuration(Settings):
    epochs: int = Field(10, ge=1)
    """Epochs."""
    orders: tuple[int, ...] = (5,)
    """Orders."""
    limit: int | None = 3
    """A limit."""
    odin: Odin = Odin()
    """Nested."""


class Model(Plugin):
    name = "toy"
    configuration = Configuration
    presets = {"small": {"epochs": 2}, "paper": Configuration(epochs=200)}  # noqa: RUF012


def test_a_plugin_resolves_what_was_given() -> None:
    def resolved(preset: str, **changes: Any) -> Configuration:
        made = Model.resolve(preset, changes)
        assert isinstance(made, Configuration)
        return made

    assert resolved("small").epochs == 2 and resolved("paper").epochs == 200
    assert resolved("small", epochs="40", orders="2,5,10").orders == (2, 5, 10)
    assert resolved("small", limit="none").limit is None
    assert resolved("small", odin={"step": "0.5"}).odin.step == 0.5
    with pytest.raises(ConfigError, match="toy has no preset 'large'; there are: small, paper"):
        Model.resolve("large")
    with pytest.raises(ConfigError, match="toy: wrong settings: epochs: input should be greater"):
        Model.resolve("small", {"epochs": "0"})
    wrong = r"toy: wrong settings: epoch is not a setting .*; did you mean epochs\?"
    with pytest.raises(ConfigError, match=wrong):
        Model.resolve("small", {"epoch": "5"})
    with pytest.raises(ConfigError, match=r"odin.stp is not a setting .*; did you mean step\?"):
        Model.resolve("small", {"odin": {"stp": "5"}})
    with pytest.raises(ConfigError, match=r"no model 'patch_memroy'.*; did you mean patch_memory"):
        models.find("patch_memroy")
