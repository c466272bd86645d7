"""Open-world predictors, one file each; a new file is found by itself.

Every module of this package is a predictor named like its file, except `base` and names that begin
with an underscore. A predictor's module must not import torch before it is fitted or loaded.
"""

import pkgutil
from importlib import import_module
from pathlib import Path

from schemas.errors import ConfigError, SourceError
from tasks.detectors.base import read_header, read_tensors
from tasks.predictors.base import Predictor, revive

_NOT_PREDICTORS = {"base"}


def predictor_names() -> tuple[str, ...]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(n for n in found if not n.startswith("_") and n not in _NOT_PREDICTORS))


def find_predictor(name: str) -> type[Predictor]:
    """The class of the predictor called `name`."""
    if name not in predictor_names():
        raise ConfigError(f"no predictor {name!r}; there are: {', '.join(predictor_names())}")
    module = import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, Predictor)
            and value.__module__ == module.__name__
            and getattr(value, "name", None) == name
        ):
            return value
    raise ConfigError(f"tasks/predictors/{name}.py defines no Predictor with name = {name!r}")


def load_predictor(path: Path, *, device: str = "auto") -> Predictor:
    """The predictor that `Predictor.save` wrote, ready to predict or to be fitted further."""
    header = read_header(path)
    if "predictor" not in header:
        raise SourceError(f"{path} holds no predictor but {sorted(header)}; name another file")
    kind = find_predictor(header["predictor"])
    return revive(kind, header, read_tensors(path), device=device)
