"""The leaderboard as SQL: detectors ranked in each protocol and over protocols, by each metric.

One query over the shared tables `metrics`, `runs` and `score_settings`. The catalogue has it as the
view `lake.leaderboard`; the command and the report run it on rows that they chose.

A detector is a model with its network, preset, changed settings and score. Its seeds and protocols
belong to one detector; where a protocol has several configurations of these same words, each is a
detector by itself and the settings that differ tell them apart. Everything is counted within a
benchmark, split, convention and metric:

- in a protocol: mean and sample deviation over seeds, the lowest `low` and the highest `high`;
- protocol `all`: the mean over those protocols that all detectors have, none where there is none.
  Its deviation is over seeds that have all of them, its interval the mean of the bounds, which is
  no narrower than the interval of the mean.
"""

from collections.abc import Sequence

RANKED = (*("auroc", "fpr95", "aupr", "aupr_in", "aupr_out", "average_precision", "acc", "oscr"),)
"""Metrics that detectors are ranked by."""
LOWER_IS_BETTER = ("fpr95",)
CONVENTION = "openood"
"""The convention that all benchmarks have in common."""
ALL_PROTOCOLS = "all"
SOURCES = ("metrics", "runs", "score_settings")
"""Tables that it is made of."""
COLUMNS = {
    "benchmark": "Benchmark",
    "protocol": "Protocol, or `all`: the mean over the protocols that all detectors have",
    "split": "Split that was measured",
    "convention": "Named metric convention",
    "metric": "Metric",
    "rank": "1 is the best mean; ties share a rank",
    "detector": "Model, network, score, and in brackets what sets it apart",
    "preset": "Named settings that it started from",
    "origin": "Where its outputs come from: trained, frozen or imported",
    "mean": "Mean over seeds, then over protocols",
    "deviation": "Sample deviation over seeds; null with fewer than two",
    "low": "Lowest 2.5 % bound of its seeds; mean of these over protocols",
    "high": "Highest 97.5 % bound of its seeds; mean of these over protocols",
    "above_chance": "Whether the interval is clear of chance (auroc 0.5, fpr95 0.95); else null",
    "protocols": "Protocols behind the mean",
    "seeds": "Seeds behind it, the fewest of any protocol; 0 where nothing is drawn",
    "samples": "Samples behind it",
    "detectors": "Detectors that were ranked together",
    "model": "Model or predictor",
    "network": "Network below it",
    "score": "Score",
    "score_id": "Score with its settings",
    "config_ids": "Configurations of its runs, see `runs`",
}
_CLEAN = (
    "replace(regexp_replace(regexp_replace({0}, '\"[^\"]*\": \\{{', '', 'g'), "
    "'[\"{{}}]', '', 'g'), ': ', '=')"
)
"""JSON of settings as words: `a=1, b=2`."""
UNNAMED = "cpu_threads"
"""A setting that is in a name only where nothing else tells two configurations apart."""
_UNNAMED = f'"{UNNAMED}": [0-9]+, |(, )?"{UNNAMED}": [0-9]+'


