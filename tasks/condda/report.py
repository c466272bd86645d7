"""What only CONDDA and OND show: tests, when agents noticed the change, what they discovered.

Enters: the tables tests, sessions, results, session_measures, characterization, program. Leaves:
sections.
"""

import polars as pl

from tasks.report import Html, Read, Section, figure, paragraph, table
from tasks.report.plots import COLOURS, DASHES, marked_lines

SHOWN_TESTS = 8
PLACE = ["session_id", "test_id"]
SIDE_BY_SIDE = (
    ("m_num_stats", "GT_indx"),
    ("m_num_stats", "P_indx_0.5"),
    ("m_num", "0.5"),
    ("m_is_cdt_and_is_early", "Is CDT"),
    ("m_is_cdt_and_is_early", "Is Early"),
    ("m_acc", "pre_top1"),
    ("m_acc", "post_top1"),
    ("m_ndp", "accuracy_0.5"),
    ("m_ndp", "f1_0.5"),
)
DISCOVERY = (
    "nmi",
    "ari",
    "purity",
    "discovery_accuracy",
    "k_plus_1_accuracy",
    "clusters_used",
    "novel_classes",
)


def sections(read: Read) -> list[Section]:
    """Tests, detection, program metrics, both forms of the metrics, discovery."""
    found = [_tests(read), _detection(read), _program(read), _both_forms(read), _discovery(read)]
    return [section for section in found if section is not None]


def _tests(read: Read) -> Section | None:
    tests = read("tests")
    if tests is None or tests.is_empty():
        return None
    said = paragraph(
        "Rows are counted from 0. The world changes at change_row, which is what the red light "
        "tells; the first novel sample may come later."
    )
    return Section("Tests", [said, table(tests)])


def _detection(read: Read) -> Section | None:
    sessions, tests = read("sessions"), read("tests")
    if sessions is None or tests is None:
        return None
    free = sessions.filter(~pl.col("red_light"))
    posted = (pl.col("type") == "detection") & pl.col("session_id").is_in(
        free["session_id"].implode()
    )
    posted_tests = read("results", ["test_id"], posted)
    if posted_tests is None or posted_tests.is_empty():
        return None
    shown = posted_tests["test_id"].unique().sort()[:SHOWN_TESTS]
    columns = ["session_id", "test_id", "position", "numbers"]
    results = read("results", columns, posted & pl.col("test_id").is_in(shown.implode()))
    assert results is not None
    chosen = (
        results.join(free.select(*PLACE, "agent", "protocol"), on=PLACE)
        .with_columns(pl.col("numbers").list.first().alias("y"))
        .drop_nulls("y")
    )
    if chosen.is_empty():
        return None
    points = chosen.sort("test_id", "agent", "position").select(
        pl.col("test_id").alias("panel"),
        pl.col("agent").alias("line"),
        pl.col("position").cast(pl.Float64).alias("x"),
        "y",
    )
    names = points["line"].unique().sort().to_list()
    lines = {name: (COLOURS[n % len(COLOURS)], DASHES[n % 4]) for n, name in enumerate(names)}
    marks = {row["test_id"]: (row["change_row"], row["novel_row"]) for row in tests.to_dicts()}
    drawn = figure(
        marked_lines(points, marks, lines, "Row of the test"),
        "P(world changed) as posted, without the red light",
    )
    return Section("When agents notice the change", [drawn])


def _program(read: Read) -> Section | None:
    program = read("program")
    if program is None or program.is_empty():
        return None
    wide = program.pivot(
        "metric", index=["owner", "agent", "protocol", "domain", "tests"], values="value"
    ).sort("protocol", "domain", "owner", "agent")
    if not wide["owner"].str.len_bytes().sum():  # no server with tokens
        wide = wide.drop("owner")
    said = paragraph(
        "M1 rows from novelty to detection, M2 percent of tests correctly detected, M2.1 percent "
        "with an alarm before novelty; false_alarms percent of tests without novelty with one, "
        "nuisance_alarms of those in which known classes are shown otherwise; M3 and M4 accuracy "
        "after novelty over the baseline's before it, with system and with given detection; M5 and "
        "M6 the agent's share of the accuracy after novelty, over all of it and at the end. A "
        "dash: not applicable."
    )
    return Section("Program metrics", [said, table(wide)])


def _both_forms(read: Read) -> Section | None:
    measures, sessions = read("session_measures"), read("sessions")
    if measures is None or sessions is None or measures.is_empty():
        return None
    wanted = pl.DataFrame(list(SIDE_BY_SIDE), schema=["metric", "name"], orient="row")
    chosen = measures.join(wanted, on=["metric", "name"], maintain_order="right").join(
        sessions.filter(~pl.col("red_light") & (pl.col("protocol") == "OND")).select(
            *PLACE, "agent"
        ),
        on=PLACE,
    )
    if chosen.is_empty():
        return None
    both = (
        chosen.with_columns(pl.concat_str("metric", pl.lit(" "), "name").alias("measure"))
        .group_by("agent", "measure", "form", maintain_order=True)
        .agg(pl.col("value").mean())
        .pivot("form", index=["agent", "measure"], values="value")
        .sort("agent", maintain_order=True)
    )
    said = paragraph(
        "OND, without the red light, means over tests. `upstream` is the public evaluation fault "
        "for fault; `corrected` mends them: never detected is no number instead of 1, the first "
        "novel row belongs to the part after novelty, a detection in the last row counts, and an "
        "unknown or discovered column is right for a novel class."
    )
    return Section("Public evaluation and corrected one", [said, table(both)])


def _discovery(read: Read) -> Section | None:
    found, sessions = read("characterization"), read("sessions")
    if found is None or sessions is None or found.is_empty():
        return None
    rows = found.filter((pl.col("part") == "post") & pl.col("metric").is_in(DISCOVERY)).join(
        sessions.select(*PLACE, "agent", "domain", "red_light"), on=PLACE
    )
    means = rows.group_by("agent", "domain", "red_light", "metric").agg(pl.col("value").mean())
    wide = means.pivot("metric", index=["agent", "domain", "red_light"], values="value").sort(
        "domain", "agent", "red_light"
    )
    wide = wide.select("agent", "domain", "red_light", *(m for m in DISCOVERY if m in wide))
    delays = (
        found.filter(pl.col("metric") == "discovery_delay")
        .join(sessions.select(*PLACE, "agent", "red_light"), on=PLACE)
        .group_by("agent", "red_light")
        .agg(
            pl.len().alias("novel_classes_in_tests"),
            pl.col("value").is_not_null().sum().alias("discovered"),
            pl.col("value").mean().alias("mean_delay_rows"),
        )
        .sort("agent", "red_light")
    )
    parts: list[Html] = [
        paragraph(
            "CONDDA, rows after novelty, means over tests: agreement of the chosen columns with "
            "the true classes, accuracy of discovered columns matched to novel classes, and "
            "accuracy with all of them collapsed into unknown; with and without the red light."
        ),
        table(wide),
        table(delays, "Rows from the first sample of a novel class to its discovery"),
    ]
    return Section("Discovered classes", parts)
