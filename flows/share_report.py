"""A benchmark's report, written and put where others find it."""

import os
from pathlib import Path

from flows.report_server import REPORTS_LAKE, REPORTS_URL
from storage.layout import lake_root
from storage.remote import pull_folder, push_file
from tasks.report import REPORTS, write_report


def share_report(lake: Path, benchmark: str, *, anew: bool = True) -> str:
    """Write the benchmark's report and the index; says where, in the bucket if the lake is one."""
    pull_folder(lake, REPORTS, ".html")  # the index lists the reports of other machines too
    path = write_report(lake, benchmark, anew=anew)
    push_file(lake, path.with_stem("index"))
    return push_file(lake, path)


def report_link(lake: Path, benchmark: str, address: str) -> str:
    """A link to the report: on the service's own pages where they show this lake."""
    served, of_lake = os.environ.get(REPORTS_URL), os.environ.get(REPORTS_LAKE)
    if served and of_lake and lake_root(of_lake) == lake:
        return f"{served}/{benchmark}.html"
    return address if address.startswith("s3://") else Path(address).absolute().as_uri()
