"""The report of a benchmark: its current tables in, one self-contained HTML file out.

Every benchmark gets what was built, data quality, balance, leaderboard and curves; what only one
benchmark shows comes from `sections(read)` in `tasks/<benchmark>/report.py`, if there is one.
The page needs no network and no script, escapes all text, and is the same for the same lake.
"""

import base64
import hashlib
import html
import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NewType, Protocol

import polars as pl
import pyarrow.parquet as pq

from schemas.errors import ConfigError, LakeError
from schemas.manifest import BuildRecord
from schemas.tables import SPLIT_NAMES
from storage.atomic import write_bytes
from storage.layout import build_record_path
from storage.locks import locked
from storage.tables import TableVersion, current_versions
from tasks import plots
from tasks.conventions import CONVENTIONS

REPORTS = "reports"
INDEX = "index"
EXAMPLES = 3
MOST_BARS = 60
MOST_FIGURES = 12
METRIC_ORDER = ("auroc", "aupr", "aupr_in", "aupr_out", "average_precision", "acc", "oscr")
LOWER_IS_BETTER = re.compile(r"^(fpr|fnr|fp|fn|false|detection_delay|delay|error|loss)", re.I)
NOT_RANKED = frozenset({"skew"})

Html = NewType("Html", str)


class Read(Protocol):
    """The current table, or None where the lake has none; all of it unless narrowed."""

    def __call__(
        self, table: str, columns: list[str] | None = None, where: pl.Expr | None = None
    ) -> pl.DataFrame | None: ...


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Html]


@dataclass(frozen=True)
class Picture:
    """PNG or JPEG with what is drawn over it: a transparent PNG and boxes (x0, y0, x1, y1, label).

    `size` (width, height) is the grid of the overlay and the boxes; the picture is fitted to it.
    """

    image: bytes
    caption: str
    size: tuple[int, int]
    overlay: bytes | None = None
    boxes: Sequence[tuple[int, int, int, int, str]] = ()


def write_report(lake: Path, benchmark: str) -> Path:
    """Write `<lake>/reports/<benchmark>.html` and the index of all reports."""
    if not benchmark.isidentifier():
        raise ConfigError(f"benchmark is {benchmark!r}, expected a name such as novelcraft")
    versions = current_versions(lake, benchmark)
    if not versions:
        raise LakeError(
            f"no tables of {benchmark} in {lake}; `novelty build {benchmark}` makes them"
        )
    path = lake / REPORTS / f"{benchmark}.html"
    write_bytes(path, render_report(lake, benchmark, versions).encode())
    with locked(lake, REPORTS, 60.0):
        write_bytes(path.with_stem(INDEX), _index(lake).encode())
    return path


def render_report(lake: Path, benchmark: str, versions: Sequence[TableVersion]) -> str:
    """The page. All sections see these versions, even if a build swaps the tables meanwhile."""
    read = _reader(versions)
    sections = [_what_was_built(lake, benchmark, versions, read), _data_quality(read)]
    sections += _balance(read)
    if (own := _module(f"tasks.{benchmark}.report")) is not None:
        sections += own.sections(read)
    sections += _leaderboard(read)
    sections += _curves(read)
    title, about = _names(benchmark)
    return _page(title, about, _tiles(versions, read), sections)


def _reader(versions: Sequence[TableVersion]) -> Read:
    by_table = {version.manifest.table: version for version in versions}

    def read(
        table: str, columns: list[str] | None = None, where: pl.Expr | None = None
    ) -> pl.DataFrame | None:
        version = by_table.get(table)
        if version is None:
            return None
        if where is None:
            return version.read(columns)
        try:
            rows = pl.scan_parquet(version.files, glob=False).filter(where)
            return (rows if columns is None else rows.select(columns)).collect()
        except (OSError, pl.exceptions.ComputeError) as error:
            raise LakeError(
                f"cannot read {version.name}: {error}. Run `novelty verify`."
            ) from error

    return read


