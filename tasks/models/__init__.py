"""Models, one file each; a file's subclass of `Model` is found by its name.

Nothing is imported until a model is asked for, and a model's module must not import torch at its
top: choices and content keys need only settings.
"""

from pathlib import Path

from schemas.errors import ConfigError, SourceError
from storage.tensors import read_header, read_tensors
from tasks import networks
from tasks.engine.plugins import Plugins
from tasks.models.base import Model

PLUGINS = Plugins(
    __name__,
    __path__,
    "model",
    Model,
    helpers=("clips", "clouds", "frames", "pictures", "released_clouds"),
)
names = PLUGINS.names
find = PLUGINS.find
selection = PLUGINS.selection


def make_model(
    name: str,
    settings: dict[str, object],
    network: str | None = None,
    network_settings: dict[str, object] | None = None,
) -> Model:
    """A model that is not fitted, of settings that are all there."""
    kind = find(name)
    below = None
    if network is not None:
        below = networks.find(network).resolve(None, network_settings)
    return kind(kind.resolve(None, settings), network, below)


def load_model(path: Path, *, device: str = "auto", bases: tuple[Model, ...] = ()) -> Model:
    """The fitted model that `Model.save` wrote; `bases` are the fitted ones that it builds on."""
    header = read_header(path)
    if "model" not in header:
        raise SourceError(f"{path} holds no model of this project; name a saved model")
    try:
        model = make_model(
            header["model"], header["settings"], header["network"], header["network_settings"]
        )
    except ConfigError as error:
        raise SourceError(
            f"{path} has settings of another version ({error}); fit it again"
        ) from None
    model.prepare(device=device, bases=bases)
    if header["bases"] != model.base_fingerprints():
        raise ConfigError(
            f"{path} was fitted on other bases: fingerprints {header['bases']}, found "
            f"{model.base_fingerprints()}; load those that were saved with it"
        )
    model.classes, model.record = header["classes"], header["record"]
    model.restore(read_tensors(path))
    return model
