"""The `novelty` command. Each subcommand is one function here; heavy imports wait inside it.

An error that the user can mend is one sentence on stderr and exit code 2, never a traceback.
"""

import argparse
import atexit
import contextlib
import errno
import importlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from flows.options import INPUTS, add_options, chosen_values, split_settings
from flows.parser import Parser, path_text, time_in, whole_number
from schemas.errors import ConfigError, LakeError, NoveltyError
from schemas.extras import missing_extra
from schemas.messages import show_messages
from schemas.similar import did_you_mean
from schemas.version import VERSION

if TYPE_CHECKING:
    from schemas.condda import Config
    from storage.tables import TableVersion

FLOWS = Path(__file__).parent
GROUPS = {
    "essentials": ("demo", "build", "status", "query", "report"),
    "models and their numbers": (
        *("models", "networks", "scores", "predictors", "runs", "leaderboard", "evaluate"),
    ),
    "the lake": (
        "history",
        "path",
        "diff",
        "lineage",
        "verify",
        "restore",
        "gc",
        "iceberg",
        "upgrade",
    ),
    "data in and out": ("import", "export", "sample", "fetch", "publish", "check-published"),
    "one benchmark": ("novelcraft", "kowl", "condda"),
    "operating": ("service", "doctor", "completion", "dictionary"),
}
"""Titles of the help and the commands under them."""
QUIET_HELP = "no progress, only results, warnings and errors (with every command)"
MOVED = {
    ("render",): ("novelcraft", "render"),
    ("masks",): ("novelcraft", "masks"),
    ("drift",): ("novelcraft", "drift"),
    ("export", "lerobot"): ("novelcraft", "lerobot"),
    ("list-drift",): ("kowl", "list-drift"),
    ("serve", "condda"): ("condda", "serve"),
    ("run", "condda"): ("condda", "run"),
    ("make-tests",): ("condda", "make-tests"),
}
"""Names of earlier versions: one refusal that prints the command of today."""


