"""Ways to train a point network for open-set recognition (3DOS section 4.2), one file each.

A file's subclass of `Method` is found by the file's name.
"""

from tasks.engine.plugins import Plugins
from tasks.threedos.methods.base import Method

PLUGINS = Plugins(__name__, __path__, "model of point clouds", Method, helpers=("setups",))
names = PLUGINS.names
find = PLUGINS.find
chosen = PLUGINS.chosen
