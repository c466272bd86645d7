"""Models of semantic anomalies, one file each; a new file is found by itself.

Most are a `NetworkModel`: a classifier, perhaps with an auxiliary task that is learnt beside the
classes. `odin` goes over such a network again, `pixel_gaussian` learns nothing of the content.
"""

from tasks.engine.plugins import Plugins
from tasks.semantic.models.base import Model

PLUGINS = Plugins(__name__, __path__, "model of semantic", Model, helpers=("updates", "views"))
names = PLUGINS.names
find = PLUGINS.find
chosen = PLUGINS.chosen
