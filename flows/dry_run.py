"""`novelty build … --dry-run`: what a build would do, by its own flow."""

import ast
import importlib
import inspect
from types import ModuleType
from typing import Any

from tasks.engine.estimates import DryRun, dry_run, duration
from tasks.engine.stage import Stage


def show_dry_run(benchmark: str, config: Any) -> None:
    """Plan the benchmark's flow and print it. Makes nothing, publishes nothing, takes no lock."""
    module = importlib.import_module(f"flows.{benchmark}")
    with dry_run() as run:
        module.build.fn(config)
    for line in describe(run, stages_of(module)):
        print(line)


def stages_of(module: ModuleType) -> list[str]:
    """The stages that a flow's code runs, in the order in which they stand there."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("run", "run_each")
        and node.args
        and isinstance(node.args[0], ast.Name)
    ]
    calls.sort(key=lambda node: node.lineno)
    found = [getattr(module, node.args[0].id, None) for node in calls]
    return list(dict.fromkeys(stage.name for stage in found if isinstance(stage, Stage)))


def describe(run: DryRun, names: list[str]) -> list[str]:
    """The report, line by line. `names` are all stages of the flow."""
    rows = [("stage", "shards", "to make", "about", "why")]
    for plan in run.plans:
        to_make = f"{plan.missing}" + (f" to {plan.missing + plan.waiting}" if plan.after else "")
        rows.append((plan.stage, str(plan.shards), to_make, duration(plan.seconds), plan.why()))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{stage:<{widths[0]}}  {shards:>{widths[1]}}  {to_make:>{widths[2]}}  {about:>{widths[3]}}"
        f"  {why}".rstrip()
        for stage, shards, to_make, about, why in rows
    ]
    planned = {plan.stage for plan in run.plans}
    if run.unplanned_after and (later := [name for name in names if name not in planned]):
        lines.append(
            f"after {run.unplanned_after}, as its rows and the settings ask for: {', '.join(later)}"
        )
    return [*lines, _total(run)]


def _total(run: DryRun) -> str:
    if not any(plan.missing or plan.waiting for plan in run.plans):
        if run.published:
            return "nothing to do"
        return "nothing to make; a build would publish the tables again"
    timed = sum(plan.seconds or 0 for plan in run.plans)
    unknown = list(dict.fromkeys(plan.stage for plan in run.plans if plan.seconds is None))
    if run.unplanned_after:
        unknown.append(f"what comes after {run.unplanned_after}")
    elif run.incomplete:
        unknown.append("shards that only new rows will show")
    about = f"about {duration(timed)} on this machine" if timed else "no time is known"
    return f"{about}{'; not counted: ' + ', '.join(unknown) if unknown else ''}; nothing was made"
