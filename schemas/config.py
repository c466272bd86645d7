"""Base of every flow's configuration: frozen, described, unknown keys refused."""

from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from schemas.errors import ConfigError
from schemas.similar import did_you_mean


class Settings(BaseModel):
    """Settings of one stage. All of them are part of the content key of what the stage makes."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # For help and deployments. Workers show neither, and it is a tenth of their start.
        use_attribute_docstrings=parent_process() is None,
    )


def _names_or_tree(value: Any) -> Any:
    """`a,b` and [a, b] are names with nothing changed; a mapping has settings by name."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        names = [name.strip() for entry in value for name in str(entry).split(",")]
        return {name: {} for name in names if name}
    if isinstance(value, dict):
        return {name: settings or {} for name, settings in value.items()}
    return value


Choice = Annotated[dict[str, dict[str, Any]], BeforeValidator(_names_or_tree)]
"""Plug-ins by name, each with the settings that differ from its preset; `all` names every one.

`[ndcc, odin]` and `{ndcc: {epochs: 40}, odin: {}}` are both understood; on the command line
`--models ndcc,odin --models.ndcc.epochs 40`.
"""


ConfigType = TypeVar("ConfigType", bound=BaseModel)


MOST_VALUES = 1_000_000
"""Aliases of aliases in a file of a few lines may stand for more values than fit into memory."""


def read_config_file(path: Path) -> dict[str, Any]:
    """A YAML file of settings."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"config {path} is nested too deeply to be settings") from None
    # A scalar such as 2026-13-45 or a number of 5,000 digits is a ValueError, `!!bool x` a
    # KeyError, `!!timestamp x` an AttributeError.
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError) as error:
        raise ConfigError(f"config {path} is not valid YAML{_place_in_yaml(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config {path} holds {type(data).__name__}, expected key: value lines")
    waiting: list[Any] = [data]
    for _ in range(MOST_VALUES):
        if not waiting:
            return data
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
    raise ConfigError(f"config {path} holds more than {MOST_VALUES:,} values, aliases counted")


def _place_in_yaml(error: Exception) -> str:
    """Where the reader stopped and why, in a few words."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": {str(error).partition(chr(10))[0]}"
    mark = error.problem_mark
    start = error.context_mark
    since = f" (what it belongs to begins in line {start.line + 1})" if start else ""
    return f": line {mark.line + 1}, column {mark.column + 1}: {error.problem}{since}"


def make_config(model: type[ConfigType], values: dict[str, Any]) -> ConfigType:
    """Validate settings; all problems in one sentence."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = _settings_beside(model, problem["loc"])
                meant = did_you_mean(str(problem["loc"][-1]), known)
                problems.append(f"{place} is not a setting (there are: {', '.join(known)}){meant}")
            else:
                # A rule between settings has all of them as its input: too much to show.
                no_value = problem["type"] == "missing" or not problem["loc"]
                value = "" if no_value else f", found {problem['input']!r}"
                said = problem["msg"].removeprefix("Value error, ").lower()
                problems.append(f"{place}: {said}{value}" if place else said)
        raise ConfigError("wrong settings: " + "; ".join(problems)) from None


def _settings_beside(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The settings that there are where an unknown one stands."""
    for part in place[:-1]:
        field = model.model_fields.get(str(part))
        kinds = [field.annotation] if field else []
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not below:
            return []
        model = below[0]
    return sorted(model.model_fields)
