"""CONDDA and OND: agents through the tests of the protocol, sessions into tables, metrics."""

from flows.runner import benchmark_flow, publish_report
from schemas.condda import Config
from schemas.config import Settings
from storage.layout import lake_root
from tasks.condda.build import (
    OneRun,
    ProgramSettings,
    export_session,
    measure_program,
    plan_exports,
    plan_program,
    plan_runs,
    plan_tests,
    read_test,
    run_agent,
)
from tasks.stage import Build


@benchmark_flow
def build(config: Config) -> None:
    """Tests, agents with and without the red light, sessions of a server, measures of all."""
    lake = lake_root(config.lake)
    with Build("condda", lake, config, config.max_reject_share) as build:
        source = build.source(config.tests)
        build.run(read_test, plan_tests(source), Settings())

        runs = plan_runs(source, build.read("tests"), config.run)
        if runs:
            build.run(run_agent, runs, OneRun.of(config.run))
        if config.state:
            build.run(export_session, plan_exports(config.state, source), Settings())

        sessions = plan_program(build.table("sessions"), build.table("metrics"))
        build.run(measure_program, sessions, ProgramSettings(baseline=config.run.baseline))
    publish_report(lake, "condda")
