"""One temporary Prefect API for all flow tests, gone with the session."""

import os
import tempfile

import pytest

import flows  # noqa: F401  keeps Prefect offline


@pytest.fixture(scope="session")
def prefect_api():
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFECT_HOME"] = home
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield
