"""Change rules of CONDDA/OND agents, one file each; a new file is found by itself.

Every module of this package is a rule named like its file, except `base` and names that begin with
an underscore.
"""

from tasks.condda.changes.base import ChangeRule
from tasks.engine.plugins import Plugins

PLUGINS = Plugins(__name__, __path__, "change rule", ChangeRule)
change_names = PLUGINS.names
find_change = PLUGINS.find
