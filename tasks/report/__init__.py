"""The report of a benchmark: its current tables in, one self-contained HTML file out.

Every benchmark gets leaderboard, curves, confusions, balance, what was built and data quality; what
only one benchmark shows comes from `sections(read)` in `tasks/<benchmark>/report.py`, if there is
one. The page needs no network, escapes all text, is whole without its script, and is the same for
the same lake.
"""

from tasks.report.blocks import (
    Html,
    Picture,
    bytes_text,
    counted,
    figure,
    folded,
    gallery,
    heading,
    number_text,
    paragraph,
    table,
    text,
)
from tasks.report.confusion import confused
from tasks.report.page import Section
from tasks.report.reading import Read, Tables
from tasks.report.runs import with_names
from tasks.report.write import REPORTS, render_report, write_report

__all__ = [
    "REPORTS",
    "Html",
    "Picture",
    "Read",
    "Section",
    "Tables",
    "bytes_text",
    "confused",
    "counted",
    "figure",
    "folded",
    "gallery",
    "heading",
    "number_text",
    "paragraph",
    "render_report",
    "table",
    "text",
    "with_names",
    "write_report",
]
