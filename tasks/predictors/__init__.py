"""Open-world predictors, one file each; a new file is found by itself.

Every module of this package is a predictor named like its file, except `base` and names that begin
with an underscore. A predictor's module must not import torch before it is fitted or loaded.
"""

from pathlib import Path

from schemas.errors import SourceError
from storage.tensors import read_header, read_tensors
from tasks.engine.plugins import Plugins
from tasks.predictors.base import Predictor, revive

PLUGINS = Plugins(__name__, __path__, "predictor", Predictor)
predictor_names = PLUGINS.names
find_predictor = PLUGINS.find
resolved_predictors = PLUGINS.resolved


def load_predictor(path: Path, *, device: str = "auto") -> Predictor:
    """The predictor that `Predictor.save` wrote, ready to predict or to be fitted further."""
    header = read_header(path)
    if "predictor" not in header:
        raise SourceError(f"{path} holds no predictor but {sorted(header)}; name another file")
    kind = find_predictor(header["predictor"])
    return revive(kind, header, read_tensors(path), device=device)
