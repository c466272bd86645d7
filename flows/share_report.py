"""A benchmark's report, written and put where others find it."""

from pathlib import Path

from storage.remote import pull_folder, push_file
from tasks.report import REPORTS, write_report


def share_report(lake: Path, benchmark: str, *, anew: bool = True) -> str:
    """Write the benchmark's report and the index; says where, in the bucket if the lake is one."""
    pull_folder(lake, REPORTS, ".html")  # the index lists the reports of other machines too
    path = write_report(lake, benchmark, anew=anew)
    push_file(lake, path.with_stem("index"))
    return push_file(lake, path)
