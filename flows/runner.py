"""How a flow is run from the command line: with Prefect, quietly, and with a table at the end."""

import importlib
import logging

from schemas.errors import NoveltyError


class _UserErrorsWithoutTraceback(logging.Filter):
    """Prefect logs every failure with its traceback; for an error the user can mend that is noise."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, NoveltyError)


def run_flow(benchmark: str, config) -> int:
    """Run `flows.<benchmark>.build` and show what was built."""
    from tasks.summary import show_tables

    flow = importlib.import_module(f"flows.{benchmark}").build
    quiet = _UserErrorsWithoutTraceback()
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(quiet)
    flow(config)
    show_tables(config.lake, benchmark)
    return 0
