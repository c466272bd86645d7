"""Reports: every section where its tables are, nothing where they are not, all text escaped."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.config import Settings
from schemas.errors import ConfigError, LakeError
from schemas.runs import RunFacts
from schemas.tables import CURVES, METRICS, RUNS, SPLITS
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.conventions import NOVELCRAFT_2022, OPENOOD
from tasks.evaluation.metrics import curves, evaluate
from tasks.evaluation.runs import run_id, run_row
from tasks.report import (
    Picture,
    bytes_text,
    figure,
    gallery,
    number_text,
    plots,
    table,
    text,
    write_report,
)
from tests.toy import build_toy, write_raw

ROOT = Path(__file__).parents[1]
EVIL = '<script>alert("x")</script>'
OWN_SCRIPT = (
    (ROOT / "tasks/report/page.html").read_text().split("<script>")[1].split("</script>")[0]
)
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Strict(HTMLParser):
    """Every element is closed in order; ids are unique; keeps what the tests ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        given = dict(attributes)
        assert len(given) == len(attributes), f"attribute twice in <{tag}>: {attributes}"
        assert not [name for name in given if name.startswith("on")]
        self.ids += [given["id"]] if "id" in given else []
        for name in ("href", "src", "xlink:href"):
            self.targets += [given[name]] if name in given else []

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def prose(self) -> str:
        return " ".join(" ".join(self.words).split())


def parsed(page: str | Path) -> Strict:
    """The page, checked to be well-formed and to need nothing outside itself."""
    source = page.read_text() if isinstance(page, Path) else page
    found = Strict()
    found.feed(source)
    found.close()
    assert not found.open
    assert len(set(found.ids)) == len(found.ids)
    bare = re.sub(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=\s]*", "", source)
    scripts = re.findall(r"<script>(.*?)</script>", source, re.S)
    assert scripts == [OWN_SCRIPT] * len(scripts) and source.count("<script") == len(scripts)
    policy = re.search(r"script-src '(sha256-[A-Za-z0-9+/=]+)'", bare)
    if policy is not None:
        digest = hashlib.sha256(OWN_SCRIPT.encode()).digest()
        assert policy[1] == f"sha256-{base64.b64encode(digest).decode()}"
        bare = bare.replace(policy[1], "")
    assert not re.search(r"https?:|//|@import", bare, re.I)
    assert not found.tags & {"link", "iframe", "object"}
    for target in found.targets:
        assert target.startswith(("#", "data:image/")) or re.fullmatch(r"\w+\.html", target), target
        if target.startswith("#"):
            assert target[1:] in found.ids
    for target in re.findall(r"url\(#([^)]+)\)", source):
        assert target in found.ids
    return found


def timeless(page: Path) -> str:
    """The page without when its tables were made and how long that took."""
    source = re.sub(r"<details><summary>Time spent.*?</details>", "", page.read_text(), flags=re.S)
    return re.sub(r"<td>\d{4}-\d\d-\d\d\s\d\d:\d\d</td>", "<td>then</td>", source)


def titles(page: Path) -> list[str]:
    return re.findall(r'<section id="[^"]+"><h2><a href="#[^"]+">(.*?)</a>', page.read_text())


# ---- results of runs that never were


def results(
    samples: pl.DataFrame,
    models: dict[str, float],
    seeds: int = 2,
    conventions=(NOVELCRAFT_2022,),
) -> dict[str, pl.DataFrame]:
    """Runs, metrics and curves of `samples` (sample_id, class, novel): model -> how good."""
    runs, metrics, drawn = [], [], []
    for number, (model, good) in enumerate(models.items()):
        for seed in range(seeds):
            noise = np.random.default_rng([number, seed]).normal(size=samples.height)
            facts = RunFacts(
                benchmark="toy", protocol="visual", model=model, seed=seed, fit_key="rows"
            )
            runs.append(run_row(facts))
            place = {"protocol": "visual", "run_id": run_id(facts), "model": model, "seed": seed}
            place |= {"score_id": "own", "score": "own", "split": "test", "view": "plain"}
            place |= {"phase": "none", "step": 0, "subset": "all"}
            columns = [pl.lit(value).alias(name) for name, value in place.items()]
            value = pl.Series("value", good * samples["novel"].to_numpy() + noise)
            for convention in conventions:
                found = evaluate(value, samples["novel"], convention).drop("threshold")
                bounds = (
                    (pl.col("value") - 0.01).alias("low"),
                    (pl.col("value") + 0.01).alias("high"),
                )
                metrics.append(METRICS.conform(found.with_columns(*columns, *bounds)))
                lines = curves(value, samples["novel"], convention)
                drawn.append(CURVES.conform(lines.with_columns(columns)))
    return {"runs": pl.concat(runs), "metrics": pl.concat(metrics), "curves": pl.concat(drawn)}


FRAMES: dict[str, pl.DataFrame] = {}


@stage(writes=(SPLITS, RUNS, METRICS, CURVES))
def pretend(shard: Shard, settings: Settings) -> Produced:
    """Write what a test prepared."""
    return Produced(FRAMES, FRAMES["splits"].height)


