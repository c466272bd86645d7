"""Building blocks of a report: frames, pictures and words in, escaped HTML out."""

import base64
import hashlib
import html
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

import polars as pl

from schemas.errors import ConfigError

SORTABLE_FROM = 6
MOST_ROWS_IN_VIEW = 40
SMALL_FIGURE_POINTS = 340  # such a figure is readable on a phone as it is

Html = NewType("Html", str)


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
    column) are the best of their column. A long table can be sorted by a click on a column's name,
    a very long one scrolls in a box of its own.
    """
    names = names or {}
    right = {name for name, kind in frame.schema.items() if kind.is_numeric() or name in right}
    lines = [f'<p class="caption">{text(caption)}</p>'] if caption else []
    box = "scroll tall" if frame.height > MOST_ROWS_IN_VIEW else "scroll"
    kinds = {"wide": groups, "sortable": frame.height >= SORTABLE_FROM}
    classes = " ".join(kind for kind, holds in kinds.items() if holds)
    label = html.escape(caption or "Table")
    lines.append(f'<div class="{box}" tabindex="0" role="region" aria-label="{label}">')
    lines.append(f"<table{_class(classes, classes)}><thead>")
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
                "two": isinstance(value, str) and "\n" in value,
            }
            shown = " ".join(kind for kind, holds in kinds.items() if holds)
            cells.append(f"<td{_class(shown, shown)}>{_cell(value)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    return Html("\n".join(lines))


def _class(name: str, condition: object) -> str:
    return f' class="{name}"' if condition else ""


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
    """PNG, JPEG, or an SVG of plots.py, which becomes part of the page to share its ink."""
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
    width = re.search(r'width="([\d.]+)pt"', svg)
    small = _class("small", width is not None and float(width[1]) < SMALL_FIGURE_POINTS)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"{small}', 1)


def _data_uri(data: bytes) -> str:
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
    kind = next((kind for start, kind in kinds.items() if data.startswith(start)), None)
    if kind is None:
        raise ConfigError(f"a picture begins with {data[:8]!r}, expected PNG or JPEG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def gallery(pictures: Sequence[Picture], wide: bool = False) -> Html:
    """Pictures side by side, `wide` ones in fewer columns.

    What is drawn over one goes while the pointer is on it.
    """
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
    kind = "gallery strips" if wide else "gallery"
    return Html(f'<div class="{kind}">{"".join(items)}</div>')
