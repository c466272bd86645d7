"""Sections in, one self-contained HTML document out; `page.html` has the style and the script.

The page loads nothing and runs no script but its own, whatever a record says: its policy names
that one by its hash. The script only sorts tables; without it the page is whole.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.report.blocks import Html, text

INDEX = "index"
_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Html]


Tile = tuple[str, str]
"""A number and what it counts."""


def page(
    title: str, about: str, tiles: Sequence[Tile], sections: Sequence[Section], key: str = ""
) -> str:
    """Head with tiles, contents, and the sections; `key` names what the page was made from."""
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
    return document(
        title,
        f'<header><p class="up"><a href="{INDEX}.html">All reports</a></p>'
        f"<h1>{text(title)}</h1><p>{text(about)}</p>"
        f'<ul class="tiles">{facts}</ul></header>\n'
        f'<div class="page"><nav aria-label="Contents"><ol>{contents}</ol></nav>\n'
        f"<main>\n{body}\n</main></div>",
        key,
    )


def _anchors(titles: Sequence[str]) -> list[str]:
    anchors: list[str] = []
    for title in titles:
        anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        anchors.append(anchor if anchor not in anchors else f"{anchor}-{len(anchors)}")
    return anchors


def key_of(path: Path) -> str | None:
    """What a page that was written earlier says it was made from; None if there is no such page."""
    try:
        with path.open(encoding="utf-8") as file:
            key = re.search(r'<meta name="novelty-key" content="(\w+)">', file.read(2000))
    except (OSError, UnicodeDecodeError):
        return None
    return key[1] if key else None


def document(title: str, body: str, key: str = "") -> str:
    template = _TEMPLATE.read_text()
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filled = template.replace("{script-hash}", f"sha256-{digest}")
    filled = filled.replace("{title}", html.escape(title)).replace("{key}", key)
    # Last, so that nothing is looked for in what records say.
    return filled.replace("{body}", body)
