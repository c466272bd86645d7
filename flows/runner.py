"""How a flow is run from the command line: with Prefect, quietly, and with a table at the end."""

import functools
import importlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from flows.engine import task_runner
from flows.hooks import note_success, write_failure
from flows.share_report import report_link, share_report
from schemas.config import make_config
from schemas.errors import SourceError
from storage.layout import lake_address, lake_root
from tasks.report import REPORTS


def benchmark_flow(function: Callable[[Any], None]) -> Any:
    """The Prefect flow of a benchmark, named after its module.

    Its one parameter is the configuration; a deployment sends it as JSON, so it is checked here.
    """
    from prefect import flow

    name = function.__module__.rpartition(".")[2]
    model = get_type_hints(function)["config"]

    @functools.wraps(function)
    def run(config: Any) -> None:
        function(make_config(model, config) if isinstance(config, dict) else config)

    return flow(
        run,
        name=name,
        flow_run_name=name,
        validate_parameters=False,
        task_runner=task_runner(),
        on_failure=[write_failure],
        on_crashed=[write_failure],
        on_completion=[note_success],
    )


def run_flow(benchmark: str, config: Any) -> None:
    """Run `flows.<benchmark>.build`."""
    flow = importlib.import_module(f"flows.{benchmark}").build
    # An error comes out of the call below; Prefect would print it a second and third time.
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    flow(config)


def publish_report(lake: Path, benchmark: str) -> Path:
    """Write the benchmark's report, unless nothing changed, and link it from the flow run."""
    from prefect.artifacts import create_link_artifact

    address = share_report(lake, benchmark, anew=False)
    link = report_link(lake, benchmark, address)
    create_link_artifact(key=f"{benchmark}-report", link=link, description="What was built")
    return lake / REPORTS / f"{benchmark}.html"


def run_demo(sample: Path, lake: str | None, benchmarks: list[str]) -> None:
    """Build every benchmark on the sample data, then say what there is and where."""
    from tasks.operations.summary import show_tables

    for benchmark in benchmarks:
        if not (sample / benchmark).is_dir():
            raise SourceError(f"no sample data in {sample / benchmark}; run `novelty sample` first")
        start = time.monotonic()
        model = importlib.import_module(f"schemas.{benchmark}").Config
        config = model.demo(sample / benchmark)
        run_flow(benchmark, config.model_copy(update={"lake": Path(lake)} if lake else {}))
        print(f"{benchmark}: done in {time.monotonic() - start:.0f} s", flush=True)
    show_tables(lake)
    print(f"report: {lake_address(lake_root(lake))}/{REPORTS}/index.html")
