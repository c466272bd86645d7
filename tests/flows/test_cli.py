"""The command line: help is quick and complete, a mistake is one sentence and exit code 2."""

import argparse
import errno
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import GROUPS, _parser, benchmarks, build_parser, main
from flows.cli import tests_parser as parser_of_tests
from schemas.errors import ConfigError, RecordError
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]


def run(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flows.cli", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_command_with_the_essentials_first(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    groups = [line.rstrip(":") for line in printed.splitlines() if line.endswith(":")]
    assert groups == list(GROUPS)  # nothing is left over for `more`
    listed = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(_parser().commands())


def test_help_of_a_build_has_the_sources_first_and_nested_settings_in_groups(capsys):
    with pytest.raises(SystemExit):
        main(["build", "novelcraft", "--help"])
    printed = capsys.readouterr().out
    places = [printed.index(f"\n{title}:\n") for title in ("essentials", "more", "render")]
    assert places == sorted(places)
    options = [line.split()[0] for line in printed.splitlines() if line.startswith("  --")]
    assert options.index("--source") < options.index("--models") < options.index("--targets-csv")
    assert "--render.samples" in options


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from flows.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "bad = {'prefect', 'torch', 'bpy', 'open3d', 'cv2', 'decord'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "nonsense"], "unknown benchmark 'nonsense'; there are:"),
        (["build", "novelcraft"], "source: field required"),
        (
            ["build", "novelcraft", "--source", "/nowhere/at/all"],
            "source: /nowhere/at/all does not exist",
        ),
        (["build", "novelcraft", "--source", ".", "--splits.seed", "x"], "splits.seed:"),
        (
            ["build", "novelcraft", "--config", "/nowhere.yaml"],
            "cannot read the config /nowhere.yaml",
        ),
        (["status", "--lake", "/nowhere/lake"], "there is no lake at /nowhere/lake"),
        (["verify", "novelcraft/frames", "--lake", "/nowhere"], "there is no lake"),
        (["lineage", "frames", "--lake", "/nowhere"], "write benchmark/table"),
        (["sample", "--only", "nonsense"], "no sample data for nonsense; there are:"),
        (["build", "novelcarft"], "did you mean novelcraft?"),
        (["build", "kowl", "--source", "x"], "of another benchmark; kowl has --lists, --videos"),
        (["models", "ndc"], "did you mean ndcc?"),
        (["scores", "neares"], "did you mean nearest?"),
        (["sample", "--only", "novelcarft"], "did you mean novelcraft?"),
        (
            ["build", "semantic", "--source", "cifar10=.", "--novel", "x"],
            "novelty: wrong settings: known and novel go together: name a known set and novel ones",
        ),
        (["sample", "--out", "/dev/null"], "/dev/null is no folder; name another with --out"),
        (["sample", "--out", "/dev/null/x"], "/dev/null/x is no folder; name another with --out"),
        (["sample", "--out", "/proc/x"], "/proc/x is no folder; name another with --out"),
    ],
)
def test_mistakes_are_one_sentence(capsys, words, said):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err and captured.err.count("\n") <= 2


