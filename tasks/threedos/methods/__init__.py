"""Ways to train a point network for open-set recognition, one file each (spec threedos 1.6).

A file's subclass of `Method` is found by the file's name.
"""

from tasks.plugins import Plugins
from tasks.threedos.methods.base import Method

_FILES = Plugins(__name__, __path__, "method", Method, helpers=("presets",))
NAMES = _FILES.names()
find = _FILES.find
