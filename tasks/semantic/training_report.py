"""How the networks of semantic anomalies were trained: a panel a measure, a line a model.

Enters: the table training beside what its runs are. Leaves: a report section, if there are two
epochs or more to draw.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from tasks.report import Section, figure, paragraph, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "ap_msp": "Average precision of MSP, test",
    "ap_odin": "Average precision of ODIN, test",
    "test_accuracy": "Accuracy, test",
    "accuracy": "Accuracy, training pictures",
    "loss": "Loss of the classes, training",
    "auxiliary_loss": "Loss of the auxiliary task, training",
}


def curves_of(training: pl.DataFrame) -> pl.DataFrame:
    """subset, network, model, measure, epoch: mean over members, then mean, low, high of seeds."""
    key = ["subset", "network", "model", "measure", "epoch"]
    return (
        training.filter(pl.col("measure").is_in(list(PANELS)))
        .drop_nulls("value")
        .select(*key, "seed", "value")
        .sort(pl.all())
        .group_by(*key, "seed", maintain_order=True)
        .agg(pl.col("value").mean())
        .group_by(key, maintain_order=True)
        .agg(
            pl.col("value").mean().alias("mean"),
            pl.col("value").min().alias("low"),
            pl.col("value").max().alias("high"),
        )
    )


def section(training: pl.DataFrame) -> Section | None:
    curves = curves_of(training)
    several = pl.col("epoch").n_unique().over("subset", "network", "measure") > 1
    curves = curves.filter(several)
    if curves.is_empty():
        return None
    models = sorted(set(curves["model"]), key=lambda name: (name != "classifier", name))
    colours = {name: plots.COLOURS[n % len(plots.COLOURS)] for n, name in enumerate(models)}
    parts = [
        paragraph(
            "Mean over the held-out members; the band reaches from the lowest to the highest seed. "
            "Test is scored in the last epochs only: `--train.evaluations` says in how many."
        )
    ]
    for (subset, network), network_curves in curves.group_by(
        "subset", "network", maintain_order=True
    ):
        title = f"Training on the trials of {subset}, network {network}"
        parts.append(figure(band_panels(network_curves, colours), title))
    return Section("Training of the networks", parts)


def band_panels(curves: pl.DataFrame, colours: Mapping[str, str], columns: int = 3) -> bytes:
    """A panel for each measure: a line for each model, with a band over seeds."""
    measures = [measure for measure in PANELS if measure in set(curves["measure"])]
    rows = -(-len(measures) // columns)

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        grid = figure.subplots(rows, min(columns, len(measures)), squeeze=False)
        for axes, measure in zip(grid.ravel(), measures, strict=False):
            for model, colour in colours.items():
                points = curves.filter(measure=measure, model=model).sort("epoch")
                if points.is_empty():
                    continue
                label = model if measure == measures[0] else None
                axes.fill_between(
                    points["epoch"], points["low"], points["high"], color=colour, alpha=0.2, lw=0
                )
                axes.plot(
                    points["epoch"], points["mean"], "o-", ms=3, color=colour, lw=1.3, label=label
                )
            axes.set_title(PANELS[measure], fontsize=9)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in grid.ravel()[len(measures) :]:
            axes.set_axis_off()
        figure.legend(loc="outside lower left", ncols=5)

    return plots.svg(9, 0.5 + 2.4 * rows, paint)
