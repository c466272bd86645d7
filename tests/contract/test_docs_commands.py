"""Every command of README.md, CONTRIBUTING.md and docs/ is run, on the small inputs of docs_inputs.

Commands stand in fenced blocks without a language. `novelty` runs in this process; a build is run
with --dry-run, by which the flow checks its options, settings, names and files and plans its stages
(tests/flows builds every benchmark). `make` builds are run up to the `novelty` commands that they
call, and these like any other; other targets are planned (`make -n`). pip looks whether all is
installed, without a network. The few that are run elsewhere are in MARKED. A command that is none
of these fails.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from flows.cli import _parser, benchmarks, build_parser, main
from flows.completion import words_of
from flows.engine import RUNNERS
from flows.share_report import share_report
from storage.filehash import sha256_file
from storage.layout import lake_root
from tests import s3
from tests.contract.docs_inputs import ROOT, identities, make_inputs, real_words
from tests.toy import build_toy, write_raw

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
REST = ("...", "…")
"""Stand for the options of the command above."""
CLUSTER, RAY, WHEEL = (
    "tests/flows/test_cluster.py",
    "tests/flows/test_ray.py",
    "tests/install/test_wheel.py",
)
MARKED = {
    "dask scheduler --host head --port 8786": (CLUSTER, '"scheduler", "--host"'),
    'dask worker tcp://head:8786 --nthreads 8 --resources "CORES=8"': (CLUSTER, "CORES=2"),
    'dask worker tcp://head:8786 --nthreads 2 --resources "GPU=2"': (CLUSTER, "GPU=1"),
    "ray start --head --disable-usage-stats": (RAY, '"--head"'),
    "ray start --address head:6379 --num-gpus 1": (RAY, '"--num-gpus"'),
    "/opt/novelty/bin/python -m pip install -c constraints.txt "
    "'dist/novelty_pipeline-0.1.0-py3-none-any.whl[learn,video]'": (
        WHEEL, "def test_the_wheel_runs_outside_of_the_checkout",
    ),
    "docker build -t novelty .": (WHEEL, "def test_the_dockerfile_sets_up"),
    "docker run --rm -v novelty-data:/data novelty": (WHEEL, "def test_the_demo_of_the_image"),
    "docker run --rm -v novelty-data:/data novelty novelty status": (
        WHEEL, "def test_the_wheel_runs_outside_of_the_checkout",
    ),
    "docker build -t novelty --build-arg BASE=nvidia/cuda:12.6.3-base-ubuntu22.04 "
    "--build-arg TORCH=cuda .": (WHEEL, "make setup TORCH="),
}  # fmt: skip
"""Command -> the file that runs it, or what it calls, and words of it that do."""
DIFFERS = 1
"""Exit code of `novelty diff`: there are differences."""


@dataclass(frozen=True)
class Command:
    place: str
    text: str
    above: tuple[str, ...] = ()
    """The commands before it in its document."""


def commands_of(text: str, name: str) -> Iterator[Command]:
    """The commands of a document: continued lines joined, comments and empty lines left out."""
    above: list[str] = []
    for found in FENCE.finditer(text):
        if found[1] not in ("", "sh", "bash", "console"):
            continue
        line = text[: found.start(2)].count("\n") + 1
        begun, parts = line, []
        for number, row in enumerate(found[2].splitlines(), line):
            row = re.sub(r"(^|\s)#\s.*", "", row).strip()
            begun = begun if parts else number
            parts.append(row.removesuffix("\\").strip())
            if row.endswith("\\"):
                continue
            if whole := " ".join(filter(None, parts)):
                yield Command(f"{name}:{begun}", whole, tuple(above))
                above.append(whole)
            parts = []


COMMANDS = [
    command
    for path in DOCUMENTS
    for command in commands_of(path.read_text(), str(path.relative_to(ROOT)))
]


def split(text: str) -> tuple[dict[str, str], list[str]]:
    """Settings of the environment that stand before a command, and its words."""
    words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", text))  # with what may be left out
    given = {}
    while words and (named := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        given[named[1]] = named[2]
        words.pop(0)
    return given, words


def options(words: list[str]) -> list[list[str]]:
    """Options, each with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def spelt_out(words: list[str], above: tuple[str, ...]) -> list[str]:
    """A build with `...` gets the options of the build above that it does not give itself.

    Where its document has none, those of the first build in the benchmark's own document.
    """
    if not any(rest in words for rest in REST):
        return words
    head, own = words[:2], [word for word in words[2:] if word not in REST]
    first = [one.text for one in COMMANDS if one.place.startswith(f"docs/{head[1]}.md")]
    for text in [*reversed(above), *first]:
        other = split(text)[1][1:]
        if other[:2] == head and not any(rest in other for rest in REST):
            named = {option[0] for option in options(own)}
            kept = [option for option in options(other[2:]) if option[0] not in named]
            return [*head, *(word for option in kept for word in option), *own]
    raise AssertionError(f"nothing stands for ... in {words}")


