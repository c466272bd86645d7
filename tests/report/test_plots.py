"""Figures say all they should: legends with every line, labels that fit, whole numbers."""

import re

import numpy as np
import polars as pl

from tasks.report import plots

LINES = {"one": ("red", "-"), "two": ("blue", "--")}


def words(svg: bytes) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg.decode())


def points(**more: object) -> pl.DataFrame:
    """Two panels with one line each, so that no panel has both."""
    frame = pl.DataFrame(
        [("left", "one", 0.0, 0.1), ("left", "one", 9.0, 0.2), ("right", "two", 0.0, 0.3)],
        schema=["panel", "line", "x", "y"],
        orient="row",
    )
    return frame.with_columns(**more)


def test_a_line_of_any_panel_is_in_the_legend():
    drawn = plots.line_panels(points(seed=pl.lit(0), hollow=pl.lit(False)), LINES, "Step")
    assert {"one", "two", "left", "right"} <= set(words(drawn))
    marked = plots.marked_lines(points(), {"right": (3.0, None)}, LINES, "Row")
    assert {"one", "two", "world changes", "first novel sample"} <= set(words(marked))


def test_every_lowest_panel_has_numbers_below_it():
    three = pl.concat([points(), points().with_columns(panel=pl.lit("third"))])
    drawn = plots.line_panels(
        three.with_columns(seed=pl.lit(0), hollow=pl.lit(False)), LINES, "Step", columns=2
    )
    # The third stands below the first; the second has nothing below it.
    assert words(drawn).count("Step") == 2
    assert words(drawn).count("0") == 2


def test_lines_that_have_no_style_are_not_drawn():
    drawn = plots.marked_lines(points(), {}, {"one": ("red", "-")}, "Row")
    assert "two" not in words(drawn) and "right" not in words(drawn)


def test_long_names_are_cut_and_counts_are_whole():
    long = "x" * 200
    bars = plots.stacked_bars(pl.DataFrame({"class": [long], "train": [3]}), "n", {"train": "red"})
    assert "x" * 31 + "…" in words(bars) and long not in words(bars)
    ticks = [word for word in words(bars) if re.fullmatch(r"[\d.]+", word)]
    assert ticks == ["0", "1", "2", "3"]
    matrix = plots.confusion_matrix(np.array([[1.0, np.nan]]), [long], ["a", long])
    assert words(matrix).count("x" * 31 + "…") == 2


def test_the_size_of_a_confusion_matrix_is_bounded():
    for classes in (1, 5, 40):
        names = [f"class number {n}" for n in range(classes)]
        drawn = plots.confusion_matrix(np.eye(classes), names, names).decode()
        width, height = map(
            float, re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', drawn).groups()
        )
        assert 250 < width < 700 and 150 < height < 700


def test_legends_have_as_many_columns_as_fit():
    assert plots._legend_columns(["ab"] * 4) == 4
    assert plots._legend_columns(["x" * 50] * 4) == 2
    assert plots._legend_columns(["x" * 300] * 4) == 1


def test_titles_of_thumbnails_are_wrapped() -> None:
    clouds = [np.zeros((3, 3))] * 6
    said = words(plots.cloud_gallery(clouds, ["bathtub (modelnet40_resampled)"] * 5 + ["a"]))
    assert said == ["bathtub", "(modelnet40_resampled)"] * 5 + ["a"]


def test_a_figure_is_laid_out_and_drawn_at_once():
    from matplotlib.artist import Artist

    times_drawn = []

    class Counted(Artist):
        def draw(self, renderer: object) -> None:
            times_drawn.append(renderer)

    plots.svg(2, 2, lambda figure: figure.add_artist(Counted()))
    assert len(times_drawn) == 1
