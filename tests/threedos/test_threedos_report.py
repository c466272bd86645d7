"""Tables laid out like the paper's, its numbers beside ours."""

import re

import polars as pl
import pytest

from tasks.threedos.paper_report import PAPER, TABLES, _beside, _density, _ours
from tests.shared import shared_path

SYNTHETIC = TABLES["Synthetic, ShapeNet (Table 1)"]
# The paper's names of a score on a trained network.
NAMES = {
    "MSP": ("cross_entropy", "msp"),
    "MLS": ("cross_entropy", "mls"),
    "ODIN": ("cross_entropy", "odin_without_step"),
    "Energy": ("cross_entropy", "energy"),
    "GradNorm": ("cross_entropy", "gradnorm"),
    "ReAct": ("cross_entropy", "react"),
    "CE (L2)": ("cross_entropy", "nearest"),
    "Cosine proto": ("cosine_proto", "mls"),
    "SubArcface": ("subcenter_arcface", "cosine"),
    "SubArcFace": ("subcenter_arcface", "cosine"),
    "SupCon": ("supcon", "cosine"),
    "ARPL+CS": ("arpl", "mls"),
    "OE+mixup": ("outlier_exposure", "msp"),
    "NF": ("flow", "own"),
    "VAE": ("vae", "own"),
}
# Table 4 is by the unknown set.
REAL = {"SR1": "SR23", "SR2": "SR13", "SR3": "SR12"}


def ours(
    tracks: tuple[str, ...], changed: str = "{}", points: int = 1024, scans: str = "null"
) -> pl.DataFrame:
    places = [(n, track, seed) for n, track in enumerate(tracks) for seed in (1, 3)]
    metrics = pl.DataFrame(
        [
            (f"{track}{seed}", track, split, subset, metric, value + seed / 100 + n / 10)
            for n, track, seed in places
            for metric, value in (("auroc", 0.5), ("fpr95", 0.2))
            for split, subset in (("test", "all"), ("test", "SN2"), ("valid", "all"))
        ],
        ["run_id", "protocol", "split", "subset", "metric", "value"],
        orient="row",
    ).with_columns(
        model=pl.lit("cross_entropy"),
        score=pl.lit("msp"),
        score_id=pl.lit("s"),
        view=pl.lit("plain"),
        convention=pl.lit("threedos"),
    )
    runs = pl.DataFrame({"run_id": [f"{track}{seed}" for _, track, seed in places]}).with_columns(
        network=pl.lit("dgcnn"),
        preset=pl.lit("paper"),
        changed=pl.lit(changed),
        settings=pl.lit(f'{{"points": {points}, "scan_points": {scans}}}'),
        config_id=pl.lit(f"c{changed}"),
        versions=pl.lit("{}"),
        precision=pl.lit("float32"),
    )
    return _ours(metrics, runs)


def test_every_number_of_the_paper_is_there() -> None:
    expected = pl.read_csv(shared_path("shapes/expected/paper_results.csv"))
    rows = pl.read_csv(PAPER).rows(named=True)
    paper = {row["network"] + row["method"] + row["score"]: row for row in rows}
    compared = 0
    for row in expected.filter(pl.col("set") != "avg").iter_rows(named=True):
        method, score = NAMES[row["method"]]
        network = {"DGCNN": "dgcnn", "PointNet++": "pointnet2"}.get(row["backbone"], "none")
        found = paper["none" + method + score if method == "vae" else network + method + score]
        track = REAL[row["set"]] if row["track"] == "real-to-real" else row["set"]
        assert found[f"{track}_auroc"] == row["auroc"], row
        assert found[f"{track}_fpr95"] == row["fpr95"], row
        compared += 1
    assert compared == sum(
        row[name] is not None for row in paper.values() for name in row if name.endswith("_auroc")
    )


def test_averages_stand_last_as_in_the_paper() -> None:
    wide = _beside(ours(SYNTHETIC), SYNTHETIC)
    (row,) = wide.rows(named=True)
    assert row["SN1 AUROC"] == "52.0 ± 1.4" and row["SN1 AUROC paper"] == 74.0
    assert (row["average AUROC"], row["average FPR95"]) == ("62.0", "32.0")
    expected = pl.read_csv(shared_path("shapes/expected/paper_results.csv"))
    printed = expected.filter(track="synthetic", backbone="DGCNN", method="MSP", set="avg")
    assert row["average AUROC paper"] == pytest.approx(printed["auroc"][0], abs=0.1)
    assert row["average FPR95 paper"] == pytest.approx(printed["fpr95"][0], abs=0.1)
    assert wide.columns[-1] == "average FPR95 paper"


def test_no_average_of_some_of_the_tracks() -> None:
    wide = _beside(ours(SYNTHETIC[:2]), SYNTHETIC)
    assert not [name for name in wide.columns if name.startswith("average")]


def test_variants_stand_side_by_side_and_the_paper_s_numbers_beside_its_own_settings() -> None:
    smoothed, fewer, longer = '{"smoothing": 0.1}', '{"points": 512}', '{"epochs": 300}'
    every = pl.concat(ours(SYNTHETIC, changed) for changed in ("{}", smoothed, fewer, longer))
    wide = _beside(every, SYNTHETIC)
    rows = {row["changed"]: row for row in wide.rows(named=True)}
    assert rows.keys() == {"{}", smoothed, fewer, longer}
    for name in ("SN1 AUROC paper", "SN3 FPR95 paper", "average AUROC paper"):
        assert rows["{}"][name] == rows[longer][name] is not None
        assert rows[smoothed][name] is None and rows[fewer][name] is None
    assert {row["SN1 AUROC"] for row in rows.values()} == {"52.0 ± 1.4"}


def test_densities_of_training_stand_side_by_side() -> None:
    assert _density(ours(("SN1",))) is None
    changed = {512: '{"points": 512, "scan_points": 512}', 1024: '{"scan_points": 1024}'}
    swept = [ours(("SR1",), text, n, str(n)) for n, text in changed.items()]
    every = pl.concat([ours(("SR1",), scans="2048"), *swept])
    section = _density(every)
    assert section is not None
    text = " ".join(str(part) for part in section.parts)
    assert "trained and tested" in text and "same networks" not in text
    heads = re.findall(r"<th[^>]*>(\d[^<]*)</th>", text)
    assert heads == ["512", "1024", "1024 (scans 2048)"]
    assert text.count("cross_entropy") == 1
