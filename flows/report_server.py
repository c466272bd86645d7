"""The reports of a lake on loopback: `python -m flows.report_server FOLDER PORT`.

Browsers refuse file:// links from a web page, so the service serves the folder and Prefect links
there. Only names inside the folder are served, only to this machine, and nothing can be changed.
"""

import functools
import sys
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPORTS_URL = "NOVELTY_REPORTS_URL"
"""Where the reports of the lake NOVELTY_REPORTS_LAKE are served."""
REPORTS_LAKE = "NOVELTY_REPORTS_LAKE"


class Reports(SimpleHTTPRequestHandler):
    """Files of one folder. Another site's page cannot read them: the host must be this machine."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".md": "text/plain; charset=utf-8",
        ".yaml": "text/plain; charset=utf-8",
    }

    def send_head(self) -> Any:
        host = self.headers.get("Host", "").rpartition(":")[0]
        inside = Path(self.translate_path(self.path)).resolve()
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
        elif not inside.is_relative_to(Path(self.directory).resolve()):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return super().send_head()
        return None

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *words: Any) -> None:
        """The log is for what goes wrong."""


def serve_reports(folder: Path, port: int) -> None:
    """Until the process is ended. The folder may appear later."""
    handler = functools.partial(Reports, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    serve_reports(Path(sys.argv[1]), int(sys.argv[2]))
