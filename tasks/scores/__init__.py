"""Novelty scores from cached logits and features, one file each; a new file is found by itself.

Every module of this package is a score named like its file, except `base` and names that begin with
an underscore. They serve every benchmark whose runs put out what a score needs.
"""

from tasks.engine.plugins import Plugins
from tasks.scores.base import Score

PLUGINS = Plugins(__name__, __path__, "score", Score)
names = PLUGINS.names
find = PLUGINS.find
selection = PLUGINS.selection
