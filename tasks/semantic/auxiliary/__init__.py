"""Auxiliary tasks that are learned beside the classes, one file each (spec semantic 2).

A file's subclass of `Auxiliary` is found by the file's name.
"""

from tasks.plugins import Plugins
from tasks.semantic.auxiliary.base import Auxiliary

_FILES = Plugins(__name__, __path__, "auxiliary task", Auxiliary, helpers=("updates", "views"))
NAMES = _FILES.names()
find = _FILES.find
