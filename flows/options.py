"""Command-line options made from a configuration model: one per field, nested ones with a dot.

A field of plug-ins (`schemas.config.Choice`) takes names, `--models ndcc,odin`, and their settings,
`--models.ndcc.epochs 40`; a field of free settings takes `--train.epochs 40`.
"""

import argparse
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config import make_config, read_config_file
from schemas.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
INPUTS = ("source", "lists", "videos", "tests", "lake")
CHOICES = ("models", "predictors", "scores", "preset", "seeds")
"""Fields that stand first in the help, in this order: what is read, then what is made of it."""


def _plain(annotation: Any) -> Any:
    """The type itself where the field is optional."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return _plain(kinds[0]) if len(kinds) == 1 else str
    return annotation


def _is_choice(kind: Any) -> bool:
    """Whether a field names plug-ins, each with settings."""
    arguments = typing.get_args(kind)
    return typing.get_origin(kind) is dict and typing.get_origin(arguments[1]) is dict


def _is_free(kind: Any) -> bool:
    """Whether a field takes settings of any name."""
    return typing.get_origin(kind) is dict and typing.get_args(kind)[1] is Any


def split_settings(
    words: Sequence[str], model: type[BaseModel]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The words that argparse knows, and the settings of plug-ins among them, as trees by field."""
    kinds = {name: _plain(field.annotation) for name, field in model.model_fields.items()}
    trees: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, mark, value = word.partition("=")
        path = option.removeprefix("--").split(".")
        kind = kinds.get(path[0])
        if not option.startswith("--") or len(path) < 2 or not (_is_choice(kind) or _is_free(kind)):
            rest.append(word)
            continue
        if _is_choice(kind) and len(path) < 3:
            raise ConfigError(f"{option}: expected {option}.SETTING VALUE")
        if not mark:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"{option}: expected a value after it")
            value = queue.pop(0)
        tree = trees.setdefault(path[0], {})
        names = [path[1], *(name.replace("-", "_") for name in path[2:])]
        for name in names[:-1]:
            tree = tree.setdefault(name, {})
        last = names[-1].replace("-", "_")
        if last in tree:
            raise ConfigError(f"{option} is given twice; it takes one value")
        tree[last] = value
    return rest, trees


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%").replace("\n", " ")
    if field.is_required():
        return f"{text} (required)"
    default = field.get_default(call_default_factory=True)
    if _is_choice(_plain(field.annotation)) or isinstance(default, tuple):
        default = ",".join(map(str, default))
    missing: tuple[Any, ...] = (None, (), "", {}, PydanticUndefined)
    return text if default in missing else f"{text} (default: {default})"


def add_options(parser: argparse.ArgumentParser, model: type[BaseModel], prefix: str = "") -> None:
    """`--field` for every field of the model, and `--config FILE` for a YAML file of them.

    The help has the essential ones first, then the others, then a group for nested settings.
    """
    if prefix:
        about = (model.__doc__ or "").strip().partition("\n")[0].replace("%", "%%")
        first = rest = parser.add_argument_group(prefix.removesuffix("."), about)
    else:
        first = parser.add_argument_group("essentials")
        rest = parser.add_argument_group("more")
        first.add_argument("--config", type=Path, help="YAML file of settings; options win over it")
    below = []
    essential = [n for n in (*INPUTS, *CHOICES) if n in model.model_fields and not prefix]
    for name in dict.fromkeys([*essential, *model.model_fields]):
        field = model.model_fields[name]
        kind = _plain(field.annotation)
        option = f"--{prefix}{name.replace('_', '-')}"
        dest = f"{prefix}{name}"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below.append((kind, f"{prefix}{name.replace('_', '-')}."))
            continue
        group = first if field.is_required() or name in essential else rest
        common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": _help(field)}
        if kind is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        elif typing.get_origin(kind) is typing.Literal:
            group.add_argument(option, choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) in (tuple, list, dict):
            metavar = name.upper()
            if typing.get_origin(kind) is dict:
                metavar = "NAMES" if _is_choice(kind) else "KEY=VALUE"
            group.add_argument(option, action="append", metavar=metavar, **common)
        else:
            group.add_argument(option, metavar=name.upper(), **common)
    for nested, place in below:
        add_options(parser, nested, place)


def _merge(
    into: dict[str, Any], model: type[BaseModel], values: dict[str, Any], prefix: str = ""
) -> None:
    for name, field in model.model_fields.items():
        kind = _plain(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested = dict(into.get(name) or {})
            _merge(nested, kind, values, f"{prefix}{name.replace('_', '-')}.")
            if nested:
                into[name] = nested
            continue
        if f"{prefix}{name}" not in values:
            continue
        value = values[f"{prefix}{name}"]
        if _is_choice(kind):
            names = [one.strip() for entry in value for one in entry.split(",") if one.strip()]
            before = into.get(name)
            settings = before if isinstance(before, dict) else {}
            into[name] = {one: settings.get(one) or {} for one in names}
            continue
        if typing.get_origin(kind) in (tuple, list):
            value = [part for entry in value for part in entry.split(",")]
        if typing.get_origin(kind) is dict:
            pairs = [entry.partition("=") for entry in value]
            if wrong := [key for key, mark, _ in pairs if not mark]:
                raise ConfigError(f"--{name} {wrong[0]}: expected KEY=VALUE")
            value = {key: text for key, _, text in pairs}
        into[name] = value


def chosen_values(
    parsed: argparse.Namespace,
    model: type[Model],
    settings: dict[str, dict[str, Any]] | None = None,
) -> Model:
    """The configuration: defaults, then the file, then the options and settings given."""
    values = read_config_file(parsed.config) if parsed.config else {}
    _merge(values, model, vars(parsed))
    for field, tree in (settings or {}).items():
        values[field] = _with_settings(model, field, values.get(field), tree)
    config = make_config(model, values)
    check_paths(config)
    return config


def _with_settings(
    model: type[BaseModel], field: str, before: Any, tree: dict[str, Any]
) -> dict[str, Any]:
    """What a field of plug-ins or free settings has, with the settings given put over it."""
    declared = model.model_fields[field]
    if before is None:
        before = getattr(model, "unasked", {}).get(field)
    if before is None:
        before = declared.get_default(call_default_factory=True)
    if not _is_choice(_plain(declared.annotation)):
        return {**before, **tree}
    choices = dict(before) if isinstance(before, dict) else {str(name): {} for name in before}
    for name, changes in tree.items():
        if name not in choices and "all" not in choices:
            raise ConfigError(
                f"--{field}.{name}: {name} is not among the {field}; name it with --{field} {name}"
            )
        choices[name] = _over(choices.get(name) or {}, changes)
    return choices


def _over(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return before | {
        name: _over(before.get(name) or {}, value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }


def check_paths(config: BaseModel, prefix: str = "") -> None:
    """Every path but that of the lake is an input, so it must be there before anything starts."""
    for name, value in config:
        if isinstance(value, BaseModel):
            check_paths(value, f"{prefix}{name}.")
            continue
        for path in value.values() if isinstance(value, dict) else (value,):
            if isinstance(path, Path) and name != "lake" and not path.exists():
                raise ConfigError(f"{prefix}{name}: {path} does not exist; name a file or folder")
