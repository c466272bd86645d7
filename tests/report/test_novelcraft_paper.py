"""NovelCraft's detectors beside the paper's Tables 2 and 3."""

import polars as pl
import pytest

from tasks.novelcraft.detection_report import SYMBOLIC, VISUAL, beside, section
from tests.report.reading import read_of
from tests.shared import shared_path


def rows(detector: str, backbone: str, seed: int, layout, values: dict[str, float | None]):
    return [
        {
            "protocol": layout.protocol,
            "detector": detector,
            "backbone": backbone,
            "seed": seed,
            "split": "test",
            "convention": layout.convention,
            "metric": metric,
            "value": value,
        }
        for metric, value in values.items()
    ]


def test_ours_first_then_what_only_the_paper_has():
    made = rows("odin", "small", 0, VISUAL, {"auroc": 0.5, "tnr_at_tpr95": None})
    made += rows("odin", "small", 1, VISUAL, {"auroc": 0.7})
    made += rows("colour_rarity", "small", 0, VISUAL, {"auroc": 0.9, "aupr": 0.25})
    wide = beside(pl.DataFrame(made), VISUAL)
    assert wide is not None and wide.height == 7
    assert wide["detector"].to_list()[:3] == ["colour_rarity", "odin", "autoencoder_full"]
    ours = wide.row(1, named=True)
    assert ours["AUROC here"] == "60.00 ± 14.14" and ours["AUROC paper"] == "65.54"
    assert ours["seeds"] == 2 and ours["TNR at TPR 95 here"] is None
    assert wide.row(0, named=True)["AUPRC here"] == "25.00"
    assert wide.row(0, named=True)["AUROC paper"] is None
    assert wide["AUROC paper"].drop_nulls().len() == 6


def test_symbolic_runs_are_told_apart_by_their_order():
    made = rows("symbolic_mlp", "small,order=10", 0, SYMBOLIC, {"auroc": 0.5})
    read = read_of({"metrics": pl.DataFrame(made)})
    wide = beside(pl.DataFrame(made), SYMBOLIC)
    assert wide is not None and wide.height == 3
    assert wide.row(0)[:5] == ("symbolic_mlp, order 10", "small,order=10", 1, "50.00", "70.66")
    made_section = section(read)
    assert made_section is not None and "Table 3" in made_section.parts[1]
    assert section(read_of({})) is None


@pytest.mark.parametrize(
    ("file", "key", "layout"),
    [("table2_recomputed.csv", "method", VISUAL), ("table3_recomputed.csv", "context_k", SYMBOLIC)],
    ids=["table_2", "table_3"],
)
def test_the_papers_numbers_are_the_printed_ones(file, key, layout):
    printed = pl.read_csv(shared_path(f"novelcraft/expected/{file}")).drop_nulls("paper_auroc")
    named = {"ocsvm": "one_class_svm", "ae_patch": "autoencoder_patch"}
    named |= {"ae_full": "autoencoder_full"}
    columns = [name for name in printed.columns if name.startswith("paper_")]
    assert len(printed) == len(layout.paper)
    for row in printed.iter_rows(named=True):
        name = f"symbolic_mlp, order {row[key]}" if key == "context_k" else row[key]
        expected = layout.paper[named.get(name, name)]
        assert tuple(row[column] for column in columns) == expected, name
