"""Runs that a crash left Running or Pending on the Prefect server: found, said, cleared.

A run of our worker is lost when no process carries its id in the environment any more. Runs of
other workers and of other machines are never looked at, live ones never touched.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from flows.deployments import declared_deployments
from flows.hooks import open_tasks, write_failure
from flows.processes import processes_with

RUN_ID = "PREFECT__FLOW_RUN_ID"
PATIENCE_SECONDS = 60.0
"""A live worker may be about to start the process, or about to report its end."""


@dataclass(frozen=True)
class _FlowName:
    name: str


def unfinished_runs(client: Any) -> list[Any]:
    """Runs of our pool that Prefect holds for running or about to."""
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    pools = sorted({deployment.pool for deployment in declared_deployments()})
    states = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": states}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": pools}}),
    )


def lost_runs(client: Any, worker: str, *, worker_lives: bool, own_server: bool) -> list[Any]:
    """Unfinished runs of the worker of that name whose process is gone."""
    # On a server of our own a run without a name was taken by our worker just before it died.
    names = (worker, None) if own_server else (worker,)
    living = {environment[RUN_ID] for _, environment in processes_with(RUN_ID)}
    latest = datetime.now(UTC) - timedelta(seconds=PATIENCE_SECONDS if worker_lives else 0)
    return [
        run
        for run in unfinished_runs(client)
        if run.labels.get("prefect.worker.name") in names
        and str(run.id) not in living
        and run.state.timestamp <= latest
    ]


def clear_runs(client: Any, runs: list[Any], reason: str) -> None:
    """Make them Crashed with a message, write their failure notes, end their shards too."""
    from prefect.states import Crashed

    for run in runs:
        message = f"{reason} It was {run.state.name} since {run.state.timestamp}."
        state: Any = Crashed(message=message)
        client.set_flow_run_state(run.id, state, force=True)
        flow = _FlowName(client.read_flow(run.flow_id).name)
        write_failure(flow=flow, flow_run=run, state=state)  # as Prefect's worker calls it
        for task in open_tasks(run.id):
            if task.state_type == "RUNNING":
                client.set_task_run_state(task.id, Crashed(message=reason), force=True)
