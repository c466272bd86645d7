"""Files of any model become runs: the numbers of the run they came from, and clear refusals."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.torch import save_file

from flows.cli import main
from flows.importing import conventions_of, import_file
from storage.catalog import open_catalog
from storage.snapshots import current_snapshot
from storage.tensors import read_tensors
from storage.upkeep import read_build_record
from tasks import scores
from tasks.evaluation.imports import Import
from tasks.operations.export_outputs import export_outputs
from tasks.report import write_report
from tests.evaluation.small_runs import build_small, write_raw
from tests.evaluation.test_runs import read

GUIDE = Path(__file__).parents[2] / "docs" / "importing.md"
PLACE = ["score_id", "split", "view", "phase", "step", "subset", "convention"]
HEAD_SCORES = {name for name in scores.names() if "head" in scores.find(name).needs}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with one trained run of each protocol, and its files."""
    folder = tmp_path_factory.mktemp("imports")
    write_raw(folder / "raw" / "samples.csv")
    build_small(folder / "lake", folder / "raw", scores={"all": {}}, draws=1000)
    run = trained(folder / "lake")
    for suffix in ("csv", "parquet", "npz"):
        words = ["export", "outputs", run[:8], str(folder / f"out.{suffix}")]
        head = ["--head", str(folder / "head.safetensors")]
        assert main([*words, *head, "--lake", str(folder / "lake")]) == 0
    return folder


def trained(lake: Path) -> str:
    return read(lake, "runs").filter(protocol="first", model="line")["run_id"][0]


def take(
    lake: Path, kind: str, file: Path, name: str, seed: int | None = None, head: Path | None = None
) -> str:
    """Import a file as the command does, without the report; the run."""
    return import_file(lake, Import(kind, file, "small", "first", name, seed, head))


def refused(lake: Path, kind: str, file: Path, name: str, *more: str) -> bool:
    """Whether the command ends with a sentence."""
    words = ["import", kind, str(file), "--name", name, "--lake", str(lake)]
    usual = {"--benchmark": "small", "--protocol": "first"}
    words += [word for pair in usual.items() if pair[0] not in more for word in pair]
    return main([*words, *more]) == 2


def numbers(lake: Path, table: str, key: list[str], **which: str) -> pl.DataFrame:
    rows = read(lake, table).filter(**which).drop("run_id", "model", "seed")
    return rows.sort(*PLACE, *key)


def same_numbers(lake: Path, run: str, name: str, without: set[str]) -> None:
    """All numbers of a run and of an imported one must be equal."""
    for table, key in (("metrics", ["metric"]), ("curves", ["curve", "point"])):
        ours = numbers(lake, table, key, run_id=run)
        theirs = numbers(lake, table, key, model=name)
        assert set(ours["score"]) - set(theirs["score"]) == without & set(ours["score"])
        assert theirs.height and theirs.equals(ours.filter(~pl.col("score").is_in(list(without))))
        if table == "metrics":
            assert theirs["low"].is_not_null().any(), "intervals are compared too"


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_an_exported_run_imported_again_gives_the_same_numbers(made: Path, suffix: str) -> None:
    lake, head = made / "lake", made / "head.safetensors"
    run = trained(lake)
    take(lake, "outputs", made / f"out.{suffix}", f"whole_{suffix}", head=head)
    same_numbers(lake, run, f"whole_{suffix}", set())
    imported = take(lake, "outputs", made / f"out.{suffix}", f"bare_{suffix}")
    same_numbers(lake, run, f"bare_{suffix}", HEAD_SCORES)
    predictions = read(lake, "predictions")
    ours, theirs = (
        predictions.filter(run_id=one).drop("run_id").sort("sample_id") for one in (run, imported)
    )
    assert ours.equals(theirs)


def test_a_plain_file_of_the_last_layer_is_enough(made: Path, tmp_path: Path) -> None:
    layer = read_tensors(made / "head.safetensors")
    assert set(layer) == {"weight", "bias"}
    save_file(layer, tmp_path / "plain.safetensors")
    head = tmp_path / "plain.safetensors"
    take(made / "lake", "outputs", made / "out.npz", "plain_head", head=head)
    same_numbers(made / "lake", trained(made / "lake"), "plain_head", set())


