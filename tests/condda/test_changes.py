"""Change rules: false alarms at the stated rate, soon after a change, rounds that do not matter."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tasks.condda.changes import change_names, find_change
from tasks.condda.changes.base import Bets, BetSettings, ChangeRule
from tasks.condda.changes.martingale import _boundary


def rule(name: str, held_out: np.ndarray, **settings: object) -> ChangeRule:
    kind = find_change(name)
    return kind(kind.resolve(None, settings), np.asarray(held_out, float))


def test_rules_are_found_by_their_files_and_say_what_they_take() -> None:
    assert change_names() == ("cusum", "martingale")
    for name in change_names():
        kind = find_change(name)
        assert kind.version >= 1
        for field, info in kind.configuration.model_fields.items():
            assert info.description, f"{name}.{field}"
    with pytest.raises(ConfigError, match="no change rule 'x'; there are: cusum, martingale"):
        find_change("x")
    with pytest.raises(ConfigError, match="novel_shares"):
        find_change("cusum").resolve(None, {"novel_shares": "0.5,1.0"})


@pytest.mark.parametrize("held_out", [40, 400])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("martingale", {"false_alarms": 0.1}), ("cusum", {"alarm_rows": 4000})],
)
def test_false_alarms_are_no_more_often_than_stated(name, settings, held_out) -> None:
    """Bound by theory for any number of held-out samples: at most 10 %, here of 400 streams."""
    alarms = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        change = rule(name, rng.standard_normal(held_out), **settings)
        alarms += change.update(rng.standard_normal(400))[-1] > 0.5
    # 3.3 standard deviations above the bound; without the bound being kept it is far above.
    assert alarms / 400 <= 0.15


@pytest.mark.parametrize(
    ("settings", "rows", "least"),
    [
        ({}, 45, 0.012),
        ({"horizon": 45}, 45, 0.035),
        ({"horizon": 20}, 60, 0.035),
        ({"false_alarms": 0.0001}, 45, 0.0),
        pytest.param({}, 1100, 0.03, marks=pytest.mark.slow),
    ],
)
def test_most_of_the_false_alarms_allowed_are_spent_on_tests_as_short_as_there_are(
    settings: dict, rows: int, least: float
) -> None:
    """Of 1,000 unchanged streams; the endless bound alone gave 3 in streams of 45 rows."""
    alarms = 0
    for seed in range(1000):
        values = np.random.default_rng([seed, 1]).standard_normal(100 + rows)
        alarms += rule("martingale", values[:100], **settings).update(values[100:])[-1] > 0.5
    assert least <= alarms / 1000 <= 0.065  # 5 %, and 2.2 standard deviations


def test_a_boundary_is_the_same_however_it_is_asked_for() -> None:
    """In one process or another, for many rows at once or one; and it ends in the endless bound."""
    scores = np.random.default_rng(3).standard_normal(1200)
    at_once = rule("martingale", scores[:50]).update(scores)
    _boundary.cache_clear()
    change = rule("martingale", scores[:50])
    by_row = np.concatenate([change.update(scores[row : row + 1]) for row in range(1200)])
    np.testing.assert_allclose(by_row, at_once, rtol=1e-9)
    heights = change.boundary.at(np.array([1023, 1024, 10**6]))
    left = 0.05 * (1 - 1024 / (1024 + 64))
    assert heights[0] < heights[1] == heights[2] == pytest.approx(-np.log(left))
    # Fewer than streams can tell: then Ville's bound holds in each step; 16 rows have a fifth.
    rare = rule("martingale", scores[:50], false_alarms=0.0001).boundary.at(np.zeros(1))
    assert rare == pytest.approx(-np.log(0.0001 / 5))
    # With a horizon, nothing comes after it.
    ending = rule("martingale", scores[:50], horizon=30)
    ending.update(scores[50:80])
    assert ending.update(np.full(500, 9.0))[-1] == ending.highest < 0.5


def test_agents_in_several_threads_share_a_boundary() -> None:
    rule = find_change("martingale")
    rows, begin = np.arange(400), threading.Barrier(8)

    def ask(_: int) -> np.ndarray:
        begin.wait()
        return _boundary(rule.resolve(None, {"half_rows": 65}), 33).at(rows)

    with ThreadPoolExecutor(8) as threads:
        heights = list(threads.map(ask, range(8)))
    alone = _boundary.__wrapped__(rule.resolve(None, {"half_rows": 65}), 33).at(rows)
    for height in heights:
        np.testing.assert_array_equal(height, alone)


@pytest.mark.parametrize("size", [7, 40, 93, 250])
def test_bets_are_fair_for_every_number_of_ranks(size: int) -> None:
    """A rank is any of 1 to `size` alike: no bet gains in the mean, and none is idle."""
    gains = np.exp(Bets(BetSettings()).gains(np.arange(1, size + 1) / size, np.full(size, size)))
    np.testing.assert_allclose(gains.mean(0), 1)
    assert (gains[0] > 1).all() and (gains[-1] < 1).all()


@pytest.mark.parametrize("name", change_names())
def test_a_change_is_detected_soon(name) -> None:
    delays = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        scores = rng.standard_normal(300)
        scores[200:] += 5 * (rng.random(100) < 0.5)
        chances = rule(name, rng.standard_normal(100)).update(scores)
        assert chances[-1] > 0.99
        delays.append(int((chances > 0.5).argmax()) - 200)
    assert np.median(delays) <= 15
    assert sum(delay < 0 for delay in delays) <= 7


@given(
    name=st.sampled_from(change_names()),
    scores=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    held_out=st.lists(st.integers(0, 9), min_size=1, max_size=30),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_p_never_falls_and_rounds_and_a_restart_do_not_matter(
    name: str, scores: list[int], cuts: list[int], held_out: list[int]
) -> None:
    rows = np.array(scores, dtype=float)
    whole = rule(name, held_out).update(rows)
    assert (np.diff(whole) >= 0).all() and ((whole >= 0) & (whole <= 1)).all()
    change, split = rule(name, held_out), []
    for part in np.split(rows, sorted(cuts)):
        split.append(change.update(part))
        again = rule(name, held_out)
        again.restore({key: value.copy() for key, value in change.state().items()})
        change = again
    np.testing.assert_allclose(np.concatenate(split), whole, rtol=1e-9)
    # A row that is less novel than all others is never more evidence than one that is more.
    lower, higher = (rule(name, held_out).update(np.append(rows, end))[-1] for end in (-1.0, 10.0))
    assert lower <= higher


def test_p_values_by_hand() -> None:
    change = rule("martingale", [1.0, 2.0, 3.0])
    # Among 3: one is as high as 3; among 4 (1, 2, 3, 3): none above 4; among 5: all five.
    assert change._p_values(np.array([3.0, 4.0, 0.0])).tolist() == [2 / 4, 1 / 5, 6 / 6]
