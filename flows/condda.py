"""CONDDA and OND: agents through the tests of the protocol, sessions into tables, metrics."""

from flows.runner import benchmark_flow, publish_report
from schemas.condda import Config
from schemas.config import Settings
from storage.layout import lake_root
from tasks.condda.build import (
    Access,
    ExportSettings,
    ProgramSettings,
    Tests,
    check_server,
    chosen_agents,
    export_session,
    fitting_scores,
    measure_program,
    pass_features,
    plan_exports,
    plan_features,
    plan_program,
    plan_runs,
    plan_test_protocols,
    plan_tests,
    read_test,
    run_agent,
    state_store,
)
from tasks.condda.export import P_UNKNOWN
from tasks.engine.stage import Build
from tasks.evaluation.protocols import key_protocols
from tasks.evaluation.stages import (
    EvaluationSettings,
    describe_scores,
    evaluate_scores,
    plan_evaluation,
    plan_score_settings,
    plan_scores,
    record_failures,
    score_runs,
)

CONVENTIONS = ("openood",)


@benchmark_flow
def build(config: Config) -> None:
    """Tests, scores of their features, agents, sessions of a server, measures of all."""
    agents, scores = chosen_agents(config), fitting_scores(config)
    if config.run.url is not None:
        check_server(config)
    if config.state is not None:
        state_store(config.state).close()
    lake = lake_root(config.lake)
    with Build("condda", lake, config, config.max_reject_share) as build:
        source = build.source(config.tests)
        build.run(read_test, plan_tests(source, config.protocols), Settings())
        build.run(key_protocols, plan_test_protocols(build), Settings())
        build.publish()
        tests = Tests.of(build, source, config.protocols)

        passed = build.run_each(pass_features, plan_features(tests), Settings())
        runs = [tests.run_of(shard, piece.part("outputs")) for shard, piece in passed]
        build.run(describe_scores, plan_score_settings([*scores, P_UNKNOWN]), Settings())
        scored = score_runs(build, plan_scores(runs, scores))

        shards = plan_runs(tests, agents, config.run)
        access = Access(token=config.run.token, device=config.device)
        led = build.run_each(run_agent, shards, access)
        record_failures(build)
        runs += [tests.run_of(shard) for shard in shards]
        scored += [piece for _, piece in led]
        if config.state:
            exports = plan_exports(config.state, tests)
            state = ExportSettings(state=config.state)
            scored += build.run(export_session, [shard for _, shard in exports], state)
            runs += [run for run, _ in exports if run is not None]
        build.run(evaluate_scores, plan_evaluation(runs, scored, CONVENTIONS), EvaluationSettings())

        baseline = ProgramSettings(baseline=config.run.baseline)
        build.run(measure_program, plan_program(build), baseline)
    publish_report(lake, "condda")
