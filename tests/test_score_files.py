"""`novelty evaluate`: any file of scores, the paper's numbers from the shared ones."""

import csv

import polars as pl
import pytest

from flows.cli import main
from schemas.errors import ConfigError
from tasks.operations.score_files import evaluate_file, truth_of
from tests.shared import shared_path


def test_tables_of_the_paper_from_the_shared_scores():
    scores = shared_path("novelcraft/scores/visual_test_scores.csv")
    expected = {
        row["method"]: row
        for row in csv.DictReader(shared_path("novelcraft/expected/table2_recomputed.csv").open())
        if row["paper_auroc"]
    }
    methods = ["odin", "deep_ensemble", "ocsvm", "ae_patch"]
    found = evaluate_file(scores, methods, "novel_true", "novelcraft-2022")
    names = {"auroc": "auroc", "aupr": "auprc", "tnr_at_tpr95": "tnr_at_tpr95"}
    names |= {"ppv_at_tpr95": "ppv_at_tpr95", "tnr_at_ppv80": "tnr_at_ppv80"}
    names |= {"tpr_at_ppv80": "tpr_at_ppv80"}
    for row in found.filter(pl.col("metric").is_in(list(names))).iter_rows(named=True):
        paper = expected[row["score"]][f"paper_{names[row['metric']]}"]
        value = None if row["value"] is None else round(100 * row["value"], 2)
        assert value == (float(paper) if paper else None), row


def test_command_writes_tables_and_a_plot(tmp_path, capsys):
    rows = pl.DataFrame({"s": [0.1, 0.4, 0.35, 0.8], "t": ["normal", "normal", "novel", "novel"]})
    rows.write_parquet(tmp_path / "scores.parquet")
    out = tmp_path / "out"
    words = ["evaluate", str(tmp_path / "scores.parquet"), "--score", "s", "--truth", "t"]
    words += ["--weight", "normal=0.75", "--convention", "semantic", "--out", str(out)]
    assert main(words) == 0
    assert "auroc" in capsys.readouterr().out
    metrics = dict(pl.read_parquet(out / "metrics.parquet").select("metric", "value").iter_rows())
    assert metrics["auroc"] == 0.75 and metrics["skew"] == 0.25
    assert set(pl.read_parquet(out / "curves.parquet")["curve"]) == {"roc", "pr"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--score", "x", "--truth", "t"], "has no column 'x'; there are: s, t"),
        (["--score", "s", "--truth", "t", "--convention", "x"], "expected one of novelcraft-2022"),
        (["--score", "s", "--truth", "t", "--weight", "x=1"], "expected normal=SHARE"),
        (["--score", "s", "--truth", "s"], "expected 0/1"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, words, said):
    pl.DataFrame({"s": [0.1, 0.4], "t": [0, 1]}).write_csv(tmp_path / "scores.csv")
    assert main(["evaluate", str(tmp_path / "scores.csv"), *words]) == 2
    assert said in capsys.readouterr().err


def test_truth_in_many_spellings():
    for values in ([0, 1], [False, True], ["normal", "Novel"], [0.0, 1.0], ["false", "TRUE"]):
        assert truth_of(pl.Series("t", values)).to_list() == [False, True]
    with pytest.raises(ConfigError, match="row 2 is None"):
        truth_of(pl.Series("t", [0, None]))
