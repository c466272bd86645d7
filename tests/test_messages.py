"""What the packages say goes to stderr through `logging`, and `--quiet` leaves out the progress."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

from flows.cli import main
from schemas.messages import PACKAGES, show_messages
from tasks.engine.progress import progress

REPOSITORY = Path(__file__).parents[1]
FOR_PEOPLE = {
    *("flows/cli.py", "flows/dry_run.py", "flows/gc.py", "flows/parser.py", "flows/runner.py"),
    *("flows/service.py", "tasks/condda/server/serve.py", "tasks/ingest/native/worker.py"),
    *("tasks/publish/verify.py", "tasks/sample/write.py"),
}
"""Files that print: what a command was asked for, or a program by itself."""


def test_progress_is_a_line_and_nothing_if_quiet(capsys):
    def work() -> str:
        with progress("toy/count, shards", 2) as advance:
            advance(2)
        logging.getLogger("tasks.engine").warning("a word of warning")
        return capsys.readouterr().err

    assert work() == "toy/count, shards: 2 of 2\na word of warning\n"
    show_messages(quiet=True)
    assert work() == "a word of warning\n"


def test_quiet_stands_anywhere_and_reaches_child_processes(capsys):
    assert main(["scores", "--quiet", "knn"]) == 0
    assert "scaled to length 1" in capsys.readouterr().out
    code = "import logging, schemas; logging.getLogger('tasks.x').info('progress')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_only_commands_print():
    printing = set()
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            name = path.relative_to(REPOSITORY).as_posix()
            if name.startswith("tasks/operations/") or name in FOR_PEOPLE:
                continue
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if _is_print(node)]
            printing |= {f"{name}:{call.lineno}" for call in calls}
    assert not printing


def _is_print(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "print"