class Place:
    """The folder of inputs, and what runs beside it."""

    def __init__(self, root: Path, stack: contextlib.ExitStack):
        self.root, self.stack, self.count = root, stack, 0
        make_inputs(root)
        self.ids = identities(root)
        self.bin = root / "bin"
        self.bin.mkdir()

    def real(self, words: list[str], above: tuple[str, ...] = ()) -> list[str]:
        """The words with what is here in place of what stands for it."""
        self.count += 1
        for text, real in self.ids.items():
            words = [word.replace(text, real) for word in words]
        return real_words(spelt_out(words, above), self.root / f"out{self.count}")

    @cache  # noqa: B019
    def report(self, benchmark: str) -> str:
        """Written by the first command that writes it; the others go without, to save time."""
        return share_report(self.root / "lake", benchmark, anew=False)

    @cache  # noqa: B019
    def server(self, tests: str) -> str:
        """`novelty condda serve` on a free port; its address."""
        command = [sys.executable, "-m", "flows.cli", "condda", "serve", "--tests", tests]
        process = subprocess.Popen(
            [*command, "--port", "0"],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.stack.callback(process.wait, 30)
        self.stack.callback(process.send_signal, signal.SIGTERM)
        said = ""
        for line in process.stdout or ():
            said += line
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                return address[0]
        raise AssertionError(f"no server: {said}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("docs"), stack)


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(place.root)
    once = "flows.runner.share_report"
    monkeypatch.setattr(once, lambda lake, benchmark, anew: place.report(benchmark))
    return place


def run_shell(text: str, folder: Path, **more: str) -> str:
    """What bash prints; it knows this environment's programs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment |= {"PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | more
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def run_novelty(here: Place, words: list[str], above: tuple[str, ...] = ()) -> None:
    words = here.real(words, above)
    if words == ["iceberg"]:
        words += ["--lake", "old/lake"]  # of few tables
    if words[:2] == ["condda", "serve"]:
        here.server(words[words.index("--tests") + 1])
        return
    if words[0] == "build" and not {"--dry-run", "--help"} & set(words):
        words.append("--dry-run")
    words = [
        here.server("data/tests") if re.fullmatch(r"http://127\.0\.0\.1:\d+", word) else word
        for word in words
    ]
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        return
    checks_gpu = "--gpu" in words and "cpu" not in words
    if ("cuda" in words or checks_gpu) and not cuda_is_there():
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            assert main(words) == 2
        assert "torch sees no GPU" in said.getvalue()
        if checks_gpu:
            return
        words[words.index("cuda")] = "auto"
    assert main(words) in ((0, DIFFERS) if words[0] == "diff" else (0,)), shlex.join(words)


def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def run_make(here: Place, words: list[str]) -> None:
    """Variables are known; the `novelty` commands of builds are run, those of others parsed."""
    makefile = (ROOT / "Makefile").read_text()
    for name in [word.partition("=")[0] for word in words if "=" in word]:
        assert f"$({name})" in makefile, f"make knows no {name}"
    target = words[0]
    if target not in (*benchmarks(), "all", "publish"):
        said = run_shell(shlex.join(["make", "-n", *words]), ROOT)
        assert said
        for line in re.findall(r"^\S+/novelty (.*)", said, re.MULTILINE):
            _parser().parse_args(shlex.split(line))
        return
    calls = here.bin / "calls"
    calls.unlink(missing_ok=True)
    (here.bin / "novelty").write_text(f'#!/bin/bash\necho "${{@@Q}}" >> {calls}\n')
    (here.bin / "novelty").chmod(0o755)
    text = shlex.join(["make", "-f", str(ROOT / "Makefile"), "-o", "setup", f"BIN={here.bin}"])
    found = [word if "=/" not in word else _inside(word) for word in words]
    run_shell(f"{text} {shlex.join(found)}", here.root)
    called = [shlex.split(line) for line in calls.read_text().splitlines()]
    assert called
    for each in called:
        run_novelty(here, each)


def _inside(word: str) -> str:
    name, _, path = word.partition("=")
    return f"{name}={path.lstrip('/')}"


def run_pip(here: Place, words: list[str]) -> None:
    """Everything asked for is installed in the environment of the tests."""
    words = [str(ROOT / word) if word == "requirements.lock" else word for word in words]
    if "--editable" in words:
        words[-1] = str(here.root / "source")
        for name in ("flows", "schemas", "storage", "tasks", "docs"):
            shutil.copytree(ROOT / name, here.root / "source" / name, dirs_exist_ok=True)
        for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, here.root / "source")
    text = shlex.join([sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"])
    said = run_shell(f"{text} {shlex.join(words)}", here.root)
    assert "Requirement already satisfied" in said or "Would install novelty-pipeline" in said


def run_duckdb(here: Place, text: str) -> None:
    """By its own program if there is one, else by the library: the same SQL on the same file."""
    if shutil.which("duckdb"):
        assert run_shell(text, here.root)
        return
    import duckdb

    words = shlex.split(text)
    assert words[1:3] == ["-readonly", "-cmd"] and words[5] == "<"
    with duckdb.connect(words[4], read_only=True) as connection:
        connection.execute(words[3])
        assert connection.sql(Path(words[6]).read_text()).fetchall()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: f"{one.place} {one.text[:50]}")
def test_command(command: Command, here: Place, monkeypatch, request) -> None:
    if command.text in MARKED:
        file, words = MARKED[command.text]
        assert words in (ROOT / file).read_text()
        return
    given, words = split(command.text)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
        assert is_read(name), f"nothing reads {name}"
    assert given.get("NOVELTY_RUNNER", "local") in RUNNERS
    program, *rest = words
    if program in ("novelty", ".venv/bin/novelty") and not {"||", "<", ">"} & set(words):
        if any(word.startswith("s3://") for word in rest):
            rest = [
                word.replace("s3://bucket/prefix", request.getfixturevalue("bucket"))
                for word in rest
            ]
        run_novelty(here, rest, command.above)
    elif program == "novelty":
        text = " ".join(
            word if word in ("||", ">") else shlex.quote(word) for word in here.real(words)
        )
        assert "server: not running" in run_shell(text, here.root)
    elif program == "make":
        run_make(here, rest)
    elif program == "duckdb":
        run_duckdb(here, command.text)
    elif rest[:2] == ["-m", "venv"]:
        run_shell(f"{sys.executable} -m venv --without-pip {here.root / 'environment'}", here.root)
        assert (here.root / "environment" / "bin" / "python").exists()
    elif rest[:3] == ["-m", "pip", "install"]:
        run_pip(here, rest[3:])
    elif program == "grep":
        run_shell(
            command.text.replace("requirements.lock", str(ROOT / "requirements.lock")), here.root
        )
        assert "torch==" in (here.root / "constraints.txt").read_text()
    elif program == "export":
        for word in rest:
            assert is_read(word.partition("=")[0]), f"nothing reads {word}"
        run_shell(command.text, here.root)
    elif command.text == "source .venv/bin/activate":
        activate = Path(sys.executable).parent / "activate"
        assert run_shell(f"source {activate}; command -v novelty", here.root)
    else:
        pytest.fail(f"{command.place}: no rule of this test runs `{command.text}`")


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("semantic", "| airplane | 11.81"),
        ("semantic", "| energy | 18.2"),
        ("threedos", "| `view_backbone` | `fdbd`, chosen"),
        ("kowl", "| `frame_backbone`, `paper` |"),
    ],
)
def test_a_measured_table_has_its_build_or_says_that_it_was_not_kept(page: str, table: str) -> None:
    before, after = (ROOT / "docs" / f"{page}.md").read_text().split(table)
    beside = before[-500:] + after[:1800].partition("\n#")[0]
    assert "novelty build" in beside or "was the command" in beside


@pytest.mark.parametrize("page", ["semantic", "threedos", "novelcraft", "kowl"])
def test_a_benchmark_lists_what_still_differs(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert re.search(r"^#+ What still differs", text, re.MULTILINE)


ROWS = re.findall(
    r"^\| `novelty (.*?)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE
)
WHOLE = {
    "verify [table]": "verify",
    "path kowl[@s12]": "path kowl",
    'query "select …"': 'query "select 1"',
    "report": "report threedos",
    r"runs [list\|show\|compare\|drop]": "runs list",
    r"import outputs\|scores\|predictions FILE …": (
        "import scores FILE --benchmark threedos --protocol SN1 --name my_score"
    ),
    "fetch URL --sha256 …": "fetch {url} --sha256 {digest} --out DIR",
}
"""Rows of docs/commands.md that stand for several commands -> one of these."""


@pytest.mark.parametrize("row", ROWS)
def test_row_of_the_list_of_commands(row: str, here: Place) -> None:
    file = here.root / "mine.csv"
    text = WHOLE.get(row, row).format(url=file.as_uri(), digest=sha256_file(file))
    run_novelty(here, shlex.split(text))


def test_commands_within_sentences_have_names_and_options_that_exist() -> None:
    words = words_of(_parser())
    for benchmark in benchmarks():
        words |= words_of(build_parser(benchmark)[0], ("build", benchmark))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong, count = [], 0
    for path in DOCUMENTS:
        for program, text in re.findall(
            r"`(novelty|make) ([^`\n]+)`", FENCE.sub("", path.read_text())
        ):
            count += 1
            if program == "make":
                right = text.split()[0] in targets
            else:
                right = is_known(re.sub(r"[\[\]\\|]+", " ", text).split(), words)
            if not right:
                wrong.append(f"{path.name}: {program} {text}")
    assert not wrong and count > 100


def is_known(asked: list[str], words: dict[tuple[str, ...], list[str]]) -> bool:
    """Whether the command is there and has these options; COMMAND, <name>, … stand for any."""
    place: tuple[str, ...] = ()
    while asked and (*place, asked[0]) in words:
        place = (*place, asked.pop(0))
    if asked and re.match("[A-Z<…]", asked[0]) and place in ((), ("build",)):
        place, asked = ("build", "kowl"), asked[1:]
    options = [word for word in asked if word.startswith("--")]
    below = [word for word in words[place] if not word.startswith("--")]
    named = not (below and asked) or asked[0] in [*below, *options]
    return named and set(options) <= set(words[place])


@cache
def is_read(name: str) -> bool:
    """Whether the environment variable stands in our code."""
    files = [
        path
        for room in ("flows", "tasks", "storage", "schemas")
        for path in (ROOT / room).rglob("*.py")
    ]
    return any(name in path.read_text() for path in files)


@pytest.fixture(scope="module")
def bucket(place: Place) -> Iterator[str]:
    """A lake in a bucket of a server on loopback."""
    folder = place.root / "s3"
    folder.mkdir()
    write_raw(folder / "raw")
    with s3.rclone(folder) as url, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.settings(url, folder / "cache").items():
            patch.setenv(name, value)
        address = f"s3://{s3.BUCKET}/docs"
        build_toy(lake_root(address), folder / "raw")
        yield address


def test_few_commands_are_marked_and_all_of_them_are_in_the_documents() -> None:
    assert len(MARKED) <= 10
    assert set(MARKED) <= {command.text for command in COMMANDS}


def test_commands_are_found_and_put_together() -> None:
    text = "```\nnovelty a \\\n    --b c   # why\n# a comment\nmake d\n```\n\n```python\nx\n```\n"
    found = [(one.place, one.text, one.above) for one in commands_of(text, "x")]
    whole = "novelty a --b c"
    assert found == [("x:2", whole, ()), ("x:5", "make d", (whole,))]
    assert len(COMMANDS) > 120


def test_three_dots_stand_for_the_options_above() -> None:
    above = ("novelty build kowl --lists DIR --models none", "novelty build kowl ... --seeds 1")
    words = ["build", "kowl", "...", "--models", "x3d"]
    assert spelt_out(words, above) == [*["build", "kowl", "--lists", "DIR", "--models", "x3d"]]
    assert spelt_out(["build", "kowl", "..."], ()) == ["build", "kowl", "--lists", "DIR"]


def test_no_setting_of_the_machine_reaches_a_test() -> None:
    code = "import os, tests.conftest; print(*sorted(k for k in os.environ if k[:8] in P))"
    code = f"P = ('NOVELTY_', 'PREFECT_'); {code}"
    given = {"NOVELTY_LAKE": "/nowhere", "NOVELTY_RUNNER": "ray", "PREFECT_API_URL": "http://x/api"}
    said = run_shell(f"{sys.executable} -c {shlex.quote(code)}", ROOT, **given).split()
    assert set(said) - {"NOVELTY_SHARED"} == {"NOVELTY_BLENDER_PYTHON"}
