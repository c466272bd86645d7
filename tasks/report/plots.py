"""Figures of the reports: polars frames and numpy arrays in, SVG bytes out, in one style.

They read on light and on dark paper: transparent ground, data in mid tones, and text, axes and grid
in `currentColor`, the colour of the text around them. Same data, same bytes: no clock, fixed ids.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#4a8fd9",
    "#e08040",
    "#35a37a",
    "#cf5c9d",
    "#8d7bdc",
    "#bd9a1f",
    "#d35656",
    "#3fa9b8",
    "#a8754e",
    "#7f9a3c",
)
NOVEL = "#d9468f"
GREY = "#8e939b"
DASHES = ("-", "--", ":", "-.")

MOST_CURVE_POINTS = 250
MOST_SCATTER_POINTS = 4000
MOST_LABEL_LETTERS = 32
THUMBNAIL_LETTERS = 22

_INK = "#010203"  # stands for currentColor, which matplotlib does not know
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "figure.dpi": 144,  # of what is rasterised
    "figure.facecolor": "none",
    "font.size": 9.5,
    "grid.alpha": 0.14,
    "grid.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "novelty",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Floats = NDArray[np.float64]


def svg(width: float, height: float, paint: Callable[["Figure"], None]) -> bytes:
    """What `paint` draws on a figure of that size in inches."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with style.context(_STYLE, after_reset=True):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        data = io.BytesIO()
        # `savefig` would draw twice: once to lay it out.
        FigureCanvasSVG(figure).print_svg(data, metadata=_NO_METADATA)
    return data.getvalue().replace(_INK.encode(), b"currentColor")