def leaderboard_sql(
    schema: str = "", protocols: Sequence[str] = (), *, described: bool = True
) -> str:
    """The query, of these protocols or of all; `schema` is put before the names of the tables.

    `described` says whether there is a table `score_settings`.
    """
    metrics, runs, scores = (f"{schema}{name}" for name in SOURCES)
    if not described:
        scores = "(SELECT '' AS benchmark, '' AS score_id, '' AS settings, 0 AS version)"
    quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in protocols)
    condition = f"AND m.protocol IN ({quoted})" if protocols else ""
    metric_names = ", ".join(f"'{name}'" for name in RANKED)
    lower_is_better = ", ".join(f"'{name}'" for name in LOWER_IS_BETTER)
    return f"""
WITH whole AS (
    SELECT m.*, network, preset, naming AS changed, settings, origin, config_id,
        concat_ws(chr(31), m.model, network, preset, naming) AS words
    FROM {metrics} m JOIN (
        SELECT *, regexp_replace(changed, '{_UNNAMED}', '', 'g') AS naming FROM {runs}
    ) USING (benchmark, run_id)
    WHERE m."view" = 'plain' AND subset = 'all' AND phase <> 'after' AND step <= 0 {condition}
    QUALIFY step = min(step) OVER (PARTITION BY benchmark, m.protocol)
), number AS (
    SELECT * FROM whole WHERE metric IN ({metric_names}) AND value IS NOT NULL
), kind AS (
    SELECT DISTINCT benchmark, 'config' AS of, words, protocol, config_id AS id, settings
    FROM number
    UNION ALL
    SELECT DISTINCT benchmark, 'score', number.score, '', score_id,
        coalesce(described.settings || ', version: ' || described.version, '')
    FROM number LEFT JOIN {scores} AS described USING (benchmark, score_id)
), several AS (
    SELECT benchmark, of, words, max(ids) > 1 AS several
    FROM (
        SELECT benchmark, of, words, protocol, count(DISTINCT id) AS ids FROM kind GROUP BY ALL
    ) GROUP BY ALL
), token AS (
    SELECT *, count(*) OVER (PARTITION BY benchmark, of, words, token) AS holders,
        dense_rank() OVER ids + dense_rank() OVER back - 1 AS ids
    FROM (
        SELECT DISTINCT benchmark, of, words, id,
            unnest(string_split({_CLEAN.format("settings")}, ', ')) AS token
        FROM kind
    )
    WINDOW ids AS (PARTITION BY benchmark, of, words ORDER BY id),
        back AS (PARTITION BY benchmark, of, words ORDER BY id DESC)
), apart AS (
    SELECT benchmark, of, words, id, any_value(several) AS several,
        CASE WHEN any_value(several) THEN concat_ws(', ',
            string_agg(token, ', ' ORDER BY token) FILTER (holders < ids AND place <= 3),
            CASE WHEN count(*) FILTER (holders < ids) NOT BETWEEN 1 AND 3
                THEN 'id=' || left(id, 6) END) END AS said
    FROM (
        SELECT *, row_number() OVER (
            PARTITION BY benchmark, of, words, id ORDER BY holders >= ids, token) AS place
        FROM token JOIN several USING (benchmark, of, words)
    )
    GROUP BY benchmark, of, words, id
), named AS (
    SELECT number.*, CASE WHEN c.several THEN config_id ELSE number.words END AS config,
        concat_ws(' · ', model, nullif(network, 'none'), nullif(score, 'none')) AS title,
        concat_ws(', ', nullif({_CLEAN.format("changed")}, ''), c.said, s.said) AS differs
    FROM number
    JOIN apart AS c ON c.of = 'config' AND c.benchmark = number.benchmark
        AND c.words = number.words AND c.id = config_id
    JOIN apart AS s ON s.of = 'score' AND s.benchmark = number.benchmark
        AND s.words = score AND s.id = score_id
), one AS (
    SELECT benchmark, protocol, split, convention, metric, config, score_id,
        avg(value) AS mean, stddev_samp(value) FILTER (seed IS NOT NULL) AS deviation,
        CASE WHEN count(low) = count(*) THEN min(low) END AS low,
        CASE WHEN count(high) = count(*) THEN max(high) END AS high,
        1 AS protocols, count(DISTINCT seed) AS seeds, max(n) AS samples
    FROM named GROUP BY ALL
), shared AS (
    SELECT benchmark, split, convention, metric, protocol
    FROM one JOIN (
        SELECT benchmark, split, convention, metric,
            count(DISTINCT (config, score_id)) AS detectors
        FROM one GROUP BY ALL
    ) USING (benchmark, split, convention, metric)
    GROUP BY ALL HAVING count(*) = any_value(detectors)
), seeded AS (
    SELECT benchmark, split, convention, metric, config, score_id, stddev_samp(mean) AS deviation
    FROM (
        SELECT benchmark, split, convention, metric, config, score_id, seed,
            avg(value) AS mean, count(DISTINCT protocol) AS protocols
        FROM named JOIN shared USING (benchmark, split, convention, metric, protocol)
        WHERE seed IS NOT NULL GROUP BY ALL
    ) JOIN (
        SELECT benchmark, split, convention, metric, count(*) AS protocols FROM shared GROUP BY ALL
    ) USING (benchmark, split, convention, metric, protocols)
    GROUP BY ALL
), every AS (
    SELECT * FROM one
    UNION ALL BY NAME
    SELECT benchmark, '{ALL_PROTOCOLS}' AS protocol, split, convention, metric, config, score_id,
        avg(mean) AS mean, any_value(seeded.deviation) AS deviation,
        CASE WHEN count(low) = count(*) THEN avg(low) END AS low,
        CASE WHEN count(high) = count(*) THEN avg(high) END AS high,
        count(*) AS protocols, min(seeds) AS seeds, sum(samples) AS samples
    FROM one JOIN shared USING (benchmark, split, convention, metric, protocol)
    LEFT JOIN seeded USING (benchmark, split, convention, metric, config, score_id)
    GROUP BY benchmark, split, convention, metric, config, score_id
), detector AS (
    SELECT benchmark, config, score_id, min(model) AS model, min(network) AS network,
        min(preset) AS preset, min(origin) AS origin, min(score) AS score,
        min(title) || CASE WHEN min(differs) = '' THEN '' ELSE ' (' || min(differs) || ')' END
            AS detector,
        list_sort(list(DISTINCT config_id)) AS config_ids
    FROM named GROUP BY ALL
)
SELECT benchmark, protocol, split, convention, metric, rank() OVER (
        PARTITION BY benchmark, protocol, split, convention, metric
        ORDER BY round(CASE WHEN metric IN ({lower_is_better}) THEN mean ELSE -mean END, 9)
    ) AS rank,
    detector, preset, origin, mean, deviation, low, high,
    CASE metric WHEN 'auroc' THEN low > 0.5 WHEN 'fpr95' THEN high < 0.95 END AS above_chance,
    protocols::BIGINT AS protocols, seeds::BIGINT AS seeds, samples::BIGINT AS samples,
    count(*) OVER (PARTITION BY benchmark, protocol, split, convention, metric) AS detectors,
    model, network, score, score_id, config_ids
FROM every JOIN detector USING (benchmark, config, score_id)
ORDER BY benchmark, protocol, split, convention, metric, rank, detector, preset, score_id"""