def build_results(lake: Path, classes: tuple[str, ...] = ("cat", "dog", EVIL), **options) -> Path:
    """A lake with splits and results of two models; the last class is novel."""
    names = [classes[number % len(classes)] for number in range(90)]
    samples = pl.DataFrame({"sample_id": [f"s{n:03}" for n in range(90)], "class": names})
    samples = samples.with_columns((pl.col("class") == classes[-1]).alias("novel"))
    splits = samples.select(
        pl.lit("visual").alias("protocol"),
        "sample_id",
        pl.lit(0, pl.Int32).alias("step"),
        "class",
        pl.lit(None, pl.Int32).alias("label"),
        pl.when("novel").then(pl.lit("test")).otherwise(pl.lit("train")).alias("split"),
        pl.when("novel").then(pl.lit("novel")).otherwise(pl.lit("known")).alias("role"),
        pl.lit(None, pl.String).alias("subset"),
    )
    FRAMES.clear()
    FRAMES.update(results(samples, {"odin": 1.0, f"{EVIL}net": 3.0}, **options), splits=splits)
    with Build("toy", lake) as build:
        build.run(pretend, [Shard("all", about=[list(classes), str(options)])], Settings())
    return write_report(lake, "toy")


def board_cells(page: str, metric: str) -> list[tuple[str, str]]:
    """(class, text) of the metric's cells in the first board of the test split, row by row."""
    board = page[page.index('<p class="caption">Split test') :]
    names = re.findall(r"<th[^>]*>([^<]+)</th>", board[: board.index("</thead>")])
    at = names[names.index("run") :].index(metric)
    rows = re.findall(r"<tr>(<td.*?)</tr>", board[: board.index("</table>")], re.S)
    return [re.findall(r"<td(.*?)>(.*?)</td>", row, re.S)[at] for row in rows]


# ---- whole pages