def _module(name: str) -> Any:
    """The module, or None if there is none; an error inside it is an error."""
    parent = name.rpartition(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def _names(benchmark: str) -> tuple[str, str]:
    """Title and subtitle: the first line of the configuration's docstring, `Title: what it is`."""
    config = getattr(_module(f"schemas.{benchmark}"), "Config", None)
    title, _, about = ((config and config.__doc__) or "").partition("\n")[0].partition(": ")
    return (title, about[:1].upper() + about[1:]) if about else (benchmark, "")


# ---- building blocks


def text(value: object) -> Html:
    """Plain text, escaped; `between backticks` as code."""
    return Html(re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(value))))


def paragraph(value: str) -> Html:
    return Html(f"<p>{text(value)}</p>")


def heading(value: str) -> Html:
    """A heading inside a section."""
    return Html(f"<h3>{text(value)}</h3>")


def folded(summary: str, *parts: Html) -> Html:
    """Parts that open on a click."""
    return Html(f"<details><summary>{text(summary)}</summary>{''.join(parts)}</details>")


def table(
    frame: pl.DataFrame,
    caption: str = "",
    groups: Sequence[tuple[str, int]] = (),
    marked: Collection[tuple[int, str]] = (),
    names: Mapping[str, str] | None = None,
    right: Collection[str] = (),
) -> Html:
    """Numbers and the columns in `right` to the right, with thousands separators.

    `groups` (title, columns) stand over the column names, which `names` replaces. `marked` (row,
    column) are the best of their column.
    """
    names = names or {}
    right = {name for name, kind in frame.schema.items() if kind.is_numeric() or name in right}
    lines = [f'<p class="caption">{text(caption)}</p>'] if caption else []
    lines.append(f'<div class="scroll" tabindex="0"><table{_class("wide", groups)}><thead>')
    if groups:
        heads = (f'<th colspan="{span}">{text(title)}</th>' for title, span in groups)
        lines.append(f'<tr class="groups">{"".join(heads)}</tr>')
    heads = (
        f"<th{_class('n', name in right)}>{text(names.get(name, name.replace('_', ' ')))}</th>"
        for name in frame.columns
    )
    lines.append(f"<tr>{''.join(heads)}</tr></thead><tbody>")
    for number, row in enumerate(frame.iter_rows()):
        cells = []
        for name, value in zip(frame.columns, row, strict=True):
            kinds = {
                "n": name in right,
                "best": (number, name) in marked,
                "long": isinstance(value, str) and len(value) > 40,
            }
            shown = " ".join(kind for kind, holds in kinds.items() if holds)
            cells.append(f"<td{_class(shown, shown)}>{_cell(value)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    return Html("\n".join(lines))


def _class(name: str, wanted: object) -> str:
    return f' class="{name}"' if wanted else ""


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number_text(value) if isinstance(value, float) else text(value)


def number_text(value: float) -> str:
    """Three decimals; fewer for large numbers, two digits for small ones."""
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def bytes_text(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}"
    return f"{size} B"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figure(data: bytes, caption: str) -> Html:
    """PNG, JPEG, or an SVG of tasks/plots.py, which becomes part of the page to share its ink."""
    if data.startswith((b"<?xml", b"<svg")):
        drawn = _inline_svg(data.decode(), caption)
    else:
        drawn = f'<img src="{_data_uri(data)}" alt="{html.escape(caption)}">'
    return Html(f"<figure>{drawn}<figcaption>{text(caption)}</figcaption></figure>")


def _inline_svg(svg: str, label: str) -> str:
    """Without what only a file of its own needs, and with ids that no other figure has."""
    mark = f"f{hashlib.sha256(svg.encode()).hexdigest()[:10]}-"
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\sxlink:href="', ' href="', svg)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda m: f' id="{mark}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{mark}", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _data_uri(data: bytes) -> str:
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
    kind = next((kind for start, kind in kinds.items() if data.startswith(start)), None)
    if kind is None:
        raise ConfigError(f"a picture begins with {data[:8]!r}, expected PNG or JPEG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def gallery(pictures: Sequence[Picture]) -> Html:
    """Pictures side by side. What is drawn over one goes while the pointer is on it."""
    items = []
    for picture in pictures:
        width, height = picture.size
        fit = f'width="{width}" height="{height}" preserveAspectRatio="none"'
        over = f'<image href="{_data_uri(picture.overlay)}" {fit}/>' if picture.overlay else ""
        over += "".join(
            f'<rect x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}">'
            f"<title>{html.escape(label)}</title></rect>"
            for x0, y0, x1, y1, label in picture.boxes
        )
        items.append(
            f'<figure tabindex="0"><svg viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{html.escape(picture.caption)}">'
            f'<image href="{_data_uri(picture.image)}" {fit}/><g class="over">{over}</g></svg>'
            f"<figcaption>{text(picture.caption)}</figcaption></figure>"
        )
    return Html(f'<div class="gallery">{"".join(items)}</div>')


# ---- sections of every benchmark


def _tiles(versions: Sequence[TableVersion], read: Read) -> list[tuple[str, str]]:
    quarantine = read("quarantine", ["record"])
    tiles = [
        (f"{len(versions):,}", "tables"),
        (f"{sum(version.manifest.rows for version in versions):,}", "rows"),
        (bytes_text(sum(version.manifest.bytes for version in versions)), "of Parquet"),
    ]
    if quarantine is not None:
        tiles.append((f"{quarantine.height:,}", "records in quarantine"))
    return tiles


def _what_was_built(
    lake: Path, benchmark: str, versions: Sequence[TableVersion], read: Read
) -> Section:
    quarantine = read("quarantine", ["table"])
    refused = dict(quarantine["table"].value_counts().iter_rows()) if quarantine is not None else {}
    rows = []
    for version in versions:
        manifest = version.manifest
        metadata = pq.read_schema(version.files[0]).metadata or {}
        rows.append(
            (
                manifest.table,
                manifest.rows,
                bytes_text(manifest.bytes),
                int(refused.get(manifest.table, 0)),
                f"`{manifest.key[:8]}`",
                metadata.get(b"description", b"").decode(),
                f"`{benchmark}/{manifest.table}/current`",
            )
        )
    shown = pl.DataFrame(
        rows,
        schema={
            "table": pl.String,
            "rows": pl.Int64,
            "size": pl.String,
            "quarantined": pl.Int64,
            "version": pl.String,
            "description": pl.String,
            "path": pl.String,
        },
        orient="row",
    )
    parts = [
        paragraph(
            "A table is the Parquet files in its path below the lake folder. A refused record is "
            "counted at the table that it was meant for."
        ),
        table(shown, right=("size",)),
    ]
    return Section("What was built", parts + _sources_and_settings(lake, benchmark))


def _sources_and_settings(lake: Path, benchmark: str) -> list[Html]:
    """From the last finished build. Of a path only its name: the report may leave the machine."""
    path = build_record_path(lake, benchmark)
    if not path.exists():
        return []
    record = BuildRecord.model_validate_json(path.read_bytes())
    parts = []
    if record.sources:
        rows = [(PurePath(s.root).name, s.files, f"`{s.digest}`") for s in record.sources]
        parts.append(
            table(
                pl.DataFrame(rows, schema=["source", "files", "digest"], orient="row"),
                "Raw sources; the digest covers every file name and content",
            )
        )
    settings = [(name, value) for name, value in _flat(record.settings) if name != "lake"]
    if settings:
        frame = pl.DataFrame(settings, schema=["setting", "value"], orient="row")
        parts.append(folded("Settings of the build", table(frame)))
    return parts


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str) and PurePath(value).is_absolute():
            rows.append((prefix + name, PurePath(value).name))
        else:
            rows.append((prefix + name, "–" if value in (None, "", [], {}) else str(value)))
    return rows


def _data_quality(read: Read) -> Section:
    quarantine = read("quarantine")
    if quarantine is None or quarantine.is_empty():
        return Section("Data quality", [paragraph("No record was refused.")])
    by = ["stage", "table", "rule"]
    counts = quarantine.group_by(by).agg(pl.len().cast(pl.Int64).alias("records"))
    examples = (
        quarantine.sort(*by, "shard", "record", "number")
        .group_by(by, maintain_order=True)
        .head(EXAMPLES)
        .select("stage", "rule", "record", "message")
    )
    return Section(
        "Data quality",
        [
            paragraph(
                f"{counted(quarantine.height, 'record')} went to quarantine instead of a table: "
                "rows in = rows out + these. All of them, with their messages, are in the table "
                "`quarantine`."
            ),
            table(counts.sort(by), "Refused records by stage and rule"),
            table(examples, f"Examples, at most {EXAMPLES} of each rule"),
        ],
    )


def _balance(read: Read) -> list[Section]:
    splits = read("splits")
    if splits is None or splits.is_empty() or not {"class", "split"} <= set(splits.columns):
        return []
    used = pl.col("split").is_not_null()
    if "kept" in splits.columns:
        used &= pl.col("kept")
    where = pl.when(used).then("split").otherwise(pl.lit("unused")).alias("split")
    extra = [name for name in ("protocol", "role") if name in splits.columns]
    counts = (
        splits.with_columns(where, pl.col(extra).fill_null("none"))
        .group_by(*extra, "class", "split")
        .agg(pl.len().cast(pl.Int64).alias("count"))
    )
    present = set(counts["split"])
    columns = [name for name in (*SPLIT_NAMES, "unused") if name in present]
    wide = _wide(counts, [*extra, "class"], columns)
    summary = (
        wide.group_by(extra or pl.lit("all").alias("samples"))
        .agg(pl.col("class").n_unique().cast(pl.Int64).alias("classes"), pl.col(columns).sum())
        .sort(extra or pl.first())
    )
    parts = [table(summary, "Samples by split; unused ones are filtered or in no split")]
    colours = dict(zip(SPLIT_NAMES, plots.COLOURS, strict=False)) | {"unused": plots.GREY}
    protocols = (
        wide.partition_by("protocol", maintain_order=True) if "protocol" in extra else [wide]
    )
    for part in protocols[:MOST_FIGURES]:
        classes = part.group_by("class").agg(pl.col(columns).sum()).sort("class")
        draw = plots.stacked_bars if classes.height <= MOST_BARS else plots.ranked_sizes
        name = f", protocol {part['protocol'][0]}" if "protocol" in extra else ""
        caption = f"Samples by class and split{name}; classes: {classes.height:,}"
        parts.append(figure(draw(classes, "Samples", colours), caption))
    if len(protocols) > MOST_FIGURES:
        parts.append(
            paragraph(f"Drawn are the first {MOST_FIGURES} of {len(protocols)} protocols.")
        )
    return [Section("Classes and splits", parts)]


def _wide(counts: pl.DataFrame, index: list[str], columns: list[str]) -> pl.DataFrame:
    """One row per `index`, one column per value of `split`; 0 where there is none."""
    return (
        counts.group_by(index)
        .agg(pl.col("count").filter(pl.col("split") == name).sum().alias(name) for name in columns)
        .sort(index)
    )


def _in_order(splits: Collection[str]) -> list[str]:
    """The test split first."""
    order = ("test", "valid", "train")
    return sorted(splits, key=lambda s: (order.index(s) if s in order else len(order), s))


def _leaderboard(read: Read) -> list[Section]:
    metrics = read("metrics")
    if metrics is None or metrics.is_empty():
        return []
    run = ["protocol", "detector", "backbone", "split"]
    value = pl.col("value")
    # In table order, as the last digit of a mean depends on the order of its terms.
    cells = metrics.group_by(*run, "convention", "metric", maintain_order=True).agg(
        value.mean().alias("mean"),
        value.std().alias("deviation"),
        value.count().alias("found"),
        pl.len().alias("runs"),
    )
    rows = metrics.group_by(run).agg(
        pl.col("seed").n_unique().cast(pl.Int64).alias("seeds"),
        pl.col("n").max().alias("samples"),
        pl.col("convention").unique().sort().alias("conventions"),
    )
    parts = [
        paragraph(
            "Mean ± standard deviation over seeds. Of each protocol the best detector is marked, "
            "where there are several. A dash: the convention calls the number infeasible, or there "
            "is no such metric."
        )
    ]
    for split in _in_order(set(rows["split"])):
        here = rows.filter(pl.col("split") == split)
        # Runs that follow other conventions have other columns: they get a table of their own.
        for conventions in sorted({tuple(names) for names in here["conventions"].to_list()}):
            chosen = here.filter(pl.col("conventions") == pl.lit(list(conventions)))
            shown, groups, marked = _board(chosen, cells, list(conventions))
            names = {c: c.partition("/")[2].replace("_", " ") for c in shown.columns if "/" in c}
            parts.append(table(shown, f"Split {split}", groups, marked, names, names))
    used = [CONVENTIONS[name] for name in sorted(set(metrics["convention"])) if name in CONVENTIONS]
    if used:
        dumped = [convention.model_dump(mode="json") for convention in used]
        frame = pl.DataFrame({"rule": list(dumped[0])[1:]}).with_columns(
            pl.Series(one["name"], [_rule(v) for v in list(one.values())[1:]]) for one in dumped
        )
        parts.append(folded("What the conventions mean", table(frame)))
    return [Section("Leaderboard", parts)]


def _rule(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def _board(
    rows: pl.DataFrame, cells: pl.DataFrame, conventions: list[str]
) -> tuple[pl.DataFrame, list[tuple[str, int]], set[tuple[int, str]]]:
    """One row per run, best first within its protocol; header groups; cells of the best."""
    run = ["protocol", "detector", "backbone", "split"]
    cells = cells.join(rows.select(run), on=run, how="semi")
    order = {name: number for number, name in enumerate(METRIC_ORDER)}
    columns, groups = [], [("", 5)]
    for convention in conventions:
        metrics = set(cells.filter(pl.col("convention") == convention)["metric"])
        ordered = sorted(metrics, key=lambda m: (m in NOT_RANKED, order.get(m, len(order)), m))
        columns += [(convention, metric) for metric in ordered]
        groups.append((convention, len(ordered)))
    named = [f"{convention}/{metric}" for convention, metric in columns]
    spread = cells.with_columns(pl.concat_str("convention", "metric", separator="/").alias("to"))
    means = rows.join(
        spread.group_by(run).agg(
            pl.col("mean").filter(pl.col("to") == name).first().alias(name) for name in named
        ),
        on=run,
    )
    first = named[0]
    best_first = not LOWER_IS_BETTER.match(columns[0][1])
    means = means.sort(
        "protocol", first, "detector", "backbone",
        descending=[False, best_first, False, False], nulls_last=True,
    )  # fmt: skip
    texts = spread.with_columns(
        pl.struct("mean", "deviation", "found", "runs")
        .map_elements(_seeds_text, return_dtype=pl.String)
        .alias("text")
    )
    shown = means.select(*run, "seeds", "samples").join(
        texts.group_by(run).agg(
            pl.col("text").filter(pl.col("to") == name).first().alias(name) for name in named
        ),
        on=run,
        how="left",
        maintain_order="left",
    )
    marked = set()
    for (_, metric), name in zip(columns, named, strict=True):
        if metric in NOT_RANKED:
            continue
        best = pl.col(name).min() if LOWER_IS_BETTER.match(metric) else pl.col(name).max()
        several = pl.col(name).count() > 1
        hits = means.select(((pl.col(name) == best) & several).over("protocol")).to_series()
        marked |= {(row, name) for row in hits.fill_null(False).arg_true().to_list()}
    return (
        shown.select("detector", "backbone", "protocol", "seeds", "samples", *named),
        groups,
        marked,
    )


def _seeds_text(cell: Mapping[str, Any]) -> str | None:
    if cell["mean"] is None:
        return None
    shown = number_text(cell["mean"])
    if cell["deviation"] is not None:
        shown += f" ± {number_text(cell['deviation'])}"
    return shown if cell["found"] == cell["runs"] else f"{shown} ({cell['found']}/{cell['runs']})"


def _curves(read: Read) -> list[Section]:
    points = read(
        "curves",
        ["protocol", "split", "convention", "detector", "backbone", "seed", "curve", "x", "y"],
    )
    if points is None or points.is_empty():
        return []
    points = points.with_columns(run_name().alias("run"))
    runs = sorted(set(points["run"]))
    lines = {
        run: (
            plots.COLOURS[number % len(plots.COLOURS)],
            plots.DASHES[number // len(plots.COLOURS) % len(plots.DASHES)],
        )
        for number, run in enumerate(runs)
    }
    alike: dict[tuple[Any, ...], list[str]] = {}
    for protocol, split, name in points.select("protocol", "split", "convention").unique().rows():
        alike.setdefault((protocol, split, *_curve_rules(name)), []).append(name)
    order = _in_order(set(points["split"]))
    found = [(order.index(key[1]), key[0], sorted(names)) for key, names in alike.items()]
    parts = []
    for split, protocol, names in sorted(found)[:MOST_FIGURES]:
        chosen = points.filter(protocol=protocol, split=order[split], convention=names[0])
        caption = f"Protocol {protocol}, split {order[split]}, convention {', '.join(names)}"
        parts.append(figure(plots.roc_and_pr(chosen, lines), caption))
    if len(found) > MOST_FIGURES:
        parts.append(
            paragraph(
                f"Drawn are {MOST_FIGURES} of {len(found)} sets of curves; all points are in the "
                "table `curves`."
            )
        )
    return [Section("ROC and precision-recall curves", parts)]


def _curve_rules(name: str) -> tuple[Any, ...]:
    """Conventions that agree in these draw the same curves."""
    rule = CONVENTIONS.get(name)
    return (rule.positive, rule.score_direction, rule.normal_share) if rule else (name,)


def run_name() -> pl.Expr:
    """`detector` or `detector · backbone`."""
    backbone = pl.col("backbone")
    return (
        pl.when(backbone == "none")
        .then(pl.col("detector"))
        .otherwise(pl.concat_str("detector", backbone, separator=" · "))
    )


# ---- pages


def _index(lake: Path) -> str:
    """A card per report in the lake."""
    cards = []
    for path in sorted((lake / REPORTS).glob("*.html")):
        versions = current_versions(lake, path.stem)
        if path.stem == INDEX or not versions:
            continue
        title, about = _names(path.stem)
        facts = " · ".join(
            f"<b>{text(value)}</b> {text(name)}"
            for value, name in _tiles(versions, _reader(versions))
        )
        cards.append(
            f'<li><a href="{html.escape(path.name)}"><h2>{text(title)}</h2></a>'
            f"<p>{text(about)}</p><p>{facts}</p></li>"
        )
    body = f'<ul class="cards">{"".join(cards)}</ul>'
    return _document("Reports", f"<header><h1>Reports</h1></header><main>{body}</main>")


def _page(
    title: str, about: str, tiles: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    anchors = _anchors([section.title for section in sections])
    contents = "".join(
        f'<li><a href="#{anchor}">{text(section.title)}</a></li>'
        for anchor, section in zip(anchors, sections, strict=True)
    )
    facts = "".join(f"<li><b>{text(value)}</b> {text(name)}</li>" for value, name in tiles)
    body = "\n".join(
        f'<section id="{anchor}"><h2><a href="#{anchor}">{text(section.title)}</a></h2>\n'
        + "\n".join(section.parts)
        + "\n</section>"
        for anchor, section in zip(anchors, sections, strict=True)
    )
    return _document(
        title,
        f'<header><p class="up"><a href="{INDEX}.html">All reports</a></p>'
        f"<h1>{text(title)}</h1><p>{text(about)}</p>"
        f'<ul class="tiles">{facts}</ul></header>\n'
        f'<div class="page"><nav aria-label="Contents"><ol>{contents}</ol></nav>\n'
        f"<main>\n{body}\n</main></div>",
    )


def _anchors(titles: Sequence[str]) -> list[str]:
    anchors: list[str] = []
    for title in titles:
        anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        anchors.append(anchor if anchor not in anchors else f"{anchor}-{len(anchors)}")
    return anchors


def _document(title: str, body: str) -> str:
    """No source but the page itself may be loaded, and no script run, whatever a record says."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


_CSS = """
:root {
  --paper: #fdfcfa; --ink: #22252a; --soft: #666c75; --line: #e3e0da; --tint: #f4f2ed;
  --link: #2563b0; --best: #fbe9bf; --novel: #e5308a; --shade: #22252a40;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171b; --ink: #e2e4e8; --soft: #9aa1ac; --line: #30343b; --tint: #1d2026;
    --link: #86b6f2; --best: #4b3d14; --novel: #ff5cab; --shade: #0009;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 78rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans",
  "Liberation Sans", sans-serif;
}
h1 { margin: 0; font-size: 2.3rem; line-height: 1.15; letter-spacing: -.02em; }
h2 { margin: 0 0 .8rem; font-size: 1.4rem; letter-spacing: -.01em; }
h3 { margin: 1.6rem 0 .4rem; font-size: 1.05rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
h2 a { color: inherit; }
code { font: .88em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1.4rem; margin-bottom: 2rem; }
header p { color: var(--soft); margin: .3rem 0 0; }
header .up { font-size: .88rem; margin-bottom: .6rem; }
.tiles, .cards, nav ol { list-style: none; margin: 0; padding: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem 2.4rem; margin-top: 1.3rem;
  color: var(--soft); }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.2; color: var(--ink);
  font-variant-numeric: tabular-nums; }
.cards { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); }
.cards li { border: 1px solid var(--line); border-radius: .6rem; padding: 1.1rem 1.3rem;
  background: var(--tint); }
.cards h2 { margin: 0; }
.cards p { margin: .4rem 0 0; color: var(--soft); }
.cards b { color: var(--ink); }
nav { font-size: .92rem; margin-bottom: 2rem; }
nav li { margin: .25rem 0; }
nav a { color: var(--soft); }
section { margin-bottom: 3.2rem; scroll-margin-top: 1rem; }
@media (min-width: 66rem) {
  .page { display: grid; grid-template-columns: 11.5rem minmax(0, 1fr); gap: 3rem; }
  nav { position: sticky; top: 1.5rem; align-self: start; max-height: 95vh; overflow: auto; }
}
.scroll {
  overflow-x: auto; margin: 1rem 0 1.6rem;
  background:
    linear-gradient(to left, var(--paper) 1rem, transparent 2.2rem) right / 2.2rem 100% local,
    linear-gradient(to left, var(--shade), transparent) right / 1rem 100% scroll;
  background-repeat: no-repeat;
}
table { border-collapse: collapse; font-size: .88rem; line-height: 1.4;
  font-variant-numeric: tabular-nums lining-nums; }
.caption { color: var(--soft); font-size: .88rem; margin: 1.4rem 0 -.4rem; }
th, td { padding: .38rem .55rem; text-align: left; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
.wide td:first-child { position: sticky; left: 0; background: var(--paper); }
td { border-top: 1px solid var(--line); max-width: 26rem; overflow-wrap: break-word; }
thead th { font-weight: 600; color: var(--soft); vertical-align: bottom; white-space: nowrap; }
.groups th { color: var(--ink); border-bottom: 1px solid var(--line); }
.groups th:empty { border: 0; }
.n { text-align: right; white-space: nowrap; }
.long { min-width: 14rem; }
td code { white-space: nowrap; }
tbody tr:hover td { background: var(--tint); }
.best, tbody tr:hover .best { background: var(--best); font-weight: 650; }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .92rem; }
figure { margin: 1.2rem 0 2rem; }
figure > svg, figure > img { display: block; max-width: 100%; height: auto; }
figure text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .4rem; max-width: 46rem; }
.gallery { display: grid; gap: 1.3rem 1.1rem; margin: 1.2rem 0 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(12.5rem, 45%), 1fr)); }
.gallery figure { margin: 0; }
.gallery svg { width: 100%; border-radius: .4rem; background: var(--tint); }
.gallery rect { fill: none; stroke: var(--novel); stroke-width: 1.2;
  vector-effect: non-scaling-stroke; }
.gallery .over image { image-rendering: pixelated; }
.gallery .over { transition: opacity .15s; }
.gallery figure:hover .over, .gallery figure:focus .over { opacity: 0; }
.gallery figcaption { line-height: 1.35; }
@media (max-width: 40rem) {
  .page figure { overflow-x: auto; }
  figure > svg[width] { width: auto; max-width: none; min-width: 34rem; }
}
@media print {
  :root { --paper: #fff; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .up, summary { display: none; }
  .page { display: block; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  td { max-width: none; overflow-wrap: anywhere; }
  .wide { font-size: 6pt; }
  .wide .n { white-space: normal; }
  td code { white-space: normal; }
  figure, tr { break-inside: avoid; }
  h2, h3, .caption { break-after: avoid; }
  section { margin-bottom: 1.5rem; }
}
"""
