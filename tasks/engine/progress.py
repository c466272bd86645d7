"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere, if not quiet.

A stage in a process of its own prints lines: the terminal's bar belongs to the build.
"""

import contextlib
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives `advance(count)`; prints nothing for work that is over at once."""
    if total == 0 or not log.isEnabledFor(logging.INFO):
        yield lambda count: None
    elif sys.stderr.isatty() and multiprocessing.parent_process() is None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        done, last_log = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, last_log
            done += count
            if done >= total or time.monotonic() - last_log >= 10:
                last_log = time.monotonic()
                log.info(f"{title}: {done} of {total}")

        yield advance
