"""Batches that are ready before they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moejob_trainer.data.prefetch import PrefetchIterator
from moejob_trainer.errors import BadData

DEADLINE_SECONDS = 300


class Source:
    """Counts up, and shows when a given number has been made."""

    def __init__(self, announced: int, last: int = 10**9) -> None:
        self.made = 0
        self._announced, self._last = announced, last
        self.reached = threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.made == self._last:
            raise StopIteration
        self.made += 1
        if self.made == self._announced:
            self.reached.set()
        return self.made


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_everything_comes_in_order_and_ends_with_the_source() -> None:
    with PrefetchIterator(iter(range(7)), ahead=3) as items:
        assert list(items) == list(range(7))
        assert next(items, None) is None


def test_what_is_asked_for_next_is_made_before_it_is_asked_for_and_no_more() -> None:
    source = Source(announced=3)
    with PrefetchIterator(source, ahead=3) as items:
        assert source.reached.wait(DEADLINE_SECONDS)
        assert source.made == 3
        assert next(items) == 1


def test_the_thread_ends_with_the_context_though_much_is_left() -> None:
    with PrefetchIterator(Source(announced=1), ahead=2) as items:
        assert next(items) == 1
        assert prefetching_threads()
    assert not prefetching_threads()


def test_what_the_source_raises_reaches_the_reader_after_what_came_before_it_every_time() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise BadData("line 2 is broken")

    with PrefetchIterator(broken(), ahead=3) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(BadData, match="line 2 is broken"):
                next(items)
