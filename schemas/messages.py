"""What the packages say while they work: through `logging`, a line each, to stderr.

Every module has its `log = logging.getLogger(__name__)`: `info` for progress, `warning` for what a
user should look at, `error` for what failed. `novelty … --quiet`, or NOVELTY_QUIET in the
environment, leaves out the progress, in other processes of the command too.
"""

import logging
import os
import sys
from typing import TextIO

PACKAGES = ("flows", "tasks", "storage", "schemas")
QUIET = "NOVELTY_QUIET"


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_messages(*, quiet: bool = False) -> None:
    """Send what the packages say to stderr; called again, it only changes how much that is."""
    if quiet:
        os.environ[QUIET] = "1"
    for logger in map(logging.getLogger, PACKAGES):
        logger.setLevel(logging.WARNING if os.environ.get(QUIET) else logging.INFO)
        if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
            logger.addHandler(_ToStderr())
            logger.propagate = False  # else Prefect would show it once more
