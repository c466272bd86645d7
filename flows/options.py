"""Command-line options made from a configuration model: one per field, nested ones with a dot."""

import argparse
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config import make_config, read_config_file
from schemas.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def _plain(annotation: Any) -> Any:
    """The type itself where the field is optional."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return _plain(kinds[0]) if len(kinds) == 1 else str
    return annotation


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%").replace("\n", " ")
    if field.is_required():
        return f"{text} (required)"
    default = field.get_default(call_default_factory=True)
    return text if default in (None, (), PydanticUndefined) else f"{text} (default: {default})"


def add_options(parser: argparse.ArgumentParser, model: type[BaseModel], prefix: str = "") -> None:
    """`--field` for every field of the model, and `--config FILE` for a YAML file of them."""
    if not prefix:
        parser.add_argument(
            "--config", type=Path, help="YAML file of settings; options win over it"
        )
    for name, field in model.model_fields.items():
        kind = _plain(field.annotation)
        option = f"--{prefix}{name.replace('_', '-')}"
        dest = f"{prefix}{name}"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            add_options(parser, kind, f"{prefix}{name.replace('_', '-')}.")
            continue
        common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": _help(field)}
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(option, choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) in (tuple, list, dict):
            metavar = "KEY=VALUE" if typing.get_origin(kind) is dict else name.upper()
            parser.add_argument(option, action="append", metavar=metavar, **common)
        else:
            parser.add_argument(option, metavar=name.upper(), **common)


def _merge(
    into: dict[str, Any], model: type[BaseModel], given: dict[str, Any], prefix: str = ""
) -> None:
    for name, field in model.model_fields.items():
        kind = _plain(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested = dict(into.get(name) or {})
            _merge(nested, kind, given, f"{prefix}{name.replace('_', '-')}.")
            if nested:
                into[name] = nested
            continue
        if f"{prefix}{name}" not in given:
            continue
        value = given[f"{prefix}{name}"]
        if typing.get_origin(kind) in (tuple, list):
            value = [part for entry in value for part in entry.split(",")]
        if typing.get_origin(kind) is dict:
            pairs = [entry.partition("=") for entry in value]
            if wrong := [key for key, mark, _ in pairs if not mark]:
                raise ConfigError(f"--{name} {wrong[0]}: expected KEY=VALUE")
            value = {key: text for key, _, text in pairs}
        into[name] = value


def chosen_values(parsed: argparse.Namespace, model: type[Model]) -> Model:
    """The configuration: defaults, then the file, then the options given."""
    values = read_config_file(parsed.config) if parsed.config else {}
    _merge(values, model, vars(parsed))
    config = make_config(model, values)
    check_paths(config)
    return config


def check_paths(config: BaseModel, prefix: str = "") -> None:
    """Every path but that of the lake is an input, so it must be there before anything starts."""
    for name, value in config:
        if isinstance(value, BaseModel):
            check_paths(value, f"{prefix}{name}.")
            continue
        for path in value.values() if isinstance(value, dict) else (value,):
            if isinstance(path, Path) and name != "lake" and not path.exists():
                raise ConfigError(f"{prefix}{name}: {path} does not exist; name a file or folder")
