"""Plug-ins of a package, one file each: a new file is found by itself.

Every module of the package is one, named like its file, except `base`, names that begin with an
underscore and the helpers that the package names. Nothing is imported until one is asked for.
"""

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from schemas.errors import ConfigError

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Plugins(Generic[Kind]):
    """Subclasses of `kind` in the modules of `package`; `what` is what messages call one."""

    package: str
    path: Iterable[str]
    what: str
    kind: type[Kind]
    helpers: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        found = (module.name for module in pkgutil.iter_modules(self.path))
        not_these = {"base", *self.helpers}
        return tuple(sorted(n for n in found if not n.startswith("_") and n not in not_these))

    def find(self, name: str) -> type[Kind]:
        """The class of the one called `name`."""
        if name not in self.names():
            raise ConfigError(f"no {self.what} {name!r}; there are: {', '.join(self.names())}")
        module = import_module(f"{self.package}.{name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, self.kind)
                and value.__module__ == module.__name__
                and getattr(value, "name", None) == name
            ):
                return value
        file = f"{self.package.replace('.', '/')}/{name}.py"
        raise ConfigError(f"{file} defines no {self.kind.__name__} with name = {name!r}")
