"""A run against a server, mirrored in a local store, so that it is exported like any other.

Every call goes to the server first; what it accepts is then told to a harness on the same tests in
this process. The server's answers count, the mirror's are ignored.
"""

from contextlib import suppress
from typing import Any

from tasks.condda.harness import Harness
from tasks.condda.rules import PUBLISHED, ProtocolRefusal
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestLibrary

MIRRORED = (
    "dataset_request",
    "post_results",
    "get_feedback_request",
    "complete_test",
    "terminate_session",
)


class Mirrored:
    """The calls of `commands.Calls` on `server`; `local` is the harness to export from."""

    def __init__(self, server: Any, library: TestLibrary, store: EventStore):
        self.server = server
        self.session = ""
        self.local = Harness(library, store, PUBLISHED, new_id=lambda: self.session)

    def session_request(self, **arguments: Any) -> str:
        self.session = self.server.session_request(**arguments)
        self.local.session_request(**arguments)
        return self.session

    def resume_session(self, *, session_id: str) -> list[str]:
        """As the server knows it; the mirror is told what a killed run could not tell it."""
        try:
            finished = self.server.resume_session(session_id=session_id)
        except ProtocolRefusal as refusal:
            if refusal.reason == "SessionEnded":
                with suppress(ProtocolRefusal):
                    self.local.terminate_session(session_id=session_id)
            raise
        tests = self.local.session_progress(session_id=session_id)["tests"]
        for test in finished:
            if not tests.get(test, {}).get("completed"):
                with suppress(ProtocolRefusal):
                    self.local.complete_test(session_id=session_id, test_id=test)
        return finished

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.server, name)
        if name not in MIRRORED:
            return call

        def mirrored(**arguments: Any) -> Any:
            answer = call(**arguments)
            with suppress(ProtocolRefusal):
                getattr(self.local, name)(**arguments)
            return answer

        return mirrored
