"""Items made in a thread before they are asked for."""

import threading

import pytest

from tasks.engine.ahead import ahead


def test_order_and_the_limit():
    made = []
    full = threading.Event()

    def items():
        for number in range(10):
            made.append(number)
            if number == 4:
                full.set()
            yield number

    with ahead(items(), 3) as coming:
        assert next(coming) == 0
        assert full.wait(120)
        assert made == [0, 1, 2, 3, 4]  # three wait, one is in hand
        assert list(coming) == list(range(1, 10))


def test_an_error_comes_out_where_the_items_are_taken():
    def items():
        yield 1
        raise ValueError("no more")

    with ahead(items(), 2) as coming:
        assert next(coming) == 1
        with pytest.raises(ValueError, match="no more"):
            next(coming)


def test_leaving_early_closes_the_iterator():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    with ahead(items(), 1) as coming:
        next(coming)
    assert closed.is_set()
