"""What is asked of a device before any work."""

import os
import subprocess
import sys

PLANNED = """
import sys
from tasks.learning.devices import precision_on

print(precision_on("auto", True), precision_on("cpu", True), "torch" in sys.modules)
"""


def test_where_there_is_no_gpu_the_precision_is_known_without_torch():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    planned = subprocess.run(
        [sys.executable, "-c", PLANNED], capture_output=True, text=True, env=environment
    )
    assert planned.stdout.split() == ["float32", "float32", "False"], planned.stderr
