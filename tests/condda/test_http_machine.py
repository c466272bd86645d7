"""The protocol's state machine over HTTP: the suite of the harness, against a real server."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from tasks.condda.commands import EVALUATION, PUBLISHED, Policy
from tasks.condda.server.client import HttpHarness
from tasks.condda.server.serve import running
from tests.condda.machine import Client, protocol_machine


class OwnServer(HttpHarness):
    """A client that brings its server and stops it when it is closed."""

    def __init__(self, folder: Path, mode: Policy):
        self._stack = ExitStack()
        url = self._stack.enter_context(running(folder / "data", folder / "state", policy=mode))
        super().__init__(url)

    def close(self) -> None:
        super().close()
        self._stack.close()


def starter(mode: Policy) -> Callable[[Path], Client]:
    return lambda folder: OwnServer(folder, mode)


StrictMachine = protocol_machine(EVALUATION, starter(EVALUATION))
CompatMachine = protocol_machine(PUBLISHED, starter(PUBLISHED))
# Restarting a server takes its time: fewer examples than in process.
for machine in (StrictMachine, CompatMachine):
    machine.TestCase.settings = settings(
        max_examples=3, stateful_step_count=30, deadline=None, derandomize=True
    )
TestStrict = StrictMachine.TestCase
TestCompat = CompatMachine.TestCase


def many(machine: type) -> type:
    """The same with as many examples as in process."""
    longer = type(f"Long{machine.__name__}", (machine,), {}).TestCase
    longer.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, derandomize=True
    )
    return pytest.mark.slow(longer)


TestStrictLong = many(StrictMachine)
TestCompatLong = many(CompatMachine)
