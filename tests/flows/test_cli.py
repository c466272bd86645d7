"""The command line: help is quick and complete, a mistake is one sentence and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[2]


def run(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flows.cli", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for command in (
        "build",
        "sample",
        "demo",
        "status",
        "verify",
        "restore",
        "lineage",
        "gc",
        "query",
        "doctor",
    ):
        assert command in printed


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
    config.write_text("a: [1\n")
    assert main(["build", "novelcraft", "--config", str(config)]) == 2
    assert "is not valid YAML" in capsys.readouterr().err


def test_unknown_option_is_code_two(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--nonsense"])
    assert ended.value.code == 2


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
