"""Novelty scores from cached logits and features, one file each; a new file is found by itself.

Every module of this package is a score named like its file, except `base` and names that begin with
an underscore. They serve 3DOS, semantic anomalies and KOWL alike.
"""

from tasks.plugins import Plugins
from tasks.posthoc.base import PostHoc

_FILES = Plugins(__name__, __path__, "post-hoc score", PostHoc)
names = _FILES.names
find = _FILES.find
