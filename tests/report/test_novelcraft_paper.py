"""NovelCraft's detectors beside the paper's Tables 2 and 3."""

import polars as pl
import pytest

from tasks.novelcraft.detection_report import SYMBOLIC, VISUAL, beside, section
from tests.report.reading import read_of
from tests.shared import shared_path


def rows(model: str, settings: str, seed: int, layout, values: dict[str, float | None]):
    return [
        {
            "protocol": layout.protocol,
            "run_id": f"{model}{settings}{seed}",
            "model": model,
            "score": "own",
            "seed": seed,
            "split": "test",
            "convention": layout.convention,
            "metric": metric,
            "value": value,
        }
        for metric, value in values.items()
    ]


def run(model: str, settings: str, seed: int) -> dict[str, str]:
    """A row of `runs` whose settings all differ from the preset."""
    return {
        "run_id": f"{model}{settings}{seed}",
        "settings": settings,
        "preset": "small",
        "changed": settings,
        "config_id": settings,
    }


def test_ours_first_then_what_only_the_paper_has():
    made = rows("odin", "{}", 0, VISUAL, {"auroc": 0.5, "tnr_at_tpr95": None})
    made += rows("odin", "{}", 1, VISUAL, {"auroc": 0.7})
    made += rows("colour_rarity", "{}", 0, VISUAL, {"auroc": 0.9, "aupr": 0.25})
    runs = [run("odin", "{}", 0), run("odin", "{}", 1), run("colour_rarity", "{}", 0)]
    wide = beside(pl.DataFrame(made), pl.DataFrame(runs), VISUAL)
    assert wide is not None and wide.height == 7
    assert wide["model"].to_list()[:3] == ["colour_rarity", "odin", "autoencoder_full"]
    ours = wide.row(1, named=True)
    assert ours["AUROC here"] == "60.00 ± 14.14" and ours["AUROC paper"] == "65.54"
    assert ours["seeds"] == 2 and ours["TNR at TPR 95 here"] is None
    assert wide.row(0, named=True)["AUPRC here"] == "25.00"
    assert wide.row(0, named=True)["AUROC paper"] is None
    assert wide["AUROC paper"].drop_nulls().len() == 6


@pytest.mark.parametrize("name", ["context", "order"])
def test_symbolic_runs_are_told_apart_by_their_order(name):
    settings = f'{{"{name}": 10}}'
    made = pl.DataFrame(rows("symbolic_mlp", settings, 0, SYMBOLIC, {"auroc": 0.5}))
    runs = pl.DataFrame([run("symbolic_mlp", settings, 0)])
    wide = beside(made, runs, SYMBOLIC)
    assert wide is not None and wide.height == 3
    assert wide.row(0)[:5] == ("symbolic_mlp, order 10", f"small, {name}: 10", 1, "50.00", "70.66")
    made_section = section(read_of({"metrics": made, "runs": runs}))
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
