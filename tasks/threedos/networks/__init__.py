"""Point-cloud networks, one file each; a file's subclass of `Network` is found by its name.

Rules that they and the methods cite by number are those of docs/threedos.md.
"""

from tasks.engine.plugins import Plugins
from tasks.threedos.networks.base import Network

PLUGINS = Plugins(
    __name__, __path__, "point network", Network, helpers=("augment", "geometry", "heads")
)
names = PLUGINS.names
find = PLUGINS.find
chosen = PLUGINS.chosen
