"""How a flow is run from the command line: with Prefect, quietly, and with a table at the end."""

import importlib
import logging
import time
from pathlib import Path
from typing import Any

from schemas.errors import SourceError
from storage.layout import lake_root
from tasks.report import REPORTS, write_report


def run_flow(benchmark: str, config: Any) -> None:
    """Run `flows.<benchmark>.build`."""
    flow = importlib.import_module(f"flows.{benchmark}").build
    # An error comes out of the call below; Prefect would print it a second and third time.
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    flow(config)


def publish_report(lake: Path, benchmark: str) -> Path:
    """Write the benchmark's report and link it from the flow run."""
    from prefect.artifacts import create_link_artifact

    path = write_report(lake, benchmark)
    create_link_artifact(
        key=f"{benchmark}-report", link=path.absolute().as_uri(), description="What was built"
    )
    return path


def run_demo(sample: Path, lake: str | None, benchmarks: list[str]) -> None:
    """Build every benchmark on the sample data, then say what there is and where."""
    from tasks.summary import show_tables

    for benchmark in benchmarks:
        if not (sample / benchmark).is_dir():
            raise SourceError(f"no sample data in {sample / benchmark}; run `novelty sample` first")
        start = time.monotonic()
        model = importlib.import_module(f"schemas.{benchmark}").Config
        config = model.demo(sample / benchmark)
        run_flow(benchmark, config.model_copy(update={"lake": Path(lake)} if lake else {}))
        print(f"{benchmark}: done in {time.monotonic() - start:.0f} s", flush=True)
    show_tables(lake)
    print(f"report: {lake_root(lake) / REPORTS / 'index.html'}")
