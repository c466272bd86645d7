"""Every block of docs/quick-start.md runs, with none of our code, from the folder of the lake."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.query_lake import make_query_lake

GUIDE = Path(__file__).parents[2] / "docs" / "quick-start.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """What the blocks print, one after the other in one process outside the repository."""
    folder = tmp_path_factory.mktemp("quick_start")
    make_query_lake(folder / "lake")
    (folder / "blocks.py").write_text("\n".join(BLOCKS))
    done = subprocess.run(
        [sys.executable, "-I", "blocks.py"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_run_and_say_what_the_tables_hold(printed):
    assert len(BLOCKS) == 8
    assert "patch_memory" in printed, "the medians by detector"
    assert "item_tnt" in printed, "the classes that show novelty"
    assert "novel_fraction: Share of pixels that show novelty" in printed, "a comment"
    assert "normal/0/0 (4, 4)" in printed, "a picture"
    assert "(2, 1280) float32" in printed, "vectors"
    assert re.search(r"[0-9a-f]{32} 40\n", printed), "a version's key and its rows"


def test_blocks_use_no_code_of_ours():
    text = "\n".join(BLOCKS)
    assert not re.search(r"^\s*(from|import) (flows|tasks|storage|schemas)", text, re.MULTILINE)
