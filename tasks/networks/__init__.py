"""Networks below models, one file each; a file's subclass of `Network` is found by its name."""

from tasks.engine.plugins import Plugins
from tasks.networks.base import Network

PLUGINS = Plugins(
    __name__,
    __path__,
    "network",
    Network,
    helpers=("augment", "geometry", "heads", "wide_resnet"),
)
names = PLUGINS.names
find = PLUGINS.find
selection = PLUGINS.selection


def names_of(modality: str) -> tuple[str, ...]:
    """Networks that take samples of that modality."""
    return tuple(name for name in names() if find(name).modality == modality)
