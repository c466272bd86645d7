"""Plug-ins of a package, one file each: a new file is found by itself.

Every module of the package is one, named like its file, except `base`, names that begin with an
underscore and the helpers that the package names. Nothing is imported until one is asked for.
"""

import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, UnionType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from schemas.config import Settings, make_config
from schemas.errors import ConfigError, NoveltyError
from schemas.extras import missing_extra
from schemas.similar import did_you_mean

ALL = "all"


class Plugin:
    """What every plug-in has: a name, a version, described settings and named presets of them.

    Raise `version` when the same input gives another output: it is in the key of every run that
    uses the plug-in. A setting that changes no number is declared with `exclude=True` and stays
    out of the key.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    configuration: ClassVar[type[Settings]] = Settings
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def resolve(
        cls, preset: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> Settings:
        """The settings of a preset with what was asked to differ; a wrong one is refused.

        A plug-in without presets has its defaults under every name.
        """
        values: dict[str, Any] = {}
        if preset is not None and cls.presets:
            if preset not in cls.presets:
                names = ", ".join(cls.presets)
                meant = did_you_mean(preset, cls.presets)
                raise ConfigError(f"{cls.name} has no preset {preset!r}; there are: {names}{meant}")
            values = dict(cls.presets[preset])
        try:
            changed_values = _from_text(cls.configuration, changes or {})
            return make_config(cls.configuration, put_over(values, changed_values))
        except ConfigError as error:
            raise ConfigError(f"{cls.name}: {error}") from None


def _from_text(model: type[BaseModel], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a command line gives them: `2,5,10` for several values, `none` for nothing."""
    read = {}
    for name, value in changes.items():
        field = model.model_fields.get(name)
        kinds = _kinds(field.annotation) if field is not None else ()
        nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if isinstance(value, Mapping) and nested:
            value = _from_text(nested[0], value)
        elif isinstance(value, str) and value == "none" and type(None) in kinds:
            value = None
        elif isinstance(value, str) and {get_origin(kind) for kind in kinds} & {tuple, list}:
            value = [part.strip() for part in value.split(",") if part.strip()]
        read[name] = value
    return read


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def put_over(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` put over `before`, also inside of nested settings."""
    merged = dict(before)
    for name, value in changes.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping | BaseModel):
            value = put_over(dict(below), value)
        merged[name] = value
    return merged


Kind = TypeVar("Kind")
_found: dict[tuple[str, str], Any] = {}
"""Classes by package and name; listing a folder for each question would cost milliseconds."""


class Resolved(NamedTuple):
    """A chosen plug-in: its class, all its settings, and those that differ from the preset."""

    kind: Any
    settings: Settings
    changed: dict[str, Any]


def _is_current(kind: type) -> bool:
    """Whether its module still has it."""
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


@dataclass(frozen=True)
class Plugins(Generic[Kind]):
    """Subclasses of `kind` in the modules of `package`; `what` is what messages call one."""

    package: str
    path: Iterable[str]
    what: str
    kind: type[Kind]
    helpers: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        modules = (module.name for module in pkgutil.iter_modules(self.path))
        not_these = {"base", *self.helpers}
        return tuple(sorted(n for n in modules if not n.startswith("_") and n not in not_these))

    def find(self, name: str) -> type[Kind]:
        """The class of the one called `name`."""
        known = _found.get((self.package, name))
        if known is not None and _is_current(known):
            return known
        if name not in self.names():
            meant = did_you_mean(name, self.names())
            raise ConfigError(
                f"no {self.what} {name!r}; there are: {', '.join(self.names())}{meant}"
            )
        file = f"{self.package.replace('.', '/')}/{name}.py"
        module = self._imported(name, file)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, self.kind)
                and value.__module__ == module.__name__
                and getattr(value, "name", None) == name
            ):
                version = getattr(value, "version", None)
                if type(version) is not int:
                    raise ConfigError(f"{file}: version is {version!r}, expected a whole number")
                _found[self.package, name] = value
                return value
        raise ConfigError(f"{file} defines no {self.kind.__name__} with name = {name!r}")

    def _imported(self, name: str, file: str) -> ModuleType:
        """Its module; a file that does not load is named, a library that is missing too."""
        try:
            return import_module(f"{self.package}.{name}")
        except NoveltyError:
            raise
        except Exception as error:
            if missing_extra(error) is not None:
                raise
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{file} does not load ({why}); mend it or take it away") from error

    def selection(self, choice: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Names and changed settings that a choice asks for; `all` is every one.

        Settings of a plug-in that is not chosen are a mistake, and so is an unknown name.
        """
        changes = dict(choice)
        everything = changes.pop(ALL, None)
        for name in changes:
            self.find(name)
        if everything is None:
            return {name: changes[name] for name in sorted(changes)}
        return {name: changes.get(name, {}) for name in self.names()}

    def resolved(
        self,
        choice: Mapping[str, Mapping[str, Any]],
        preset: str | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> dict[str, Resolved]:
        """What a choice asks for, with all settings; a wrong name or setting is refused.

        `shared` changes settings of every plug-in that has them; a plug-in's own change wins, and
        a shared setting that none has is refused.
        """
        plugins: dict[str, Resolved] = {}
        left = dict(shared or {})
        for name, changes in self.selection(choice).items():
            kind: Any = self.find(name)
            fields = kind.configuration.model_fields
            fitting = {key: value for key, value in (shared or {}).items() if key in fields}
            settings = kind.resolve(preset, {**fitting, **changes})
            before, after = (
                each.model_dump(mode="json") for each in (kind.resolve(preset), settings)
            )
            changed = {key: value for key, value in after.items() if before[key] != value}
            plugins[name] = Resolved(kind, settings, changed)
            left = {key: value for key, value in left.items() if key not in fields}
        if left:
            names = ", ".join(plugins) or "none is chosen"
            raise ConfigError(f"train.{min(left)} is a setting of no {self.what} ({names})")
        return plugins
