"""Items made by another thread."""

from __future__ import annotations

import threading

import pytest

from recbft.training.background import prefetched


def test_items_come_in_order():
    assert list(prefetched(iter(range(100)))) == list(range(100))
    assert list(prefetched(iter([]))) == []
    assert list(prefetched(iter([None, 0, None]))) == [None, 0, None]


def test_the_next_one_is_made_while_one_is_worked_on():
    made = [threading.Event() for _ in range(3)]

    def items():
        for number, event in enumerate(made):
            event.set()
            yield number

    given = prefetched(items())
    assert next(given) == 0
    assert made[1].wait(30), "nothing is made ahead"
    assert not made[2].is_set()
    assert list(given) == [1, 2]


def test_what_making_one_raises_comes_where_it_would_be_given():
    def items():
        yield 1
        raise ValueError("no more")

    given = prefetched(items())
    assert next(given) == 1
    with pytest.raises(ValueError, match="no more"):
        next(given)


def test_given_up_early_it_ends_its_thread():
    before = threading.active_count()
    given = prefetched(iter(range(10)))
    next(given)
    given.close()
    assert threading.active_count() == before
