"""A reader that takes its process with it when it meets one certain shape."""

import os
import signal
from pathlib import Path
from typing import Any

from tasks.threedos import formats


def sample_file(item: dict[str, Any], work: Path) -> dict[str, Any]:
    if item["sample_id"] == "folder/a/0002":
        os.kill(os.getpid(), signal.SIGSEGV)
    return formats.sample_file(item, work)