def test_page_of_any_benchmark(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    page = write_report(tmp_path / "lake", "toy")
    assert page == tmp_path / "lake" / "reports" / "toy.html"
    found = parsed(page)
    assert titles(page) == ["What was built", "Data quality"]
    assert "Readings for tests." in found.prose
    assert "toy/readings/current" in found.prose
    assert "3 records went to quarantine" in found.prose
    assert "'not a number' is no number" in found.prose
    assert "value is 1000.0, expected 0 to 100" in found.prose
    assert str(tmp_path) not in page.read_text()


def test_refused_records_are_counted_by_rule(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    page = write_report(tmp_path / "lake", "toy").read_text()
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    assert ["read_lines", "readings", "kind_allowed", "1"] in cells
    assert ["read_lines", "readings", "value_range", "1"] in cells
    built = {row[0]: row for row in cells if len(row) == 6}
    assert built["readings"][1] == "117" and built["readings"][3] == "3"
    assert built["files"][3] == "0"


def test_all_sections_where_there_are_results(tmp_path):
    page = build_results(tmp_path / "lake")
    found = parsed(page)
    assert titles(page) == [
        "Leaderboard",
        "ROC and precision-recall curves",
        "Classes and splits",
        "What was built",
        "Data quality",
    ]
    assert "No record was refused." in found.prose
    assert "svg" in found.tags
    assert "Protocol visual, split test, convention novelcraft-2022" in found.prose


def test_best_run_comes_first_and_is_marked(tmp_path):
    page = build_results(tmp_path / "lake").read_text()
    assert ["net" in name for _, name in board_cells(page, "run")] == [True, False]
    first, second = board_cells(page, "auroc")
    assert "best" in first[0] and "best" not in second[0]
    expected = FRAMES["metrics"].filter(metric="auroc", model="odin")["value"]
    assert second[1] == f"{expected.mean():.3f} ± {expected.std():.3f}"
    assert [shown for _, shown in board_cells(page, "seeds")] == ["2", "2"]
    assert [shown for _, shown in board_cells(page, "samples")] == ["90", "90"]


def test_lower_is_better_for_false_positive_rates(tmp_path):
    page = build_results(tmp_path / "lake", conventions=(OPENOOD,)).read_text()
    found = board_cells(page, "fpr95")
    means = [float(shown.split(" ")[0]) for _, shown in found]
    assert means[0] < means[1]
    assert ["best" in kind for kind, _ in found] == [True, False]


def again(lake: Path, aurocs: dict[str, float | None]) -> str:
    """The page of the same results with other numbers."""
    value = pl.col("model").replace_strict(aurocs, default=None, return_dtype=pl.Float64)
    FRAMES["metrics"] = FRAMES["metrics"].with_columns(
        pl.when(metric="auroc").then(value).otherwise("value").alias("value")
    )
    with Build("toy", lake) as build:
        build.run(pretend, [Shard("all", about="again")], Settings())
    return write_report(lake, "toy").read_text()


def test_what_looks_the_same_is_marked_the_same(tmp_path):
    build_results(tmp_path / "lake", seeds=2)
    page = again(tmp_path / "other", {"odin": 0.99985, f"{EVIL}net": 0.9999})
    found = board_cells(page, "auroc")
    assert [shown for _, shown in found] == ["1.000 ± 0.000"] * 2
    assert not any("best" in kind for kind, _ in found)


def test_one_seed_shows_its_interval_and_infeasible_numbers_a_dash(tmp_path):
    page = build_results(tmp_path / "lake", seeds=1).read_text()
    value = FRAMES["metrics"].filter(metric="auroc", model="odin")["value"][0]
    shown = board_cells(page, "auroc")[1]
    assert shown[1] == f"{value:.3f}\n[{value - 0.01:.3f}, {value + 0.01:.3f}]"
    assert "two" in shown[0]
    page = again(tmp_path / "other", {})
    assert [shown for _, shown in board_cells(page, "auroc")] == ["–", "–"]


def test_more_classes_than_bars(tmp_path):
    page = build_results(tmp_path / "lake", tuple(f"c{n}" for n in range(70)))
    assert "Samples by class and split, protocol visual; classes: 70" in parsed(page).prose
    assert "Class, by size" in page.read_text()


def test_hostile_names_are_text(tmp_path):
    page = build_results(tmp_path / "lake", ("a & b", "$x^$", EVIL))
    found = parsed(page)
    assert EVIL in found.prose
    assert f"{EVIL}net" in found.prose
    assert "a & b" in found.prose and "$x^$" in found.prose


def test_same_lake_same_bytes(tmp_path):
    first = build_results(tmp_path / "one").read_bytes()
    assert write_report(tmp_path / "one", "toy").read_bytes() == first
    one, two = tmp_path / "one/reports/toy.html", build_results(tmp_path / "two")
    assert timeless(one) == timeless(two) and "<td>then</td>" in timeless(one)


def test_surroundings_do_not_show(tmp_path):
    first = build_results(tmp_path / "lake").read_bytes()
    code = (
        "import sys; from pathlib import Path; from tasks.report import write_report\n"
        "write_report(Path(sys.argv[1]), 'toy')"
    )
    environment = os.environ | {
        "TZ": "Asia/Tokyo",
        "PYTHONHASHSEED": "7",
        "POLARS_MAX_THREADS": "5",
        "LC_ALL": "C",
        "SOURCE_DATE_EPOCH": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", code, str(tmp_path / "lake")]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "lake/reports/toy.html").read_bytes() == first


def test_index_lists_every_report(tmp_path):
    build_results(tmp_path / "lake")
    (tmp_path / "lake/reports/gone.html").write_text("no tables of this one")
    index = tmp_path / "lake/reports/index.html"
    write_report(tmp_path / "lake", "toy")
    found = parsed(index)
    assert found.targets == ["toy.html"]
    assert "5 tables" in found.prose


def test_nothing_to_report(tmp_path):
    with pytest.raises(LakeError, match="novelty build toy"):
        write_report(tmp_path, "toy")
    with pytest.raises(ConfigError, match="expected a name"):
        write_report(tmp_path, "../toy")
    assert not list(tmp_path.iterdir())


# ---- building blocks


def test_numbers_are_readable():
    assert [number_text(v) for v in (0.0, 0.12345, 1234567.8, 0.00004)] == [
        "0.000",
        "0.123",
        "1,234,568",
        "4e-05",
    ]
    assert [bytes_text(n) for n in (12, 9640, 39_076_603)] == ["12 B", "9.64 kB", "39.1 MB"]


def test_table_cells():
    frame = pl.DataFrame({"a_b": [1234, None], "c": [EVIL, "`x`"], "d": [True, False]})
    made = table(frame, caption="All & sundry", groups=[("both", 2), ("", 1)], marked={(0, "a_b")})
    parsed(made)
    assert '<td class="n best">1,234</td>' in made and '<td class="n">–</td>' in made
    assert "<code>x</code>" in made and "<td>yes</td>" in made
    assert "All &amp; sundry" in made and '<th class="n">a b</th>' in made
    assert text(EVIL) == "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;"


def test_pictures():
    import cv2

    png = cv2.imencode(".png", np.zeros((4, 4, 4), np.uint8))[1].tobytes()
    made = gallery([Picture(png, EVIL, (4, 4), png, [(0, 1, 3, 3, EVIL)])])
    assert parsed(made).tags >= {"svg", "image", "rect"}
    assert 'width="3" height="2"' in made and "<script" not in made
    assert "data:image/png;base64," in figure(png, "a picture")
    with pytest.raises(ConfigError, match="expected PNG or JPEG"):
        figure(b"GIF89a", "no")


def test_figures_take_the_colour_of_the_page_and_do_not_share_ids():
    one = plots.stacked_bars(pl.DataFrame({"class": [EVIL], "train": [3]}), "n", {"train": "red"})
    two = plots.stacked_bars(pl.DataFrame({"class": ["b"], "train": [4]}), "n", {"train": "red"})
    assert b"currentColor" in one and b"#010203" not in one and b"<script" not in one
    found = parsed(figure(one, "one") + figure(two, "two"))
    assert len(found.ids) > 2
    assert EVIL in found.prose
