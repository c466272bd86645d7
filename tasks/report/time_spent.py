"""How long the stages took, where the lake remembers it (`engine/estimates.py` writes it)."""

import polars as pl

from storage.layout import inner
from tasks.report.blocks import Html, folded, paragraph, table
from tasks.report.reading import Tables

# A line that a killed process left unfinished is passed over.
QUERY = """
    select
        stage,
        count(*) as shards_made,
        sum(records)::bigint as records,
        sum(seconds order by "when", shard) as seconds,
        max(seconds) as longest_shard,
        case when sum(seconds) > 0 then sum(records) / sum(seconds) end as records_per_second
    from read_json(
        $files, format = 'newline_delimited', ignore_errors = true,
        columns = {benchmark: 'varchar', stage: 'varchar', shard: 'varchar', records: 'bigint',
                   seconds: 'double', "when": 'double'}
    )
    where benchmark = $benchmark and records is not null and seconds is not null
    group by stage order by max("when"), stage
"""


def time_spent(read: Tables) -> list[Html]:
    """A table of the stages in the order in which they were last at work, if any was timed."""
    import duckdb

    folder = inner(read.lake) / "timings"
    if not any(folder.glob("*.jsonl")):
        return []
    parameters = {"files": str(folder / "*.jsonl"), "benchmark": read.benchmark}
    with duckdb.connect() as connection:
        rows = connection.execute(QUERY, parameters).fetchall()
    if not rows:
        return []
    names = ["stage", "shards_made", "records", "seconds", "longest_shard", "records_per_second"]
    note = "Seconds of all shards ever made in this lake, added up; shards may run side by side."
    stages = pl.DataFrame(rows, schema=names, orient="row")
    return [folded("Time spent", paragraph(note), table(stages))]
