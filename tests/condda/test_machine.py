"""The harness against the oracle, in both modes."""

from collections.abc import Callable
from pathlib import Path

from tasks.condda.commands import EVALUATION, PUBLISHED, Policy
from tasks.condda.harness import Harness
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary
from tests.condda.machine import Client, protocol_machine


def starter(mode: Policy) -> Callable[[Path], Client]:
    def start(folder: Path) -> Client:
        store = EventStore(folder / "events.sqlite")
        store._connection.execute("pragma synchronous = off")  # crashes are tested elsewhere
        return Harness(TestLibrary(folder / "data"), store, mode)

    return start


TestStrict = protocol_machine(EVALUATION, starter(EVALUATION)).TestCase
TestCompat = protocol_machine(PUBLISHED, starter(PUBLISHED)).TestCase