def stop_at_sigterm() -> None:
    """SIGTERM ends a command as Ctrl-C does: what is open is closed, trainings end at once."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is not None:
        return _status_of(list(arguments))
    stop_at_sigterm()
    status = 1
    atexit.register(lambda: _leave(status))
    try:
        status = _status_of(sys.argv[1:])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        raise
    return status


def _leave(status: int) -> None:
    """The end of a process that used Prefect, whose threads keep DuckDB's objects to the last.

    DuckDB would print an account of them, so the process ends before it does.
    """
    if "prefect" in sys.modules:
        logging.shutdown()
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status_of(words: list[str]) -> int:
    if "--quiet" in words:
        show_messages(quiet=True)
        words = [word for word in words if word != "--quiet"]
    try:
        _refuse_old_name(words)
        if words[:1] == ["build"]:
            return _build(words[1:])
        if words[:2] == ["condda", "make-tests"]:
            return _make_tests(words[2:])
        parsed = _parser().parse_args(words)
        return int(parsed.run(parsed) or 0)
    except NoveltyError as error:
        print(f"novelty: {error}", file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        if (sentence := missing_extra(error)) is None:
            raise
        print(f"novelty: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("novelty: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except PermissionError as error:
        if error.filename is None:
            raise
        reason = f"{error.filename}: {error.strerror}"
        print(
            f"novelty: {reason}; mend its permissions, then run the same command", file=sys.stderr
        )
        return 2
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ESTALE):
            raise
        reason = f"{error.filename or 'a file'} cannot be read ({error.strerror})"
        print(f"novelty: {reason}; look at its disk, then run the same command", file=sys.stderr)
        return 2


def _refuse_old_name(words: list[str]) -> None:
    for old, new in MOVED.items():
        if tuple(words[: len(old)]) == old:
            today = shlex.join(["novelty", *new, *words[len(old) :]])
            raise ConfigError(f"`novelty {' '.join(old)}` has another name now: {today}")


def benchmarks() -> list[str]:
    """Every flow with a schema of the same name; adding one needs no edit here."""
    schemas = FLOWS.parent / "schemas"
    return sorted(p.stem for p in FLOWS.glob("[!_]*.py") if (schemas / p.name).exists())


def predictors() -> list[str]:
    """What agents are made of, by file, as `tasks.predictors` has it: without its import."""
    files = (FLOWS.parent / "tasks" / "predictors").glob("[!_]*.py")
    return sorted(path.stem for path in files if path.stem != "base")


def _parser() -> Parser:
    parser = Parser(
        prog="novelty",
        description="Raw open-world material to Parquet tables to novelty detectors.",
        groups=GROUPS,
    )
    parser.add_argument("--version", action="version", version=f"novelty {VERSION}")
    parser.add_argument("--quiet", action="store_true", help=QUIET_HELP)
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int | None] | None,
        summary: str,
        within: "argparse._SubParsersAction[Parser]" = commands,
    ) -> argparse.ArgumentParser:
        added = within.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        return added

    def commands_of(benchmark: str, summary: str) -> "argparse._SubParsersAction[Parser]":
        added = commands.add_parser(benchmark, help=summary, description=summary)
        return added.add_subparsers(metavar="command", required=True)

    def with_lake(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added.add_argument(
            "--lake",
            help="lake: a folder or s3://bucket/prefix (default: NOVELTY_LAKE, else ./lake)",
        )
        return added

    command("build", None, f"build a benchmark's tables: {', '.join(benchmarks())}")
    sample = command("sample", _sample, "write small raw data sets that the project makes itself")
    sample.add_argument("--out", default="sample", help="folder to write to (default: sample)")
    sample.add_argument(
        "--seed", type=whole_number(), default=0, help="one seed for everything (default: 0)"
    )
    sample.add_argument("--only", action="append", help="only this benchmark (may be repeated)")
    fetched = command("fetch", _fetch, "download a file, resumed and checked")
    fetched.add_argument("url", help="http(s) or file:// address, or a path to check")
    fetched.add_argument("--out", default=".", help="folder to write to (default: this one)")
    fetched.add_argument("--sha256", help="what its content must hash to")
    fetched.add_argument("--size", type=whole_number(), help="bytes that it must have")
    fetched.add_argument("--name", default="", help="file name, where the address has none")
    demo = with_lake(command("demo", _demo, "build every benchmark on the sample data"))
    demo.add_argument("--sample", default="sample", help="sample folder (default: sample)")
    status = with_lake(
        command("status", _status, "every table: rows, bytes, age, fresh or stale and why")
    )
    status.add_argument("name", nargs="?", help="benchmark or benchmark/table (default: all)")
    verify = with_lake(command("verify", _verify, "re-hash every file and name what differs"))
    verify.add_argument(
        "table", nargs="?", help="benchmark/table and what it is made from (default: all)"
    )
    verify.add_argument(
        "--drop", action="store_true", help="remove what is damaged so that a build remakes it"
    )
    restore = with_lake(
        command("restore", _restore, "undo a removal (alone: list them), or go back to a snapshot")
    )
    restore.add_argument(
        "removal", nargs="?", help="the beginning of its name, or a snapshot such as kowl@s12"
    )
    history = with_lake(command("history", _history, "snapshots of all tables: list, pin"))
    history.add_argument("benchmark", nargs="?", help="benchmark (default: all in the lake)")
    history.add_argument("--pin", metavar="SNAPSHOT", help="keep it for ever, such as kowl@s12")
    history.add_argument("--unpin", metavar="SNAPSHOT", help="let `gc` take it when it is old")
    path = with_lake(command("path", _path, "the folder of a snapshot, to read all its tables"))
    path.add_argument("name", help="benchmark[/table][@snapshot], such as kowl or kowl/clips@s12")
    lineage = with_lake(command("lineage", _lineage, "the chain from a table to its raw files"))
    lineage.add_argument("table", help="benchmark/table")
    gc = with_lake(command("gc", _gc, "remove old snapshots and what nothing needs any more"))
    gc.add_argument("--yes", action="store_true", help="remove without asking")
    gc.add_argument(
        "--grace",
        type=time_in("hours"),
        default=24.0,
        help="hours that replaced snapshots and dropped things stay, and objects in a bucket for "
        "builds elsewhere (default: 24)",
    )
    gc.add_argument(
        "--keep",
        type=whole_number(1),
        default=5,
        help="snapshots that stay however old (default: 5)",
    )
    iceberg = with_lake(
        command("iceberg", _iceberg, "register the tables in an Iceberg catalogue, without a copy")
    )
    iceberg.add_argument(
        "--catalog",
        help="name in pyiceberg's settings (default: the one named before, else SQLite in "
        "LAKE/iceberg)",
    )
    with_lake(command("upgrade", _upgrade, "bring tables of an older version up to today's schema"))
    report = with_lake(command("report", _report, "write the HTML report again"))
    report.add_argument("benchmark", nargs="?", help="benchmark (default: all in the lake)")
    query = with_lake(command("query", _query, "run SQL on the catalogue and print the rows"))
    query.add_argument("sql", nargs="?", help="such as: select * from novelcraft.frames limit 5")
    query.add_argument("--file", help="a .sql file, or the name of an example query")
    query.add_argument("--list", action="store_true", help="the example queries of docs/queries")
    runs = with_lake(command("runs", _runs, "runs of models: list, show, compare, drop"))
    runs.add_argument("action", choices=("list", "show", "compare", "drop"), nargs="?")
    runs.add_argument("names", nargs="*", help="ids, or how they begin; list: a benchmark")
    intake = with_lake(command("import", _import, "a file of any model's numbers becomes a run"))
    intake.add_argument("kind", choices=("outputs", "scores", "predictions"))
    intake.add_argument("file", help="CSV, Parquet or npz, as docs/importing.md describes")
    intake.add_argument("--benchmark", required=True, help=", ".join(benchmarks()))
    intake.add_argument("--protocol", required=True, help="protocol that its samples are of")
    intake.add_argument("--name", required=True, help="what the model is called from now on")
    intake.add_argument("--seed", type=int, help="of the model, where there are several")
    intake.add_argument("--partial", action="store_true", help="it may lack test samples")
    intake.add_argument("--head", help="its last layer, for scores that need it (safetensors)")
    put = with_lake(command("export", _export_run, "what a run put out, as a file to import"))
    put.add_argument("kind", choices=("outputs",))
    put.add_argument("run_id", metavar="run", help="the beginning of its id")
    put.add_argument("file", help="new file: .csv, .parquet or .npz")
    put.add_argument("--head", help="new file for its last layer")
    board = with_lake(command("leaderboard", _leaderboard, "detectors ranked, with intervals"))
    board.add_argument("--benchmark", help="only this one (default: all in the lake)")
    board.add_argument("--protocol", action="append", help="means over these (may be repeated)")
    board.add_argument("--by-protocol", action="store_true", help="rank in each protocol")
    board.add_argument("--metric", default="auroc", help="such as fpr95 (default: auroc)")
    board.add_argument("--convention", default="openood", help="of metrics (default: openood)")
    board.add_argument("--split", choices=("test", "valid"), default="test")
    board.add_argument("--format", choices=("table", "csv", "json", "markdown"), default="table")
    for kind, what in (
        ("models", "models that can be fitted"),
        ("networks", "networks below models"),
        ("scores", "scores of what models put out"),
        ("predictors", "predictors that live over time"),
    ):
        listed = command(kind, _plugins, f"{what}: settings, and where they fit")
        listed.add_argument("name", nargs="?", help="one of them: all its settings")
        listed.add_argument("--preset", help="show the values of this preset")
        listed.set_defaults(kind=kind)
    diff = with_lake(command("diff", _diff, "what changed in a table (exit code 0 same, 1 not)"))
    diff.add_argument("before", help="benchmark/table[@key], lake:benchmark/table, or Parquet path")
    diff.add_argument("after", nargs="?", help="the same (default: previous against current)")
    diff.add_argument("--key", help="columns that name a row, as a,b (default: the declared key)")
    diff.add_argument(
        "--examples", type=whole_number(), default=5, help="shown of each kind (default: 5)"
    )
    diff.add_argument("--out", help="Parquet file for every change, one value a row")
    novelcraft = commands_of("novelcraft", "render world states, export masks, compare labels")
    render = command("render", _render, "masks and novel fractions of world states", novelcraft)
    render.add_argument("states", help="folder of .json files, or a .jsonl[.gz] file")
    render.add_argument("--novel", required=True, help="novel names, such as minecraft:tnt[,…]")
    render.add_argument("--renderer", choices=("raycast", "blender"), default="raycast")
    render.add_argument("--rotation", choices=("published", "corrected"), default="corrected")
    render.add_argument("--coverage", choices=("published", "half"), default="published")
    render.add_argument(
        "--resolution", type=whole_number(1), default=256, help="pixels (default: 256)"
    )
    render.add_argument("--out", required=True, help="folder for targets.parquet and targets.csv")
    render.add_argument("--masks", action="store_true", help="also write each mask as PNG")
    score = command("evaluate", _evaluate, "metrics of any CSV or Parquet file of scores")
    score.add_argument("scores", help="CSV or Parquet file")
    score.add_argument("--score", action="append", required=True, help="score column (repeatable)")
    score.add_argument("--truth", required=True, help="truth column: 0/1, true/false, novel/normal")
    score.add_argument("--weight", help="share of weight of a class, such as normal=0.75")
    score.add_argument("--convention", default="novelcraft-2022", help="named metric convention")
    score.add_argument("--out", help="folder for metrics.parquet, curves.parquet, curves.png")
    masks = with_lake(command("masks", _masks, "the masks of a lake as PNG files", novelcraft))
    masks.add_argument("--out", required=True, help="folder for class/episode/frame.png")
    masks.add_argument("--only", action="append", help="only this class (may be repeated)")
    export = command("lerobot", _export, "episodes in LeRobot's v3.0 layout", novelcraft)
    with_lake(export)
    export.add_argument("--out", required=True, help="new folder for meta/ and data/")
    export.add_argument("--only", action="append", help="only this class (may be repeated)")
    export.add_argument(
        "--fps", type=whole_number(), default=1, help="frames that make a second (default: 1)"
    )
    drift = command("drift", _drift, "what changed between two versions of targets.csv", novelcraft)
    drift.add_argument("old", help="targets.csv before")
    drift.add_argument("new", help="targets.csv now")
    drift.add_argument("--out", help="Parquet file for every frame that differs")
    kowl = commands_of("kowl", "compare snapshots of Kinetics lists")
    lists = command("list-drift", _list_drift, "what changed between two snapshots of a list", kowl)
    lists.add_argument("old", help="Kinetics list before (CSV, plain or gzip), or a folder of them")
    lists.add_argument("new", help="the list or folder now")
    lists.add_argument(
        "--split", choices=("train", "validate", "test"), help="split of lists that name none"
    )
    lists.add_argument("--out", help="Parquet file for every change")
    condda = commands_of("condda", "serve tests, run an agent over them, make some of a lake")
    serve = command("serve", _serve, "serve tests by the published API and by /v1", condda)
    serve.add_argument(
        "--tests", type=path_text, required=True, help="folder of PROTOCOL/domain/ test files"
    )
    serve.add_argument(
        "--state", type=path_text, default="condda-state", help="folder for the sessions"
    )
    serve.add_argument("--host", default="127.0.0.1", help="other than loopback needs --tokens")
    serve.add_argument(
        "--port", type=whole_number(0, 65535), default=3307, help="0 takes any free one"
    )
    serve.add_argument(
        "--tokens", type=path_text, help="file of lines: agent or operator, owner's name, token"
    )
    serve.add_argument(
        "--policy",
        choices=("published", "evaluation"),
        help="what agents may see (default: evaluation with --tokens, else published)",
    )
    serve.add_argument(
        "--retain-days",
        type=time_in("days"),
        help="retire sessions that ended so many days ago, at the start and daily (default: never)",
    )
    fixed = serve.add_argument_group("what the operator decides in an evaluation")
    fixed.add_argument("--red-light", action="store_true", help="agents may ask for the red light")
    fixed.add_argument("--round-size", type=whole_number(), help="instead of the tests' own")
    fixed.add_argument(
        "--feedback-max-ids", type=whole_number(), help="a round, instead of the tests' own"
    )
    fixed.add_argument(
        "--attempts", type=whole_number(), help="sessions of an owner with a test (default: 1)"
    )
    retire = command(
        "retire", _retire, "move sessions that ended long ago to another folder", condda
    )
    retire.add_argument(
        "--state", type=path_text, default="condda-state", help="folder of the server's sessions"
    )
    retire.add_argument(
        "--days", type=time_in("days"), required=True, help="days since the session's end"
    )
    run = with_lake(command("run", _run, "run an agent over tests and measure it", condda))
    run.add_argument(
        "--detector",
        action="append",
        required=True,
        help=f"agents, as a,b or all: {', '.join(predictors())}",
    )
    run.add_argument(
        "--tests", type=path_text, required=True, help="folder of tests with their features"
    )
    run.add_argument("--url", help="server to run against (default: in this process)")
    run.add_argument("--token", help="its token, if it wants one")
    run.add_argument("--name", default="", help="another name runs the same once more")
    run.add_argument(
        "--red-light",
        nargs="?",
        const="with",
        choices=("with", "without", "both"),
        help="be told when the world changes (default: both, with --url without)",
    )
    run.add_argument(
        "--baseline",
        default="threshold",
        help="agent that M3 to M6 compare with; it is run too, but not on a server",
    )
    service = command("service", _service, "scheduled builds: a Prefect server and worker, here")
    service.add_argument("action", choices=("start", "stop", "deploy", "status", "notify"))
    service.add_argument("--file", help="default: NOVELTY_SERVICE, else ./service.yaml")
    service.add_argument("--clear", action="store_true", help="status: runs without a process end")
    command("make-tests", None, "make tests of a lake's tables", condda)
    publish = with_lake(
        command("publish", _publish, "a benchmark's tables as a self-contained folder with a card")
    )
    publish.add_argument("benchmark", help=", ".join(benchmarks()))
    publish.add_argument("folder", help="new folder, or one published before")
    publish.add_argument("--version", help="name of this publication, such as 1.0.0")
    publish.add_argument("--tables", help="only these, such as frames,targets (default: all)")
    publish.add_argument("--licence", "--license", help="such as CC-BY-4.0, or a URL")
    publish.add_argument("--date", help="day of publication (default: today), such as 2026-11-30")
    published = command("check-published", _check_published, "whether a published folder is whole")
    published.add_argument("folder")
    completion = command("completion", _completion, "a script for your shell: words by the Tab key")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    dictionary = command("dictionary", _dictionary, "write the data dictionary of all tables")
    dictionary.add_argument("--out", default="docs/tables.md")
    doctor = command("doctor", _doctor, "what is missing on this machine, and how to mend it")
    doctor.add_argument(
        "--install", action="store_true", help="install missing system libraries (apt, as root)"
    )
    doctor.add_argument("--gpu", action="store_true", help="try every model on the GPU")
    doctor.add_argument("--device", default="cuda", help="with --gpu: cuda, cuda:N or cpu")
    doctor.add_argument("--preset", action="append", choices=("small", "paper"))
    doctor.add_argument("--models", default="", help="with --gpu: these alone (a,b)")
    return parser


def build_parser(benchmark: str) -> tuple[Parser, type[BaseModel]]:
    """The options of `novelty build BENCHMARK`, and the settings that they are."""
    model = importlib.import_module(f"schemas.{benchmark}").Config
    name = f"novelty build {benchmark}"
    parser = Parser(prog=name, usage=f"{name} [OPTION …]", description=model.__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what a build would make, why and how long"
    )
    parser.add_argument("--quiet", action="store_true", help=QUIET_HELP)
    add_options(parser, model)
    return parser, model


def tests_parser() -> Parser:
    """The options of `novelty condda make-tests`."""
    from schemas.condda import TestSettings
    from tasks.condda.scenarios import SCENARIOS

    shapes = "; ".join(f"{name}: {one.about}" for name, one in SCENARIOS.items())
    parser = Parser(
        prog="novelty condda make-tests",
        usage="novelty condda make-tests BENCHMARK --out DIR [OPTION …]",
        description="Make CONDDA/OND tests of a lake's tables. The same command goes on after an "
        "interruption.",
        epilog=f"Scenarios are {shapes}.",
    )
    parser.add_argument("benchmark", choices=benchmarks())
    parser.add_argument("--out", required=True, help="folder for tests and features")
    parser.add_argument("--protocol", help="says who is known (default: the run's, or the first)")
    parser.add_argument("--run", help="run that gives features, by the beginning of its id")
    parser.add_argument("--lake", help="folder or s3://… (default: NOVELTY_LAKE, else ./lake)")
    add_options(parser, TestSettings)
    return parser


def _build(words: list[str]) -> int:
    parser = Parser(prog="novelty build", description="Build a benchmark's tables.")
    parser.add_argument("benchmark", help=", ".join(benchmarks()))
    if not words or words[0].startswith("-"):
        parser.parse_args(words)
    benchmark = words[0]
    if benchmark not in benchmarks():
        names = f"{', '.join(benchmarks())}{did_you_mean(benchmark, benchmarks())}"
        raise ConfigError(f"unknown benchmark {benchmark!r}; there are: {names}")
    parser, model = build_parser(benchmark)
    inputs = [f"--{name}" for name in INPUTS if name in model.model_fields]
    for word in (word.partition("=")[0] for word in words):
        if word in {f"--{name}" for name in INPUTS} - set(inputs):
            raise ConfigError(
                f"{word} is an option of another benchmark; {benchmark} has {', '.join(inputs)}"
            )
    known, settings = split_settings(words[1:], model)
    parsed = parser.parse_args(known)
    config: Any = chosen_values(parsed, model, settings)
    if parsed.dry_run:
        from flows.dry_run import show_dry_run

        show_dry_run(benchmark, config)
        return 0

    from flows.runner import run_flow
    from storage.layout import lake_address, lake_root
    from tasks.operations.summary import show_tables
    from tasks.report import REPORTS

    run_flow(benchmark, config)
    show_tables(config.lake, benchmark)
    print(f"report: {lake_address(lake_root(config.lake))}/{REPORTS}/{benchmark}.html")
    return 0


def _fetch(parsed: argparse.Namespace) -> None:
    from tasks.operations.fetch import Remote, fetch

    print(fetch(Remote(parsed.url, parsed.sha256, parsed.size, parsed.name), Path(parsed.out)))


def _sample(parsed: argparse.Namespace) -> None:
    from tasks.sample.write import write_sample

    write_sample(Path(parsed.out), parsed.seed, parsed.only)


def _demo(parsed: argparse.Namespace) -> None:
    from flows.runner import run_demo

    run_demo(Path(parsed.sample), parsed.lake, benchmarks())


def _status(parsed: argparse.Namespace) -> None:
    from schemas.tables import find_table
    from storage.disk_use import disk_use
    from storage.filehash import HashCache
    from storage.layout import hash_cache_path, lake_root
    from storage.raw import open_raw
    from storage.snapshots import GRACE_HOURS
    from storage.upkeep import (
        find_garbage,
        find_remote_garbage,
        require_lake,
        statuses,
    )
    from tasks.engine.stage import stage_version
    from tasks.operations.summary import show_disk_use, show_statuses

    lake = lake_root(parsed.lake)
    require_lake(lake)
    cache = HashCache(hash_cache_path(lake))

    def schema_version(benchmark: str, name: str) -> int | None:
        table = find_table(benchmark, name)
        return table.version if table else None

    def list_source(root: Path) -> dict[str, str]:
        return {file.name: file.digest for file in open_raw(root, cache).files()}

    every = statuses(lake, stage_version, schema_version, list_source)
    name = parsed.name or ""
    shown = [one for one in every if not name or f"{one.name}/".startswith(f"{name}/")]
    if not shown and name:
        names = sorted({one.name.partition("/")[0] for one in every})
        content = f"it has {', '.join(names)}" if names else "it is empty"
        raise LakeError(f"there is no table of {name} in {lake}; {content}")
    show_statuses(lake, shown)
    if name:
        return
    in_bucket = sum(entry.bytes for entry in find_remote_garbage(lake))
    show_disk_use(lake, disk_use(lake, find_garbage(lake)), in_bucket, GRACE_HOURS)


def _verify(parsed: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from storage.catalog import refresh_catalog
    from storage.damage import drop, verify_lake
    from storage.layout import lake_root
    from storage.locks import all_locked
    from storage.upkeep import require_lake

    lake = lake_root(parsed.lake)
    require_lake(lake)
    if parsed.table:
        _table_name(parsed.table)
    with all_locked(lake) if parsed.drop else nullcontext():
        checked = verify_lake(lake, parsed.table)
        for entry in checked.damage:
            print(f"{entry.table}: {entry.file} {entry.problem}")
        if checked.damage and parsed.drop:
            drop(lake, checked.damage)
            refresh_catalog(lake)
            print("dropped; a build makes it again, and `novelty restore` brings it back")
    damaged = len({entry.owner for entry in checked.damage})
    print(
        f"{checked.folders} pieces and versions, {checked.files} files checked, {damaged} damaged"
    )
    return 2 if damaged else 0


def _restore(parsed: argparse.Namespace) -> None:
    from storage.catalog import refresh_catalog
    from storage.damage import restorable, restore
    from storage.layout import lake_root
    from storage.locks import all_locked
    from storage.upkeep import require_lake

    lake = lake_root(parsed.lake)
    require_lake(lake)
    if parsed.removal is None:
        removals = restorable(lake)
        if not removals:
            print("nothing was dropped that could be restored")
        for name, (reason, paths) in removals.items():
            print(f"{name}  {len(paths)} removed: {reason}")
            for path in paths:
                print(f"    {path}")
        return
    if "@" in parsed.removal:
        from tasks.operations.history import restore as restore_snapshot

        with all_locked(lake):
            made = restore_snapshot(lake, parsed.removal)
        print(f"{parsed.removal} is current again, as {made.name}")
        return
    with all_locked(lake):
        restored, newer = restore(lake, parsed.removal)
        for path in newer:
            print(f"{path} was made anew meanwhile and stays as it is")
        print(f"restored {len(restored)}")
        refresh_catalog(lake)


def _history(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.history import history_rows, set_pin
    from tasks.operations.summary import show_frame

    lake = lake_root(parsed.lake)
    require_lake(lake)
    for text, pinned in ((parsed.pin, True), (parsed.unpin, False)):
        if text:
            snapshot = set_pin(lake, text, pinned)
            print(f"{snapshot.name} of {snapshot.benchmark} is {'' if pinned else 'not '}pinned")
    if not (parsed.pin or parsed.unpin):
        show_frame(history_rows(lake, parsed.benchmark))


def _path(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.history import folder_of

    lake = lake_root(parsed.lake)
    require_lake(lake)
    print(folder_of(lake, parsed.name))


def _lineage(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from storage.upkeep import trace_lineage
    from tasks.operations.summary import show_lineage

    lake = lake_root(parsed.lake)
    show_lineage(trace_lineage(lake, _version(lake, parsed.table)))


def _gc(parsed: argparse.Namespace) -> int:
    from storage.layout import lake_root
    from storage.locks import all_locked
    from storage.upkeep import require_lake

    lake = lake_root(parsed.lake)
    require_lake(lake)
    with all_locked(lake):
        return _collect(lake, parsed.yes, parsed.grace, parsed.keep)


def _collect(lake: Path, sure: bool, grace_hours: float, keep: int) -> int:
    from storage.catalog import refresh_catalog
    from storage.layout import lake_address
    from storage.tombstones import discard
    from storage.upkeep import (
        find_garbage,
        find_remote_garbage,
        remove_remote_garbage,
        size_of,
    )

    garbage = find_garbage(lake, grace_hours, keep)
    objects = find_remote_garbage(lake, grace_hours, keep)
    for path in garbage:
        print(f"{size_of(path):>14,} bytes  {path.relative_to(lake)}")
    for entry in objects:
        print(f"{entry.bytes:>14,} bytes  {lake_address(lake)}/{entry.name}")
    count = len(garbage) + len(objects)
    if not count:
        print("nothing to remove")
        return 0
    if not sure:
        if not sys.stdin.isatty():
            print(f"{count} things to remove; run again with --yes to do it")
            return 0
        if input(f"remove these {count}? [y/N] ").strip().lower() != "y":
            return 0
    remove_remote_garbage(lake, objects)
    discard(lake, garbage)
    refresh_catalog(lake)
    print(f"removed {count}")
    return 0


def _iceberg(parsed: argparse.Namespace) -> None:
    import polars as pl

    from storage.iceberg import register
    from storage.layout import iceberg_path, lake_root
    from storage.upkeep import require_lake
    from tasks.operations.summary import show_frame

    lake = lake_root(parsed.lake)
    require_lake(lake)
    done = register(lake, parsed.catalog)
    if not done:
        raise LakeError(_no_tables(lake))
    show_frame(pl.DataFrame(done).rename({"name": "table"}))
    where = "the catalogue that you named" if parsed.catalog else iceberg_path(lake) / "catalog.db"
    print(f"{len(done)} tables in {where}; builds and `novelty gc` keep it up to date")


def _upgrade(parsed: argparse.Namespace) -> int:
    from storage.catalog import refresh_catalog
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.upgrade import build_command, older_tables, upgrade

    lake = lake_root(parsed.lake)
    require_lake(lake)
    every = list(older_tables(lake))
    for older in every:
        if older.can_be_upgraded:
            upgrade(lake, older)
            print(f"{older.name}: version {older.was} became {older.table.version}")
    refresh_catalog(lake)
    left = [older for older in every if not older.can_be_upgraded]
    for older in left:
        number = older.table.version
        print(f"{older.name}: version {older.was} cannot become {number} without raw files")
    for benchmark in sorted({older.version.manifest.benchmark for older in left}):
        print(
            f"to make them anew, with the settings that you want: {build_command(lake, benchmark)}"
        )
    if not every:
        print("every table has today's schema")
    return 1 if left else 0


def _report(parsed: argparse.Namespace) -> None:
    from flows.share_report import share_report
    from storage.layout import lake_root
    from storage.tables import current_versions
    from storage.upkeep import require_lake

    lake = lake_root(parsed.lake)
    require_lake(lake)
    names = sorted({version.manifest.benchmark for version in current_versions(lake)})
    if not names:
        raise LakeError(_no_tables(lake))
    if parsed.benchmark and parsed.benchmark not in names:
        choices = f"{', '.join(names)}{did_you_mean(parsed.benchmark, names)}"
        raise LakeError(f"no tables of {parsed.benchmark!r} in {lake}; there are: {choices}")
    for benchmark in [parsed.benchmark] if parsed.benchmark else names:
        print(share_report(lake, benchmark))


def _query(parsed: argparse.Namespace) -> None:
    from storage.catalog import catalog_for
    from storage.layout import lake_root
    from storage.tables import current_versions
    from storage.upkeep import require_lake
    from tasks.operations.queries import example_queries, read_query, show_query
    from tasks.operations.summary import show_frame

    if parsed.list:
        show_frame(example_queries())
        return
    lake = lake_root(parsed.lake)
    require_lake(lake)
    sql = read_query(parsed.sql, parsed.file)
    if not current_versions(lake):
        raise LakeError(_no_tables(lake))
    catalog_for(lake, sql)
    show_query(lake, sql)


def _diff(parsed: argparse.Namespace) -> int:
    from storage.layout import lake_root
    from tasks.operations.diff import diff_tables, show_diff
    from tasks.operations.diff_sides import find_side, previous_side

    lake = lake_root(parsed.lake)
    after = find_side(parsed.after or parsed.before, lake)
    before = find_side(parsed.before, lake) if parsed.after else previous_side(parsed.before, lake)
    key = [name.strip() for name in (parsed.key or "").split(",") if name.strip()]
    out = Path(parsed.out) if parsed.out else None
    diff = diff_tables(before, after, key, parsed.examples, out)
    show_diff(diff)
    return 0 if diff.same else 1


def _runs(parsed: argparse.Namespace) -> None:
    import json

    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.runs import compare_runs, drop_runs, list_runs, show_run
    from tasks.operations.summary import show_frame

    lake = lake_root(parsed.lake)
    require_lake(lake)
    action, names = parsed.action or "list", parsed.names
    if action == "list":
        show_frame(list_runs(lake, names[0] if names else None))
        return
    if len(names) < (2 if action == "compare" else 1):
        raise ConfigError(f"novelty runs {action}: name runs by the beginning of their ids")
    if action == "show":
        for name in names:
            facts, numbers = show_run(lake, name)
            print(json.dumps(facts, indent=1))
            show_frame(numbers)
    elif action == "compare":
        for frame in compare_runs(lake, names):
            show_frame(frame)
    else:
        dropped = drop_runs(lake, names)
        print(f"dropped {', '.join(dropped)}; a build that asks for them brings them back")


def _import(parsed: argparse.Namespace) -> None:
    from flows.importing import import_file
    from flows.runner import publish_report
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.evaluation.imports import Import
    from tasks.operations.runs import show_run
    from tasks.operations.summary import show_frame

    lake = lake_root(parsed.lake)
    require_lake(lake)
    request = Import(
        parsed.kind,
        Path(parsed.file),
        parsed.benchmark,
        parsed.protocol,
        parsed.name,
        parsed.seed,
        Path(parsed.head) if parsed.head else None,
        parsed.partial,
    )
    run = import_file(lake, request)
    publish_report(lake, parsed.benchmark)
    show_frame(show_run(lake, run)[1].drop("run_id"))
    print(f"run {run}; `novelty leaderboard --benchmark {parsed.benchmark}` ranks it")


def _export_run(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.export_outputs import export_outputs

    lake = lake_root(parsed.lake)
    require_lake(lake)
    head = Path(parsed.head) if parsed.head else None
    rows = export_outputs(lake, parsed.run_id, Path(parsed.file), head)
    print(f"{rows:,} rows in {parsed.file}")


def _leaderboard(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from storage.upkeep import require_lake
    from tasks.operations.leaderboard import find_boards, show_boards

    lake = lake_root(parsed.lake)
    require_lake(lake)
    boards, absent = find_boards(
        lake,
        benchmark=parsed.benchmark,
        protocols=parsed.protocol or (),
        metric=parsed.metric,
        convention=parsed.convention,
        split=parsed.split,
        by_protocol=parsed.by_protocol,
    )
    show_boards(boards, absent, parsed.format)


def _plugins(parsed: argparse.Namespace) -> None:
    from tasks.operations.plugin_list import plugin_rows, setting_rows
    from tasks.operations.summary import show_frame

    if parsed.name:
        show_frame(setting_rows(parsed.kind, parsed.name, parsed.preset))
    else:
        show_frame(plugin_rows(parsed.kind))


def _render(parsed: argparse.Namespace) -> None:
    from schemas.config import make_config
    from schemas.novelcraft import RenderSettings
    from tasks.novelcraft.render_states import render_states
    from tasks.operations.summary import show_frame

    names = ("renderer", "rotation", "coverage", "resolution")
    settings = make_config(RenderSettings, {name: getattr(parsed, name) for name in names})
    novel = [name.strip() for name in parsed.novel.split(",") if name.strip()]
    out = Path(parsed.out)
    targets = render_states(Path(parsed.states), novel, settings, out, parsed.masks)
    show_frame(targets.sort("novel_fraction", descending=True).head(10))
    shown = (targets["novel_pixels"] > 0).sum()
    print(f"{targets.height} states, {shown} show novelty; {out / 'targets.parquet'}")


def _evaluate(parsed: argparse.Namespace) -> None:
    from tasks.operations.score_files import evaluate_file
    from tasks.operations.summary import show_frame

    metrics = evaluate_file(
        Path(parsed.scores),
        parsed.score,
        parsed.truth,
        parsed.convention,
        parsed.weight,
        Path(parsed.out) if parsed.out else None,
    )
    show_frame(metrics)


def _masks(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from tasks.novelcraft.masks import export_masks

    count = export_masks(
        _version(lake_root(parsed.lake), "novelcraft/masks"), parsed.out, parsed.only
    )
    print(f"{count} masks in {parsed.out}")


def _export(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from tasks.novelcraft.lerobot import export_lerobot

    done = export_lerobot(lake_root(parsed.lake), Path(parsed.out), parsed.only, parsed.fps)
    print(f"{done.episodes} episodes, {done.frames:,} frames, {done.files} files in {parsed.out}")
    if done.without_role:
        print(f"{done.without_role:,} frames left out: their class is neither normal nor novel")
    if done.without_picture:
        print(f"{done.without_picture:,} frames left out: they have no picture")


def _drift(parsed: argparse.Namespace) -> None:
    import polars as pl

    from tasks.novelcraft.targets import drift_by_class, label_drift, read_targets
    from tasks.operations.summary import show_frame

    old, new = (read_targets(Path(name))[0] for name in (parsed.old, parsed.new))
    drift = label_drift(old, new)
    show_frame(drift_by_class(drift).filter(pl.sum_horizontal("changed", "added", "removed") > 0))
    differs = drift.filter(pl.col("change") != "same")
    counts = dict(differs.group_by("change").len().iter_rows())
    crossed = differs["crossed"].sum()
    text = ", ".join(f"{counts.get(kind, 0):,} {kind}" for kind in ("changed", "added", "removed"))
    print(f"{drift.height:,} frames: {text}; {crossed:,} crossed the 1 % line")
    if parsed.out:
        differs.write_parquet(parsed.out)


def _list_drift(parsed: argparse.Namespace) -> None:
    import polars as pl

    from tasks.kowl.drift import compare_lists
    from tasks.operations.summary import show_frame

    drift = compare_lists(Path(parsed.old), Path(parsed.new), parsed.split)
    show_frame(drift.summary)
    for change, rows in drift.rows.group_by("change", maintain_order=True):
        print(f"{change[0]}: {rows.height:,}; the first ones")
        show_frame(rows.drop("change").head(5))
    labels = drift.rows.filter(pl.col("change") == "relabelled")
    if labels.height:
        pairs = labels.group_by("label_before", "label_after").len("clips")
        show_frame(pairs.sort("clips", "label_before", descending=[True, False]).head(20))
    if parsed.out:
        drift.rows.write_parquet(parsed.out)


def _serve(parsed: argparse.Namespace) -> None:
    from schemas.config import make_config
    from tasks.condda.commands import PUBLISHED, Policy
    from tasks.condda.server.serve import read_tokens, serve

    options = ("round_size", "feedback_max_ids", "attempts")
    fixed = {key: value for key in options if (value := getattr(parsed, key)) is not None}
    if parsed.red_light:
        fixed["red_light"] = True
    name = parsed.policy or ("published" if parsed.tokens is None else "evaluation")
    if fixed and name == "published":
        raise ConfigError(
            f"--{next(iter(fixed)).replace('_', '-')} is of an evaluation; add --policy evaluation"
        )
    serve(
        Path(parsed.tests),
        Path(parsed.state),
        parsed.host,
        parsed.port,
        make_config(Policy, {"name": name, **fixed}) if name == "evaluation" else PUBLISHED,
        read_tokens(Path(parsed.tokens)) if parsed.tokens is not None else (),
        retain_days=parsed.retain_days,
    )


def _retire(parsed: argparse.Namespace) -> None:
    from tasks.condda.retention import RETIRED, retire

    retired = retire(Path(parsed.state), parsed.days)
    print(f"{len(retired)} sessions moved to {Path(parsed.state) / RETIRED}; running ones stay")


def _run(parsed: argparse.Namespace) -> None:
    from flows.runner import run_flow
    from storage.layout import lake_root
    from tasks.condda.measures import lake_scoreboard
    from tasks.condda.telling import warn_of_telling_names
    from tasks.operations.summary import show_frame, show_tables

    run_flow("condda", run_config(parsed))
    warn_of_telling_names(Path(parsed.tests))
    show_tables(parsed.lake, "condda")
    for frame in lake_scoreboard(lake_root(parsed.lake), parsed.baseline):
        show_frame(frame)


def run_config(parsed: argparse.Namespace) -> "Config":
    """The build that `novelty condda run` is."""
    from schemas.condda import Config
    from schemas.config import make_config

    names = [name.strip() for entry in parsed.detector for name in entry.split(",")]
    if not all(names):
        raise ConfigError(f"--detector names no agent; there are: {', '.join(predictors())}")
    run = {
        "red_light": parsed.red_light or ("without" if parsed.url else "both"),
        "baseline": parsed.baseline,
        "url": parsed.url,
        "token": parsed.token,
        "name": parsed.name,
    }
    agents = names if parsed.url else [*names, parsed.baseline]
    config = {"tests": parsed.tests, "predictors": {name: {} for name in agents}, "run": run}
    return make_config(Config, config | ({"lake": parsed.lake} if parsed.lake else {}))


def _make_tests(words: list[str]) -> int:
    from schemas.condda import TestSettings
    from storage.layout import lake_root
    from tasks.condda.from_lake import tests_of_lake
    from tasks.operations.summary import show_frame

    parsed = tests_parser().parse_args(words)
    settings = chosen_values(parsed, TestSettings)
    made = tests_of_lake(
        lake_root(parsed.lake),
        parsed.benchmark,
        Path(parsed.out),
        settings,
        protocol=parsed.protocol,
        run=parsed.run,
    )
    show_frame(made.drop("novel_classes"))
    print(f"tests and features in {parsed.out}; try: novelty condda serve --tests {parsed.out}")
    return 0


def _publish(parsed: argparse.Namespace) -> None:
    from storage.layout import lake_root
    from tasks.publish.folder import publish

    tables = [name.strip() for name in parsed.tables.split(",")] if parsed.tables else None
    done = publish(
        lake_root(parsed.lake),
        parsed.benchmark,
        Path(parsed.folder),
        version=parsed.version,
        tables=tables,
        licence=parsed.licence,
        date=parsed.date,
    )
    word = "published" if done.written else "already published"
    count = len(done.publication.tables)
    print(f"{word}: {count} tables, key {done.publication.key}, in {parsed.folder}")


def _check_published(parsed: argparse.Namespace) -> int:
    from tasks.publish.check import check_published

    checked = check_published(Path(parsed.folder))
    for problem in checked.problems:
        print(problem)
    if not checked.by_mlcroissant:
        print("mlcroissant is not installed: croissant.json was compared with the files only")
    count = len(checked.publication.tables)
    print(f"{count} tables, key {checked.publication.key}, {len(checked.problems)} problems")
    return 1 if checked.problems else 0


def _dictionary(parsed: argparse.Namespace) -> None:
    from tasks.operations.dictionary import data_dictionary

    path = Path(parsed.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data_dictionary())
    print(path)


def _service(parsed: argparse.Namespace) -> int:
    from flows import service
    from flows.deployments import read_service

    declaration = read_service(parsed.file, check=parsed.action not in ("stop", "status"))
    if parsed.action == "status":
        return service.status(declaration, parsed.clear)
    if parsed.action == "notify":
        return service.send_test(declaration)
    act = {"start": service.start, "stop": service.stop, "deploy": service.deploy_only}
    act[parsed.action](declaration)
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from tasks.operations.doctor import examine, install_libraries

    if parsed.gpu:
        from tasks.operations.gpu_check import examine_device

        names = [name for name in parsed.models.split(",") if name]
        return examine_device(parsed.device, parsed.preset or ("small",), names)
    if parsed.install:
        install_libraries()
    return examine(sys.executable)


def _completion(parsed: argparse.Namespace) -> None:
    from flows.completion import completion_script, words_of

    words = words_of(_parser())
    for benchmark in benchmarks():
        words |= words_of(build_parser(benchmark)[0], ("build", benchmark))
    words["build",] = benchmarks()
    words |= words_of(tests_parser(), ("condda", "make-tests"))
    print(completion_script(parsed.shell, words), end="")


def _no_tables(lake: Path) -> str:
    return (
        f"there are no tables in {lake} yet; build some (`novelty build …`, `make demo`) or name "
        "another lake with --lake or NOVELTY_LAKE"
    )


def _version(lake: Path, name: str) -> "TableVersion":
    from storage.tables import current_version

    return current_version(lake, *_table_name(name))


def _table_name(name: str) -> tuple[str, str]:
    benchmark, _, table = name.partition("/")
    if not table:
        raise ConfigError(
            f"{name!r} is not a table; write benchmark/table, as `novelty status` does"
        )
    return benchmark, table


if __name__ == "__main__":
    sys.exit(main())