def test_the_guide_is_true(made: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Its blocks run one after the other; `my_model` gives what the trained run put out.

    The first command is run as it stands, the others without the report, to save time.
    """
    lake = made / "lake"
    outputs = read(lake, "outputs").filter(run_id=trained(lake))
    rows = {row["sample_id"]: row for row in outputs.iter_rows(named=True)}

    def my_model(samples: pl.Series) -> tuple[np.ndarray, np.ndarray]:
        chosen = [rows[name] for name in samples]
        return tuple(
            np.array([row[part] for row in chosen], np.float32) for part in ("logits", "features")
        )

    monkeypatch.chdir(tmp_path)
    (tmp_path / "lake").symlink_to(lake)
    monkeypatch.setenv("NOVELTY_LAKE", str(lake))
    text = GUIDE.read_text().replace("SN1", "first").replace("threedos", "small")
    space: dict[str, Any] = {"my_model": my_model}
    done = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(block, space)
        elif "FILE" not in block:
            _, command, kind, file, *options = shlex.split(block)
            asked = dict(zip(options[::2], options[1::2], strict=True))
            if done:
                assert command == "import" and asked.pop("--benchmark") == "small"
                assert asked.pop("--protocol") == "first"
                take(lake, kind, Path(file), asked.pop("--name"), int(asked.pop("--seed", 0)))
                assert not asked
            else:
                assert main([command, kind, file, *options]) == 0, block
            done.append(file)
    assert done == ["mine.csv", "mine.parquet", "mine.npz", "scores.csv", "guesses.parquet"]
    run = trained(lake)
    for name in ("in_parquet", "in_npz"):
        same_numbers(lake, run, name, HEAD_SCORES)
    learnt = {name for name in scores.names() if "features" in scores.find(name).needs}
    same_numbers(lake, run, "in_csv", HEAD_SCORES | learnt)
    assert "logits have no class names" in capsys.readouterr().err

    def auroc(**which: str) -> float:
        chosen = {"metric": "auroc", "split": "test", **which}
        return read(lake, "metrics").filter(**chosen)["value"].item()

    assert auroc(model="my_score", score="own") == auroc(run_id=run, score="mls")
    assert auroc(model="my_guess", score="own") == auroc(run_id=run, score="mls")
    accuracy = read(lake, "metrics").filter(metric="acc", split="test")
    assert accuracy.filter(model="my_guess")["value"].item() == 1.0
    assert accuracy.filter(model="my_score").is_empty(), "it names no class"
    guesses = read(lake, "predictions").join(
        read(lake, "runs").filter(model="my_guess"), on="run_id", how="semi"
    )
    assert guesses.height == 30 and guesses["p_unknown"].null_count() == 0


def test_without_train_samples_only_scores_of_logits_are_made(made: Path, tmp_path: Path) -> None:
    lake = made / "lake"
    tested = read(lake, "splits").filter(protocol="first", split="test")
    rows = pl.read_csv(made / "out.csv").join(tested, on="sample_id", how="semi")
    rows.select("sample_id", "logit:b", "logit:a").write_csv(tmp_path / "test.csv")
    take(lake, "outputs", tmp_path / "test.csv", "tested")
    ours = numbers(lake, "metrics", ["metric"], run_id=trained(lake), split="test")
    theirs = numbers(lake, "metrics", ["metric"], model="tested")
    of_logits = sorted(name for name in scores.names() if scores.find(name).needs == {"logits"})
    assert sorted(set(theirs["score"])) == of_logits and set(theirs["split"]) == {"test"}
    assert theirs.equals(ours.filter(pl.col("score").is_in(of_logits))), "by name, in any order"


def test_a_partial_file_is_taken_and_marked_if_that_is_said(made: Path, tmp_path: Path) -> None:
    lake = made / "lake"
    tested = read(lake, "splits").filter(protocol="first", split="test").head(20)
    some = tested.select("sample_id", score=(pl.col("role") == "novel").cast(pl.Float64))
    some.write_csv(tmp_path / "some.csv")
    assert refused(lake, "scores", tmp_path / "some.csv", "some")
    asked = Import("scores", tmp_path / "some.csv", "small", "first", "some", partial=True)
    run = import_file(lake, asked)
    assert read(lake, "metrics").filter(run_id=run, metric="auroc")["n"].to_list() == [20]
    with open_catalog(lake) as connection:
        rows = connection.sql("select * from lake.leaderboard where model = 'some'").pl()
    assert set(rows["detector"]) == {"some · own (partial=true)"}


def test_predictions_without_p_unknown(made: Path, tmp_path: Path) -> None:
    lake = made / "lake"
    tested = read(lake, "splits").filter(protocol="first", split="test")
    novel = pl.col("role") == "novel"
    called = tested.select(
        "sample_id",
        pl.when(novel).then(pl.lit("unknown_2")).otherwise("class").alias("predicted"),
        pl.when(novel).then(0.5).otherwise(0.9).alias("probability"),
    )
    called.write_parquet(tmp_path / "called.parquet")
    take(lake, "predictions", tmp_path / "called.parquet", "called")
    sure = called.with_columns(
        pl.when(pl.col("predicted") == "unknown_2")
        .then(pl.lit("a"))
        .otherwise("predicted")
        .alias("predicted")
    )
    sure.write_parquet(tmp_path / "sure.parquet")
    take(lake, "predictions", tmp_path / "sure.parquet", "sure")
    for name in ("called", "sure"):
        rows = read(lake, "metrics").filter(model=name, split="test")
        assert rows.filter(metric="auroc")["value"].item() == 1.0
        assert rows.filter(metric="acc")["value"].item() == 1.0


def test_it_stays_through_builds_and_goes_when_dropped(tmp_path: Path, capsys) -> None:
    write_raw(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", protocols=("first",))
    record = read_build_record(lake, "small")
    before = {name: read(lake, name) for name in ("runs", "metrics", "scores", "splits")}
    export_outputs(lake, trained(lake), tmp_path / "o.npz")
    run = take(lake, "outputs", tmp_path / "o.npz", "mine")
    assert read_build_record(lake, "small") == record, "the build's settings and sources stay"
    snapshot = current_snapshot(lake, "small")
    assert snapshot is not None and not snapshot.partial
    for name, rows in before.items():
        assert rows.join(read(lake, name), on=rows.columns, nulls_equal=True).height == rows.height
    capsys.readouterr()
    renamed = (tmp_path / "o.npz").rename(tmp_path / "renamed.npz")
    take(lake, "outputs", renamed, "mine")
    assert "import_outputs: 0 of 1 shards made" in capsys.readouterr().err, "the same file"

    build_small(lake, tmp_path / "raw", slopes=(5.0,), protocols=("first", "second"))
    tables = ("runs", "outputs", "scores", "metrics", "curves", "predictions")
    for table in tables:
        assert run in set(read(lake, table)["run_id"]), table
    assert main(["runs", "--lake", str(lake), "list"]) == 0
    assert "imported" in capsys.readouterr().out
    assert main(["runs", "--lake", str(lake), "show", run]) == 0
    assert '"kind": "outputs"' in capsys.readouterr().out
    assert main(["runs", "--lake", str(lake), "drop", run]) == 0
    for table in tables:
        assert run not in set(read(lake, table)["run_id"]), table
    take(lake, "outputs", renamed, "mine")
    assert run in set(read(lake, "metrics")["run_id"])

    write_raw(tmp_path / "raw" / "samples.csv", seed=1)
    build_small(lake, tmp_path / "raw", protocols=("first",))
    assert run not in set(read(lake, "runs")["run_id"]), "its rows are no longer those"


def test_seeds_are_one_detector_of_the_leaderboard(tmp_path: Path, capsys) -> None:
    write_raw(tmp_path / "raw" / "samples.csv")
    lake = tmp_path / "lake"
    build_small(lake, tmp_path / "raw", protocols=("first",))
    tested = read(lake, "splits").filter(protocol="first", split="test").sort("sample_id")
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0, 0.5, tested.height)
        value = (tested["role"] == "novel").cast(pl.Float64) + noise
        frame = pl.DataFrame({"sample_id": tested["sample_id"], "score": value})
        frame.write_csv(tmp_path / f"{seed}.csv")
        take(lake, "scores", tmp_path / f"{seed}.csv", "noisy", seed)
    with open_catalog(lake) as connection:
        rows = connection.sql(
            "select * from lake.leaderboard where model = 'noisy' and metric = 'auroc' "
            "and split = 'test' and protocol = 'first'"
        ).pl()
    values = read(lake, "metrics").filter(model="noisy", metric="auroc")
    (row,) = rows.iter_rows(named=True)
    assert (row["detector"], row["origin"], row["seeds"]) == ("noisy · own", "imported", 3)
    assert row["mean"] == pytest.approx(values["value"].mean())
    assert row["deviation"] == pytest.approx(values["value"].std())
    assert row["low"] == values["low"].min() and row["above_chance"] is True
    page = write_report(lake, "small").with_stem("index").read_text()
    assert f'noisy · own</td><td>none</td><td class="n two">{row["mean"]:.3f} ±' in page
    assert main(["leaderboard", "--lake", str(lake), "--metric", "fpr95"]) == 0
    assert "noisy · own" in capsys.readouterr().out
    assert refused(lake, "scores", tmp_path / "0.csv", "noisy", "--seed", "1")
    assert "is of another file; `novelty runs drop" in capsys.readouterr().err


# ---- refusals

Change = Callable[[pl.DataFrame], pl.DataFrame]


def bad_value(name: str, value: Any) -> Change:
    at = pl.int_range(pl.len()) == 3
    return lambda rows: rows.with_columns(pl.when(at).then(value).otherwise(name).alias(name))


def added(**columns: Any) -> Change:
    named = {name.replace("_", ":"): value for name, value in columns.items()}
    return lambda rows: rows.with_columns(
        pl.lit(value).alias(name) for name, value in named.items()
    )


def renamed(old: str, new: str) -> Change:
    return lambda rows: rows.rename({old: new})


REFUSED: dict[str, tuple[Change, str]] = {
    "unknown id": (
        bad_value("sample_id", pl.lit("nobody")),
        "1 samples are not in protocol first, the first is 'nobody'",
    ),
    "duplicate id": (
        lambda rows: pl.concat([rows, rows.head(1)]),
        "sample 's000' stands there more than once",
    ),
    "missing test ids": (
        lambda rows: rows.filter(pl.col("sample_id") > "s010"),
        "3 of 30 test samples of first are missing, the first is 's006'",
    ),
    "missing train id": (
        lambda rows: rows.filter(pl.col("sample_id") != "s000"),
        "1 of 20 train samples of first are missing, the first is 's000'; give all of them or none",
    ),
    "NaN": (
        bad_value("logit:a", float("nan")),
        "logits of sample 's004' (row 4) are not all finite float32 numbers",
    ),
    "too large": (bad_value("logit:a", 1e300), "logits of sample 's004' (row 4)"),
    "empty": (bad_value("feature:1", None), "features of sample 's004' (row 4)"),
    "text": (added(logit_a="x"), "column logit:a holds 'x', expected numbers"),
    "width": (
        added(logit_c=0.0),
        "has 3 logits a sample, protocol first has 2 known classes: a, b",
    ),
    "class": (
        renamed("logit:b", "logit:z"),
        "logits of class 'z', which is not known in first; known are: a, b",
    ),
    "feature": (renamed("feature:0", "feature:7"), "feature:0 is not there"),
    "no id": (renamed("sample_id", "id"), "has no column sample_id; it has id"),
    "nothing": (
        lambda rows: rows.select("sample_id"),
        "has no logits (logit:… in a CSV) or features",
    ),
    "view": (lambda rows: rows.with_columns(view=pl.lit("dark")), "no rows of the view plain"),
    "called": (added(predicted="q"), "is called 'q', which is no known class"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_file_is_one_sentence(
    made: Path, tmp_path: Path, capsys, change: Change, said: str
) -> None:
    change(pl.read_csv(made / "out.csv")).write_csv(tmp_path / "bad.csv")
    before = read(made / "lake", "runs")
    assert refused(made / "lake", "outputs", tmp_path / "bad.csv", "bad")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("novelty: ") and said in error
    assert read(made / "lake", "runs").equals(before)


def array(**arrays: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: given | arrays


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: {"logits": given["logits"]}, "has no array sample_id; it has logits"),
        (array(logits=np.zeros((3, 2))), "logits has shape (3, 2), expected (70, …)"),
        (array(novelty=np.zeros((70, 2))), "novelty has shape (70, 2), expected (70,)"),
        (array(logits=np.full((70, 2), "x")), "expected numbers"),
        (array(classes=["a"]), "protocol first has 2 known classes: a, b"),
        (array(classes=["a", "a"]), "names a class of its logits twice"),
        (array(features=np.array([{}] * 70)), "is no npz of plain arrays"),
        (array(features=np.zeros((70, 0))), "features of sample 's000' have no numbers"),
        (array(novelty=np.zeros(70), score=np.zeros(70)), "has both score and novelty"),
        (lambda given: {name: array[:0] for name, array in given.items()}, "has no rows"),
    ],
)
def test_a_wrong_npz_is_one_sentence(made: Path, tmp_path: Path, capsys, change, said) -> None:
    with np.load(made / "out.npz") as file:
        np.savez(tmp_path / "bad.npz", **change({name: file[name] for name in file.files}))
    assert refused(made / "lake", "outputs", tmp_path / "bad.npz", "bad")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bad.npz", "bad.parquet", "bad.csv"])
@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04 and more", b"\x93NUMPY\x01\x00", bytes(range(256))]
)
def test_a_file_of_other_bytes_is_one_sentence(
    made: Path, tmp_path: Path, capsys, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    assert refused(made / "lake", "outputs", tmp_path / name, "bad")
    assert f"novelty: {name}" in capsys.readouterr().err


def test_lists_of_other_widths_are_refused(made: Path, tmp_path: Path, capsys) -> None:
    rows = pl.read_parquet(made / "out.parquet")
    short = pl.Series([[0.5], *rows["features"].to_list()[1:]], dtype=pl.List(pl.Float32))
    rows.with_columns(short.alias("features")).write_parquet(tmp_path / "bad.parquet")
    assert refused(made / "lake", "outputs", tmp_path / "bad.parquet", "bad")
    assert (
        "features of sample 's001' have 2 numbers, those of 's000' have 1"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sample_id": pl.concat_list("sample_id")}, "column sample_id is List(String), expected"),
        ({"sample_id": pl.lit(b"\xff\xfe")}, "column sample_id is Binary, expected text"),
        ({"predicted": pl.struct("sample_id")}, "column predicted is Struct"),
        ({"novelty": pl.concat_list(pl.lit(0.5))}, "column novelty is List(Float64), expected num"),
        ({"logits": pl.struct("sample_id")}, "column logits is Struct"),
    ],
)
def test_columns_of_other_kinds_are_refused(
    made: Path, tmp_path: Path, capsys, change: dict[str, pl.Expr], said: str
) -> None:
    rows = pl.read_parquet(made / "out.parquet")
    if "logits" in change:
        rows = rows.drop(pl.selectors.starts_with("logit:"))
    rows.with_columns(**change).write_parquet(tmp_path / "bad.parquet")
    assert refused(made / "lake", "outputs", tmp_path / "bad.parquet", "bad")
    assert f"novelty: bad.parquet: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["outputs", "out.csv", "mine", "--protocol", "frist"],
            "small has no protocol 'frist'; there are: first, second; did you mean first?",
        ),
        (["outputs", "out.csv", "ndcc"], "ndcc is the name of a plug-in"),
        (["outputs", "out.csv", "evm"], "evm is the name of a plug-in"),
        (["outputs", "out.csv", "line"], "line is a model of small; choose another"),
        (["outputs", "out.csv", "a/b"], "--name is 'a/b', expected letters"),
        (["outputs", "gone.csv", "mine"], "gone.csv does not exist"),
        (["outputs", "out.csv", "mine", "--seed", "-1"], "--seed is -1, expected 0 to 2147483647"),
        (["outputs", "head.safetensors", "mine"], "a file of .csv, .csv.gz, .parquet"),
        (["outputs", "out.csv", "mine", "--head", "out.csv"], "out.csv"),
        (["scores", "out.csv", "mine"], "has no novelty, which a file of scores has"),
        (["predictions", "out.csv", "mine"], "has no predicted, which a file of predictions has"),
    ],
)
def test_a_wrong_choice_is_one_sentence(made: Path, capsys, words: list[str], said: str) -> None:
    kind, file, name, *more = words
    more = [str(made / word) if word.endswith(".csv") else word for word in more]
    assert refused(made / "lake", kind, made / file, name, *more)
    assert said in capsys.readouterr().err


def test_a_benchmark_that_is_not_there(made: Path, capsys) -> None:
    words = ("--benchmark", "kowl")
    assert refused(made / "lake", "outputs", made / "out.csv", "mine", *words)
    assert "no tables of 'kowl' in" in capsys.readouterr().err
    assert refused(made / "lake", "outputs", made / "out.csv", "mine", "--benchmark", "smal")
    assert "there are: small; did you mean small?" in capsys.readouterr().err


def test_features_without_train_samples_fit_no_score(made: Path, tmp_path: Path, capsys) -> None:
    tested = read(made / "lake", "splits").filter(protocol="first", split="test")
    rows = pl.read_parquet(made / "out.parquet").join(tested, on="sample_id", how="semi")
    rows.select("sample_id", "features").write_parquet(tmp_path / "f.parquet")
    assert refused(made / "lake", "outputs", tmp_path / "f.parquet", "mine")
    assert "features need the train samples of first" in capsys.readouterr().err


def test_conventions_are_those_of_the_benchmark() -> None:
    assert conventions_of("novelcraft", "visual")[0] == "novelcraft-2022"
    assert conventions_of("kowl", "any") == ("openood",)
    assert conventions_of("small", "first") == ("openood",)
    assert {"threedos", "openood"} <= set(conventions_of("threedos", "SN1"))
