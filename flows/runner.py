"""How a flow is run: followed by a Prefect server where there is one, else by itself.

Both ways make the same pieces by the same stages and leave the same notes; without a server nothing
of Prefect is even imported.
"""

import importlib
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from flows.engine import open_run
from flows.hooks import note_end
from flows.processes import end_within
from flows.share_report import report_link, share_report
from schemas.errors import SourceError
from storage.layout import lake_address, lake_root
from tasks.engine.estimates import duration
from tasks.engine.flow_run import FlowRun, current_run, latest_run
from tasks.report import REPORTS
from tasks.report.reading import names

log = logging.getLogger(__name__)

DEMO_SHARES = {"condda": 0.14, "kowl": 0.13, "novelcraft": 0.28, "semantic": 0.11, "threedos": 0.34}
"""Of the demo's time, by the processor seconds of `python -m benchmarks.demo`."""
STOP_SECONDS = 8.0
"""How long shards under way may still take when a build is told to stop."""


class BenchmarkFlow:
    """A flow, named after its module. Call it to run it without a server."""

    def __init__(self, function: Callable[[Any], None]):
        self.fn = function
        self.name = function.__module__.rpartition(".")[2]
        self.model = get_type_hints(function)["config"]
        self.__doc__ = function.__doc__

    def __call__(self, config: Any) -> None:
        run_directly(self.name, self.fn, config)


def benchmark_flow(function: Callable[[Any], None]) -> BenchmarkFlow:
    """Declare the flow of a benchmark, or of gc; its one parameter is the configuration."""
    return BenchmarkFlow(function)


def run_directly(benchmark: str, function: Callable[[Any], None], config: Any) -> None:
    """Run a flow in this process; its end is noted and told as under Prefect."""
    before = latest_run()
    try:
        with open_run(FlowRun):
            function(config)
    except BaseException as error:
        run = latest_run()
        note_end(benchmark, config, None if run is before else run, error)
        raise
    note_end(benchmark, config, latest_run(), None)


def run_flow(benchmark: str, config: Any) -> None:
    """Run `flows.<benchmark>.build`, followed by the Prefect server if there is one."""
    from flows.tracked import run_tracked, server_address

    address = server_address()
    try:
        if address is None:
            _say_how_to_follow()
            importlib.import_module(f"flows.{benchmark}").build(config)
        else:
            flow = getattr(importlib.import_module("flows.tracked"), benchmark)
            run_tracked(flow, config, address)
    except (KeyboardInterrupt, SystemExit) as stop:
        end_within(STOP_SECONDS, stop)
        raise


@cache
def _say_how_to_follow() -> None:
    """Once in a process."""
    log.info(
        "no Prefect server: the flow runs by itself; for the UI, `make server` or PREFECT_API_URL"
    )


def publish_report(lake: Path, benchmark: str) -> Path:
    """Write the benchmark's report, unless nothing changed, and link it from the flow run."""
    address = share_report(lake, benchmark, anew=False)
    if (run := current_run()) is not None:
        run.link(f"{benchmark}-report", report_link(lake, benchmark, address), "What was built")
    return lake / REPORTS / f"{benchmark}.html"


def run_demo(sample: Path, lake: str | None, benchmarks: list[str]) -> None:
    """Build every benchmark on the sample data, then say what was found and where to look.

    One Prefect server follows them all and ends with them; `make server` shows the runs afterwards.
    """
    from flows.service import temporary_server
    from tasks.operations.leaderboard import show_best

    for benchmark in benchmarks:
        if not (sample / benchmark).is_dir():
            raise SourceError(f"no sample data in {sample / benchmark}; run `novelty sample` first")
    address, begun = lake_address(lake_root(lake)), time.monotonic()
    with temporary_server():
        for number, benchmark in enumerate(benchmarks, 1):
            title, about = names(benchmark)
            log.info(f"\n== benchmark {number} of {len(benchmarks)}, {title}: {about}")
            start = time.monotonic()
            model = importlib.import_module(f"schemas.{benchmark}").Config
            config = model.demo(sample / benchmark)
            run_flow(benchmark, config.model_copy(update={"lake": Path(lake)} if lake else {}))
            left = _time_left(time.monotonic() - begun, benchmarks, number)
            rest = f"; about {duration(left)} left" if left else ""
            log.info(f"== {title} took {time.monotonic() - start:.0f} s{rest}")
            print(f"to look at now: {address}/{REPORTS}/{benchmark}.html", flush=True)
    show_best(lake_root(lake))
    print(f"\nall of it, with pictures: {address}/{REPORTS}/index.html")
    print("every table and its rows: novelty status; every number: novelty leaderboard")


def _time_left(spent: float, benchmarks: list[str], done: int) -> float:
    """Seconds for the benchmarks to come, by what those behind took here."""
    shares = [DEMO_SHARES.get(benchmark, 0.2) for benchmark in benchmarks]
    return spent / sum(shares[:done]) * sum(shares[done:])
