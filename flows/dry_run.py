"""`novelty build … --dry-run`: what a build would do, by its own flow."""

import ast
import importlib
import inspect
from types import FunctionType, ModuleType
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


def stages_of(code: ModuleType | FunctionType) -> list[str]:
    """The stages that a flow's code runs, in the order in which they stand there.

    A function of another module that is handed the build counts where it is called.
    """
    names = code.__globals__ if isinstance(code, FunctionType) else vars(code)
    calls = [
        (node, node.args[0].id)
        for node in ast.walk(ast.parse(inspect.getsource(code)))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name)
    ]
    stages: list[str] = []
    for call, argument in sorted(calls, key=lambda pair: pair[0].lineno):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("run", "run_each"):
            stage = names.get(argument)
            stages += [stage.name] if isinstance(stage, Stage) else []
        elif isinstance(call.func, ast.Name) and argument == "build":
            called = names.get(call.func.id)
            whole = isinstance(code, ModuleType) and called in vars(code).values()
            of_module = isinstance(called, FunctionType) and called.__module__ == names["__name__"]
            if isinstance(called, FunctionType) and not (whole and of_module):
                stages += stages_of(called)
    return list(dict.fromkeys(stages))


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
