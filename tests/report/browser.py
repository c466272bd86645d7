"""A headless Chromium on a loopback port, led by its DevTools protocol."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
START_SECONDS = 30
ANSWER_SECONDS = 30


class Page:
    """One open page. `events` are all messages that were no answer, in order."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self.connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        return json.loads(self.connection.recv(timeout=ANSWER_SECONDS))

    def open(self, path: Path) -> None:
        """Load the page to its end; events before it are forgotten."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def colours(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def width(self, pixels: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=pixels,
            height=900,
            deviceScaleFactor=1,
            mobile=pixels < 600,
        )

    def named(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] in methods]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a fresh browser; skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    profile = folder / "profile"
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={profile}", "--remote-debugging-port=0"),
        "about:blank",
    ]
    # Nothing of the user's own browser settings, and no proxy.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        with connect(_address(profile, process), max_size=None, proxy=None) as connection:
            yield Page(connection)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """WebSocket of the one open page."""
    import httpx

    told = profile / "DevToolsActivePort"
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, "chromium ended at its start"
        if told.exists() and (lines := told.read_text().split()):
            listed = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list", trust_env=False).json()
            pages = [one for one in listed if one["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError(f"chromium opened no page within {START_SECONDS} s")