def _thinned(frame: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many rows, evenly by index, both ends kept."""
    if frame.height <= most:
        return frame
    return frame[np.linspace(0, frame.height - 1, most).round().astype(np.int64)]


def _counts(axis: Any) -> None:
    """Whole numbers with thousands separators."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
    _grouped_digits(axis)


def _grouped_digits(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _shortened(name: str) -> str:
    return name if len(name) <= MOST_LABEL_LETTERS else name[: MOST_LABEL_LETTERS - 1] + "…"


def _legend_columns(names: Sequence[str]) -> int:
    """As many as fit side by side below a figure of full width."""
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), 120 // (longest + 7)))


def _legend_height(names: Sequence[str]) -> float:
    return 0.22 * -(-len(names) // _legend_columns(names))


def stacked_bars(counts: pl.DataFrame, across: str, colours: Mapping[str, str]) -> bytes:
    """A bar per row (label in the first column), a part per further column, top row first."""
    labels = [_shortened(name) for name in counts.to_series(0)]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        left = np.zeros(counts.height)
        for name in counts.columns[1:]:
            values = counts[name].to_numpy().astype(np.float64)
            axes.barh(
                range(counts.height), values, 0.76, left, color=colours[name], label=name, lw=0
            )
            left += values
        axes.set_yticks(range(counts.height), labels)
        axes.set(xlabel=across, xlim=(0, 1.02 * max(left.max(), 1)))
        axes.set_ylim(counts.height - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        _counts(axes.xaxis)
        figure.legend(loc="outside upper right", ncols=len(counts.columns) - 1)

    return svg(9, 1.1 + 0.21 * counts.height, paint)


def ranked_sizes(counts: pl.DataFrame, up: str, colours: Mapping[str, str]) -> bytes:
    """For more classes than bars: the sizes of each column (but the first), largest first."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for name in counts.columns[1:]:
            sizes = counts[name].filter(counts[name] > 0).sort(descending=True).to_numpy()
            if sizes.size:
                axes.step(np.arange(1, sizes.size + 1), sizes, label=name, color=colours[name])
        axes.set(xlabel="Class, by size", ylabel=up, yscale="log")
        _grouped_digits(axes.xaxis)
        _grouped_digits(axes.yaxis)
        figure.legend(loc="outside upper right", ncols=len(counts.columns) - 1)

    return svg(9, 3.2, paint)


def roc_and_pr(points: pl.DataFrame, lines: Mapping[str, tuple[str, str]]) -> bytes:
    """ROC beside precision-recall. `points`: run, seed, curve, x, y in the order of each curve.

    `lines` gives colour and dash of each run, so that a run looks the same in every figure. Seeds
    of a run share them.
    """
    shown = [run for run in lines if run in set(points["run"])]

    def paint(figure: "Figure") -> None:
        both = figure.subplots(1, 2)
        titles = {
            "roc": ("ROC", "False positive rate", "True positive rate"),
            "pr": ("Precision and recall", "Recall", "Precision"),
        }
        for axes, (curve, (title, across, up)) in zip(both, titles.items(), strict=True):
            panel = points.filter(pl.col("curve") == curve)
            seen = set()
            for (run, _), part in panel.group_by("run", "seed", maintain_order=True):
                part = _thinned(part, MOST_CURVE_POINTS)
                colour, dash = lines[run]
                label = None if run in seen or curve == "pr" else run
                axes.plot(part["x"], part["y"], dash, color=colour, lw=1.3, label=label)
                seen.add(run)
            if curve == "roc":
                axes.plot([0, 1], [0, 1], lw=0.8, color=GREY, ls=(0, (2, 4)))
            axes.set(title=title, xlabel=across, ylabel=up, xlim=(0, 1), ylim=(0, 1.02))
            axes.set_box_aspect(0.9)
        figure.legend(loc="outside lower left", ncols=_legend_columns(shown))

    return svg(9, 4.4 + _legend_height(shown), paint)


def histogram(values: Floats, edges: Floats, across: str, up: str, mark: float, note: str) -> bytes:
    """Bars between logarithmic `edges`, and a vertical line at `mark`."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.hist(values, list(edges), color=COLOURS[0], rwidth=0.92, lw=0)
        axes.axvline(mark, color=NOVEL, lw=1.3, ls="--", label=note)
        axes.set(xscale="log", xlabel=across, ylabel=up)
        axes.grid(visible=False, axis="x")
        _grouped_digits(axes.xaxis)
        _counts(axes.yaxis)
        figure.legend(loc="outside upper right")

    return svg(9, 3.1, paint)


def quantile_bands(x: Floats, bands: pl.DataFrame, across: str, up: str) -> bytes:
    """`bands`: mean, and quantiles q50, q75, q90, at each `x`."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for low, high, alpha, label in (
            ("q50", "q75", 0.45, "median to 75th percentile"),
            ("q75", "q90", 0.22, "75th to 90th percentile"),
        ):
            axes.fill_between(
                x, bands[low], bands[high], alpha=alpha, color=COLOURS[0], lw=0, label=label
            )
        axes.plot(x, bands["mean"], color=NOVEL, marker="o", ms=3, label="mean")
        axes.set(xlabel=across, ylabel=up, xlim=(0, 1))
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside upper right", ncols=3)

    return svg(9, 2.9, paint)


@dataclass(frozen=True)
class HeatMap:
    """One panel. Values may be NaN, which stays empty; `ring` (row, column) is circled.

    `columns` are the labels of the columns, or the numbers at the left and right edge.
    """

    values: Floats
    rows: Sequence[str]
    columns: Sequence[str] | tuple[float, float]
    title: str = ""
    ring: tuple[int, int] | None = None


def heat_maps(
    panels: Sequence[HeatMap], across: str, up: str, scale: str, *, height: float, gamma: float = 1
) -> bytes:
    """Panels side by side, each with its own colour scale; a `gamma` < 1 spreads small values."""

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import PowerNorm

        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(row, panels, strict=True):
            numbers = [edge for edge in panel.columns if not isinstance(edge, str)]
            extent = (*numbers, len(panel.rows) - 0.5, -0.5) if numbers else None
            image = axes.imshow(
                np.ma.masked_invalid(panel.values),
                aspect="auto",
                cmap="viridis",
                extent=extent,
                interpolation="nearest",
                norm=PowerNorm(gamma),
            )
            if extent is None:
                every = -(-len(panel.columns) // 5)
                axes.set_xticks(range(0, len(panel.columns), every), panel.columns[::every])
            axes.set_yticks(range(len(panel.rows)), panel.rows)
            axes.grid(visible=False)
            axes.set(title=panel.title, xlabel=across, ylabel=up if axes is row[0] else "")
            axes.spines[:].set_visible(False)
            if panel.ring is not None:
                down, right = panel.ring
                for colour, width in (("#000000", 3.0), ("#ffffff", 1.4)):
                    axes.plot(right, down, "o", ms=11, mfc="none", mec=colour, mew=width)
            bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
            bar.outline.set_visible(False)
            bar.set_label(scale if axes is row[-1] else "")

    return svg(9, height, paint)


def confusion_matrix(shares: Floats, rows: Sequence[str], columns: Sequence[str]) -> bytes:
    """Shares (rows, columns) of each true class that were taken for each class; NaN is empty."""
    down, across = ([_shortened(name) for name in names] for names in (rows, columns))
    cell = min(0.24, 5.6 / len(columns))
    size = min(9.0, 66 * cell)
    margin = 0.008 * size * max(len(name) for name in (*down, *across)) + 0.5
    upright = 0 if max(map(len, across)) <= 2 else 90

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        image = axes.imshow(
            np.ma.masked_invalid(shares), cmap="viridis", interpolation="nearest", vmin=0, vmax=1
        )
        axes.set_xticks(range(len(across)), across, rotation=upright, fontsize=size)
        axes.set_yticks(range(len(down)), down, fontsize=size)
        axes.tick_params(length=0)
        axes.set(xlabel="Predicted", ylabel="True class")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("Share of the true class")

    width = cell * len(columns) + margin + 1.0
    return svg(max(width, 4.0), max(cell * len(rows) + margin, 2.6), paint)


@dataclass(frozen=True)
class ScorePanel:
    """Scores of novel samples over a quantity, with those of known samples for comparison."""

    title: str
    x: Floats
    score: Floats
    known: Floats


def score_panels(panels: Sequence[ScorePanel], across: str) -> bytes:
    """Points, their median in bins along a logarithmic axis, and the known samples' 5 to 95 %."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _score_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel(across, fontsize=9.5)
        figure.supylabel("Score", fontsize=9.5)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=4)

    return svg(3 * max(columns, 2), 0.7 + 2.5 * rows, paint)


def _score_panel(axes: "Axes", panel: ScorePanel) -> None:
    if panel.known.size:
        low, middle, high = np.quantile(panel.known, (0.05, 0.5, 0.95))
        axes.axhspan(low, high, color=GREY, alpha=0.22, lw=0, label="known, 5 to 95 %")
        axes.axhline(middle, color=GREY, lw=1.2, label="known, median")
    keep = np.linspace(0, panel.x.size - 1, min(panel.x.size, MOST_SCATTER_POINTS)).astype(int)
    axes.scatter(
        panel.x[keep],
        panel.score[keep],
        7,
        COLOURS[0],
        alpha=0.5 if keep.size < 1000 else 0.25,
        lw=0,
        rasterized=True,
        label="novel",
    )
    edges = np.geomspace(panel.x.min(), panel.x.max() * 1.0001, 9)
    place = np.clip(np.digitize(panel.x, edges) - 1, 0, 7)
    centres, medians = [], []
    for number in range(8):
        inside = panel.score[place == number]
        if inside.size >= 3:
            centres.append(np.sqrt(edges[number] * edges[number + 1]))
            medians.append(np.median(inside))
    axes.plot(centres, medians, color=NOVEL, marker="o", ms=3.5, label="novel, median")
    axes.set(xscale="log", title=panel.title)
    _grouped_digits(axes.xaxis)


def old_and_new(old: Floats, new: Floats, crossed: NDArray[np.bool_], line: float) -> bytes:
    """Two versions of a fraction against each other; points that crossed `line` stand out."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for mask, colour, label in (
            (~crossed, COLOURS[0], "changed"),
            (crossed, NOVEL, f"crossed {line:.0%}"),
        ):
            axes.scatter(
                old[mask], new[mask], 9, colour, alpha=0.55, lw=0, rasterized=True, label=label
            )
        axes.plot([0, 1], [0, 1], color=GREY, lw=0.8)
        for draw in (axes.axhline, axes.axvline):
            draw(line, color=NOVEL, lw=0.9, ls="--")
        axes.set(xlabel="Novel fraction, old", ylabel="Novel fraction, new")
        for set_scale in (axes.set_xscale, axes.set_yscale):
            set_scale("symlog", linthresh=line / 10)
        axes.set(xlim=(-line / 50, 1.1), ylim=(-line / 50, 1.1))
        for axis in (axes.xaxis, axes.yaxis):
            _grouped_digits(axis)
        axes.set_box_aspect(1)
        figure.legend(loc="outside upper right", ncols=2)

    return svg(5.5, 5.5, paint)


def _line_grid(
    points: pl.DataFrame,
    lines: Mapping[str, tuple[str, str]],
    across: str,
    columns: int,
    draw: Callable[["Axes", str, pl.DataFrame], None],
    *,
    panel_height: float,
    notes: Mapping[str, str] | None = None,
    **shared: Any,
) -> bytes:
    """A panel for each value of `panel`, which `draw` fills; lines and `notes` in one legend.

    `lines` gives colour and dash of each line, `notes` the dash of each vertical mark.
    """
    points = points.filter(pl.col("line").is_in(list(lines)))
    titles = points["panel"].unique(maintain_order=True).to_list()
    rows = -(-len(titles) // columns)
    legend = {name: style for name, style in lines.items() if name in set(points["line"])}
    legend |= {name: (NOVEL, dash) for name, dash in (notes or {}).items()}

    def paint(figure: "Figure") -> None:
        from matplotlib.lines import Line2D

        grid = figure.subplots(rows, min(columns, len(titles)), squeeze=False, **shared)
        for place, axes in enumerate(grid.ravel()):
            if place >= len(titles):
                axes.set_axis_off()
                continue
            draw(axes, titles[place], points.filter(pl.col("panel") == titles[place]))
            axes.set_title(titles[place])
            if place + columns >= len(titles):
                axes.set_xlabel(across)
                axes.tick_params(labelbottom=True)
        handles = [Line2D([], [], color=colour, ls=dash) for colour, dash in legend.values()]
        columns_of_legend = _legend_columns(list(legend))
        figure.legend(handles, list(legend), loc="outside lower left", ncols=columns_of_legend)

    return svg(9, 0.4 + panel_height * rows + _legend_height(list(legend)), paint)


def line_panels(
    points: pl.DataFrame, lines: Mapping[str, tuple[str, str]], across: str, columns: int = 3
) -> bytes:
    """A panel for each value of `panel`. `points`: panel, line, x, y, hollow, in drawing order.

    `lines` gives colour and dash of each line; a point is hollow where `hollow` holds. Seeds of a
    line are one line each, told apart by the column `seed`.
    """

    def draw(axes: "Axes", title: str, panel: pl.DataFrame) -> None:
        for (name,), line in panel.group_by("line", maintain_order=True):
            colour, dash = lines[name]
            for part in line.partition_by("seed", maintain_order=True):
                axes.plot(part["x"], part["y"], dash, color=colour, lw=1.2)
            for (hollow,), some in line.group_by("hollow", maintain_order=True):
                face = "none" if hollow else colour
                axes.plot(some["x"], some["y"], "o", ms=3, mfc=face, mec=colour, mew=0.8)
        _counts(axes.xaxis)

    return _line_grid(points, lines, across, columns, draw, panel_height=2.3, sharex=True)


def bar_panels(bars: pl.DataFrame, colours: Mapping[str, str], across: str) -> bytes:
    """A panel for each value of `panel`, a group of bars per `name`, one bar of it per `kind`.

    Kinds stand in the order of their `colours`.
    """
    panels = bars.partition_by("panel", as_dict=True, maintain_order=True)
    kinds = [kind for kind in colours if kind in set(bars["kind"])]
    heights = [part["name"].n_unique() * len(kinds) for part in panels.values()]

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(
            len(panels), 1, squeeze=False, sharex=True, height_ratios=[h + 2 for h in heights]
        )
        for axes, ((title,), part) in zip(grid.ravel(), panels.items(), strict=True):
            names = part["name"].unique(maintain_order=True).to_list()
            for number, kind in enumerate(kinds):
                value_of = dict(
                    part.filter(pl.col("kind") == kind).select("name", "value").iter_rows()
                )
                places = np.arange(len(names)) + (number - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
                values = [value_of.get(name) or 0.0 for name in names]
                label = kind if axes is grid.ravel()[0] else None
                axes.barh(places, values, 0.76 / len(kinds), color=colours[kind], label=label, lw=0)
            axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.set_title(title)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        axes.set_xlabel(across)
        figure.legend(loc="outside lower left", ncols=_legend_columns(kinds))

    return svg(9, 0.8 + _legend_height(kinds) + sum(0.12 * h + 0.55 for h in heights), paint)


def cloud_gallery(clouds: Sequence[Floats], titles: Sequence[str], columns: int = 6) -> bytes:
    """Point clouds (P, 3) seen a little from above, far points fainter; y is up."""
    rows = -(-len(clouds) // columns)
    turn, tilt = np.radians(35), np.radians(20)
    right = np.array([np.cos(turn), 0, -np.sin(turn)])
    depth = np.array([np.sin(turn) * np.cos(tilt), np.sin(tilt), np.cos(turn) * np.cos(tilt)])
    up = np.cross(depth, right)

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.ravel()):
            axes.set_axis_off()
            if place >= len(clouds):
                continue
            points = np.asarray(clouds[place], np.float64)
            near = points @ depth
            order = np.argsort(near)
            shade = 0.25 + 0.75 * (near - near.min()) / max(np.ptp(near), 1e-9)
            axes.scatter(
                (points @ right)[order],
                (points @ up)[order],
                s=3,
                color=COLOURS[0],
                alpha=shade[order],
                lw=0,
                rasterized=True,
            )
            axes.set_aspect("equal")
            axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
            lines = textwrap.wrap(titles[place], THUMBNAIL_LETTERS, max_lines=2, placeholder=" …")
            axes.set_title("\n".join(lines), fontsize=8)

    return svg(9, 1.9 * rows, paint)


def marked_lines(
    points: pl.DataFrame,
    marks: Mapping[str, tuple[float | None, float | None]],
    lines: Mapping[str, tuple[str, str]],
    across: str,
    columns: int = 2,
) -> bytes:
    """A panel for each value of `panel`: lines over x, and two vertical marks in each panel.

    `points`: panel, line, x, y. `marks` gives for a panel where the world changes and where the
    first novel sample is.
    """
    notes = {"world changes": "--", "first novel sample": ":"}

    def draw(axes: "Axes", title: str, panel: pl.DataFrame) -> None:
        for (name,), line in panel.group_by("line", maintain_order=True):
            part = _thinned(line, MOST_CURVE_POINTS)
            colour, dash = lines[name]
            axes.plot(part["x"], part["y"], dash, color=colour, lw=1.3)
        for where, dash in zip(marks.get(title, (None, None)), notes.values(), strict=True):
            if where is not None:
                axes.axvline(where, color=NOVEL, lw=1.1, ls=dash)
        axes.set_ylim(-0.03, 1.03)

    return _line_grid(
        points, lines, across, columns, draw, panel_height=1.9, notes=notes, sharey=True
    )