def test_unreadable_config_and_unknown_key(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("source: .\nnonsense: 1\n")
    assert main(["build", "novelcraft", "--config", str(config)]) == 2
    assert "nonsense is not a setting (there are:" in capsys.readouterr().err
    config.write_text("source: .\nrender: {sample: 2}\n")
    assert main(["build", "novelcraft", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "render.sample is not a setting (there are: " in said and "did you mean samples?" in said
    config.write_text("source: .\nsplits: [1\nseed: 2\n")
    assert main(["build", "novelcraft", "--config", str(config)]) == 2
    assert capsys.readouterr().err == (
        f"novelty: config {config} is not valid YAML: line 3, column 5: expected ',' or ']', but "
        "got ':' (what it belongs to begins in line 2)\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "--lak", "x", "--nonsense"], "--nonsense is not known here; see"),
        (["gc", "--yse"], "--yse is not known here; did you mean --yes?; see `novelty gc --help`"),
        (["status", "--check"], "--check is not known here; see `novelty status --help`"),
        (["statsu"], "unknown command 'statsu'; did you mean status?"),
        (["novelcraft", "redner"], "unknown command 'redner'; did you mean render?"),
        (["build", "kowl", "--list", "x", "--vidoes", "y"], "did you mean --videos?"),
        (["service", "strat"], "unknown action 'strat'; did you mean start?"),
        (["completion", "powershell"], "there are: bash, zsh, fish"),
        (["diff"], "the following arguments are required: before"),
        (["gc", "--grace", "day"], "argument --grace: 'day' is no number of hours; see"),
        (["gc", "--grace=--"], "argument --grace: expected one argument; see"),
        (["gc", "--keep", "0"], "argument --keep: '0' is no whole number from 1 on; see"),
        (["sample", "--seed", "x"], "argument --seed: 'x' is no whole number from 0 on; see"),
        (["diff", "a/b", "--examples", "-1"], "argument --examples: '-1' is no whole number from"),
        (["condda", "serve", "--tests", ".", "--port", "70000"], "argument --port: '70000' is no"),
        (["condda", "retire", "--days", "soon"], "argument --days: 'soon' is no number of days"),
        (
            ["leaderboard", "--metric", "auroc", "--metric", "fpr95"],
            "novelty: --metric is given twice; it takes one value; see `novelty leaderboard",
        ),
        (["leaderboard", "--benchmark", "a", "--benchmark=b"], "--benchmark is given twice; it"),
        (["import", "outputs", "f", "--seed", "1", "--seed", "1"], "--seed is given twice; it"),
        (["build", "novelcraft", "--splits.seed", "1", "--splits.seed", "2"], "--splits.seed is"),
        (["publish", "a", "b", "--licence", "c", "--license", "d"], "--licence or --license is"),
        (["novelcraft", "render", "a", "--out", "b", "--ou", "c"], "--out is given twice; it"),
        (["condda", "make-tests", "kowl", "--out", "b", "--out", "c"], "--out is given twice; it"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_one_meant(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.startswith("novelty: ") and printed.count("\n") == 1


def test_every_option_of_one_value_is_refused_twice(capsys):
    """Of every command and every build; `--x` with `--no-x` is twice as well."""
    parsers = [_parser(), parser_of_tests(), *(build_parser(name)[0] for name in benchmarks())]
    kinds = set()
    while parsers:
        parser = parsers.pop()
        parsers += parser.commands().values()
        for action in parser._actions:
            names = action.option_strings
            switch = isinstance(action, argparse.BooleanOptionalAction)
            gathers = isinstance(action, argparse._AppendAction)
            if not names or gathers or (action.nargs == 0 and not switch):
                continue
            value = [] if switch else [str(next(iter(action.choices or "1")))]
            with pytest.raises(SystemExit):
                parser.parse_args([names[0], *value, names[-1], *value])
            said = f"{' or '.join(names)} is given twice; it takes one value"
            assert said in capsys.readouterr().err, parser.prog
            kinds.add(switch)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("render states --novel 'a b' --out x", "novelty novelcraft render states --novel 'a b'"),
        ("masks --out x", "novelty novelcraft masks --out x"),
        ("drift a b", "novelty novelcraft drift a b"),
        ("export lerobot --out x", "novelty novelcraft lerobot --out x"),
        ("list-drift a b", "novelty kowl list-drift a b"),
        ("serve condda --tests t", "novelty condda serve --tests t"),
        ("run condda --tests t", "novelty condda run --tests t"),
        ("make-tests kowl --out x", "novelty condda make-tests kowl --out x"),
    ],
)
def test_an_old_name_prints_the_command_of_today(capsys, words, now):
    assert main(shlex.split(words)) == 2
    printed = capsys.readouterr().err
    assert now in printed and printed.count("\n") == 1


def test_what_only_an_evaluation_has_is_refused_as_published(tmp_path, capsys):
    words = ["condda", "serve", "--tests", str(tmp_path), "--state", str(tmp_path / "state")]
    for option in (["--red-light"], ["--round-size", "8"], ["--attempts", "2"]):
        assert main([*words, *option]) == 2
        assert f"{option[0]} is of an evaluation; add --policy" in capsys.readouterr().err
    (tmp_path / "tokens").write_text("agent alice a-token-that-is-long-enough\n")
    tokens = ["--tokens", str(tmp_path / "tokens")]
    assert main([*words, *tokens, "--round-size", "0"]) == 2
    assert "round_size" in capsys.readouterr().err
    assert main([*words, *tokens, "--policy", "published"]) == 2
    assert "published tells agents ground truth" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_a_lake_without_tables_is_a_sentence(tmp_path, capsys):
    for words in (["query", "select 1"], ["report"], ["report", "kowl"]):
        assert main([*words, "--lake", str(tmp_path)]) == 2
        assert f"there are no tables in {tmp_path} yet; build some" in capsys.readouterr().err
    assert main(["status", "kwol", "--lake", str(tmp_path)]) == 2
    assert f"there is no table of kwol in {tmp_path}; it is empty" in capsys.readouterr().err


BASH = """
eval "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2))
_novelty; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "given", "not_given"),
    [
        (["st"], ["status"], ["build"]),
        (["novelcraft", ""], ["render", "masks", "drift", "lerobot"], ["list-drift"]),
        (["build", ""], ["kowl", "threedos"], ["--lake"]),
        (["build", "kowl", "--novel-c"], ["--novel-class-order"], ["--lists"]),
        (["build", "kowl", "--lake", "x", "--group-size", ""], ["ceil", "floor"], ["--lists"]),
        (["condda", "make-tests", "--pro"], ["--protocol"], []),
        (["service", "sta"], ["start", "status"], ["stop"]),
    ],
)
def test_bash_completes(capsys, words, given, not_given):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    command = ["bash", "-uc", BASH, "bash", script, "novelty", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    replies = done.stdout.split()
    assert set(given) <= set(replies) and not set(not_given) & set(replies)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "build kowl" in script and "--novel-class-order" in script
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"there is no {shell} here that could read its script")
    subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_lake_commands(tmp_path, capsys):
    write_raw(tmp_path / "raw")
    lake = str(tmp_path / "lake")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    assert main(["status", "--lake", lake]) == 0
    assert "4 tables" in capsys.readouterr().out
    assert main(["verify", "--lake", lake]) == 0
    assert main(["lineage", "toy/totals", "--lake", lake]) == 0
    assert "6 raw files under" in capsys.readouterr().out
    assert main(["query", "select count(*) as n from toy.readings", "--lake", lake]) == 0
    assert "117" in capsys.readouterr().out
    assert main(["query", "select nonsense", "--lake", lake]) == 2
    (part, *_) = sorted((tmp_path / "lake" / "toy" / "totals" / "current").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert main(["verify", "toy/totals", "--lake", lake]) == 2
    assert str(part.resolve().name) in capsys.readouterr().out
    assert main(["verify", "--drop", "--lake", lake]) == 2
    capsys.readouterr()
    assert main(["restore", "--lake", lake]) == 0
    removal, *said = capsys.readouterr().out.split()
    assert any(word.startswith("toy/totals/versions/") for word in said)
    assert main(["restore", removal, "--lake", lake]) == 2  # it is as damaged as it was
    assert "has sha256" in capsys.readouterr().err
    assert main(["verify", "toy/totals", "--lake", lake]) == 2
    assert main(["verify", "--drop", "--lake", lake]) == 2
    assert main(["restore", "nonsense", "--lake", lake]) == 2
    build_toy(tmp_path / "lake", tmp_path / "raw")
    assert main(["verify", "--lake", lake]) == 0
    assert main(["gc", "--lake", lake]) == 0


def test_doctor_says_what_it_found(capsys):
    code = main(["doctor"])
    printed = capsys.readouterr().out
    assert "Python 3.11" in printed and "GPU" in printed
    assert (code == 2) == ("BAD" in printed)


def test_options_become_settings(tmp_path):
    import argparse

    from flows.options import add_options, chosen_values
    from schemas.novelcraft import Config

    config = tmp_path / "c.yaml"
    config.write_text(f"source: {tmp_path}\nsplits: {{seed: 1, permutations: 3}}\n")
    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    words = f"--config {config} --splits.seed 7 --models a,b --models c".split()
    words += ["--splits.roles", "my_class=novel_test", "--render.scene-maps"]
    chosen = chosen_values(parser.parse_args(words), Config)
    assert (chosen.splits.seed, chosen.splits.permutations) == (7, 3)
    assert chosen.models == {"a": {}, "b": {}, "c": {}}
    assert chosen.splits.roles == {"my_class": "novel_test"}
    assert chosen.render.scene_maps and chosen.source == tmp_path


BOMB = [(n, f"n{n - 1}" if n else "a") for n in range(40)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 5000, "nested too deeply"),
        ("seed: 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
        ("seed: " + "9" * 6000, "is not valid YAML: Exceeds the limit"),
        ("seed: !!python/object:os.system 1\n", "is not valid YAML"),
        ("seed: !!timestamp x\n", "is not valid YAML"),
        ("seed: !!bool x\n", "is not valid YAML"),
        ("a: &a [*a]\n", "holds more than"),
        (
            "a: &a [x, x]\n" + "".join(f"{n}: &n{n} [*{b}, *{b}]\n" for n, b in BOMB),
            "holds more than 1,000,000 values",
        ),
    ],
    ids=["deep", "date", "digits", "tag", "timestamp", "bool", "itself", "bomb"],
)
def test_odd_yaml_is_one_sentence(tmp_path, capsys, text, said):
    (tmp_path / "odd.yaml").write_text(text)
    words = ["build", "novelcraft", "--source", ".", "--config", str(tmp_path / "odd.yaml")]
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_odd_addresses_are_one_sentence_and_show_no_password(tmp_path, capsys, monkeypatch):
    assert main(["fetch", "http://[::1", "--out", str(tmp_path)]) == 2
    assert "http://[::1 is no address" in capsys.readouterr().err
    assert main(["fetch", "ftp://me:hidden@host/x.zip", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "ftp://…@host/x.zip: scheme 'ftp'" in said and "hidden" not in said
    from tasks.condda.server.client import HttpHarness

    for url in ("http://[::1", "http://", "3307"):
        with pytest.raises(ConfigError, match="is no URL such as"):
            HttpHarness(url)


def test_a_disk_that_fails_is_one_sentence(tmp_path, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error", "/data/raw/x.json")

    monkeypatch.setattr("tasks.sample.write.write_sample", fail)
    assert main(["sample", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("novelty: /data/raw/x.json cannot be read (Input/output error); look at")


@pytest.mark.parametrize("hours", ["nan", "1e400", "-inf"])
def test_a_grace_time_without_end_is_one_sentence(capsys, hours):
    with pytest.raises(SystemExit) as stop:
        main(["gc", f"--grace={hours}"])
    assert stop.value.code == 2
    assert f"argument --grace: '{hours}' is no number of hours" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", "1.5", "²"])
def test_a_number_of_snapshots_to_keep_is_no_other_number(capsys, number):
    with pytest.raises(SystemExit) as stop:
        main(["gc", f"--keep={number}"])
    assert stop.value.code == 2
    assert f"argument --keep: '{number}' is no whole number from 1 on" in capsys.readouterr().err


def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "/lake/x/_manifest.json")

    monkeypatch.setattr("tasks.sample.write.write_sample", fail)
    assert main(["sample", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "novelty: /lake/x/_manifest.json: Permission denied; mend its permissions, then run "
        "the same command\n"
    )


def test_messages_of_records_show_no_password():
    error = RecordError("unreadable", "https://me:hidden@host/x is gone")
    assert str(error) == error.message == "https://…@host/x is gone"
