"""For every test: a known environment, no Blender, and no deadline for property tests."""

import logging
import os

import pytest
from hypothesis import settings

from schemas.messages import PACKAGES, QUIET, show_messages
from tasks.operations.doctor import BLENDER
from tests.shared import need_libraries

# A busy machine is no defect, and the same examples are tried in every run.
settings.register_profile("busy", deadline=None, derandomize=True)
settings.load_profile("busy")

for name in list(os.environ):
    if name.startswith(("NOVELTY_", "PREFECT_")) and name != "NOVELTY_SHARED":
        del os.environ[name]
# So that `caplog` sees what the packages say.
for name in PACKAGES:
    logging.getLogger(name).propagate = True
# Builds of NovelCraft would start it to check masks.
os.environ["NOVELTY_BLENDER_PYTHON"] = "none"


@pytest.fixture(autouse=True)
def loud_afterwards():
    """A test of `--quiet` leaves no later one quiet."""
    yield
    if os.environ.pop(QUIET, ""):
        show_messages()


@pytest.fixture
def with_blender(monkeypatch):
    """For tests that render with Blender."""
    need_libraries(BLENDER)
    monkeypatch.delenv("NOVELTY_BLENDER_PYTHON")
