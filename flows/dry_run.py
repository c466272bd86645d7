"""`novelty build … --dry-run`: what a build would do, by its own flow."""

import ast
import importlib
import inspect
from types import FunctionType, ModuleType
from typing import Any

from flows.first_build import first_build
from tasks.engine.estimates import DryRun, StagePlan, dry_run, duration
from tasks.engine.reference import shipped_reference
from tasks.engine.stage import Stage
from tasks.report.blocks import bytes_text


def show_dry_run(benchmark: str, config: Any) -> None:
    """Plan the benchmark's flow and print it. Makes nothing, publishes nothing, takes no lock."""
    module = importlib.import_module(f"flows.{benchmark}")
    with dry_run() as run:
        module.build.fn(config)
    if any(plan.missing or plan.waiting for plan in run.plans):
        raw = {plan.stage: plan.raw for plan in run.plans}
        if (works := first_build(benchmark, config, raw, run.sources)) is not None:
            run.foresee(benchmark, works, shipped_reference())
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
            function = names.get(call.func.id)
            in_module = isinstance(code, ModuleType) and function in vars(code).values()
            of_module = (
                isinstance(function, FunctionType) and function.__module__ == names["__name__"]
            )
            if isinstance(function, FunctionType) and not (in_module and of_module):
                stages += stages_of(function)
    return list(dict.fromkeys(stages))


def describe(run: DryRun, names: list[str]) -> list[str]:
    """The report, line by line. `names` are all stages of the flow. `~` marks an estimate."""
    head: tuple[str, ...] = ("stage", "shards", "to make", "writes", "about", "why")
    rows = [head, *(_row(plan) for plan in run.plans)]
    if all(plan.bytes is None for plan in run.plans):
        rows = [(*row[:3], *row[4:]) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]
    planned = {plan.stage for plan in run.plans}
    if _ends_early(run) and (later := [name for name in names if name not in planned]):
        lines.append(
            f"after {run.unplanned_after}, as its rows and the settings ask for: {', '.join(later)}"
        )
    if any(plan.referred for plan in run.plans):
        lines.append(
            "~ is an estimate. Times and bytes with it are by reference rates of another machine "
            f"({shipped_reference().machine}): an order of magnitude. What this lake has timed "
            "itself wins."
        )
    return [*lines, _total(run)]


def _row(plan: StagePlan) -> tuple[str, ...]:
    guess = "~" if plan.foreseen else ""
    to_make = f"{guess}{plan.missing}"
    if plan.after:
        to_make += f" to {plan.missing + plan.waiting}"
    writes = "-" if not plan.missing + plan.waiting else "unknown"
    if plan.bytes is not None:
        writes = f"~{bytes_text(round(plan.bytes))}"
    about = duration(plan.seconds)
    if plan.seconds and (plan.referred or plan.foreseen):
        about = f"{'over ' if plan.lacking else ''}~{about}"
    return plan.stage, f"{guess}{plan.shards}", to_make, writes, about, plan.why()


def _ends_early(run: DryRun) -> bool:
    """Whether stages are left of which nothing is known."""
    return bool(run.unplanned_after) and not any(plan.foreseen for plan in run.plans)


def _total(run: DryRun) -> str:
    if not any(plan.missing or plan.waiting for plan in run.plans):
        if run.published:
            return "nothing to do"
        return "nothing to make; a build would publish the tables again"
    seconds = sum(plan.seconds or 0 for plan in run.plans)
    unknown = [
        f"{plan.stage} ({', '.join(plan.lacking)})" if plan.lacking else plan.stage
        for plan in run.plans
        if plan.lacking or plan.seconds is None
    ]
    if _ends_early(run):
        unknown.append(f"what comes after {run.unplanned_after}")
    elif run.unplanned_after:
        unknown.append("publishing and the report")
    elif run.incomplete:
        unknown.append("shards that only new rows will show")
    about = "no time is known"
    if seconds:
        workers = f" with {run.at_once} workers" if any(p.referred for p in run.plans) else ""
        about = f"about {duration(seconds)} on this machine{workers}"
    if written := sum(plan.bytes or 0 for plan in run.plans):
        about += f", about {bytes_text(round(written))} written"
    gaps = f"; not counted: {', '.join(dict.fromkeys(unknown))}" if unknown else ""
    return f"{about}{gaps}; nothing was made"
