"""The keyed work queue, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_operator.runtime.work_queue import Backoff, RateLimiter, Schedule, WorkOutcome, WorkQueue
from virtual_time import run_virtually

KEYS = ["a", "b", "c"]


@dataclass
class Metrics:
    """Records every number."""

    depths: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    endings: list[tuple[float, WorkOutcome]] = field(default_factory=list)

    def set_queue_depth(self, depth: int) -> None:
        self.depths.append(depth)

    def observe_wait(self, waited_seconds: float) -> None:
        self.waits.append(waited_seconds)

    def observe_work(self, seconds: float, outcome: WorkOutcome) -> None:
        self.endings.append((seconds, outcome))


@dataclass
class Worked:
    """Work that takes a while and remembers when it was done on what."""

    seconds: float = 0.0
    answer: Callable[[str, int], float | None] = lambda _key, _count: None
    begun: list[tuple[float, str]] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)
    in_hand: set[str] = field(default_factory=set)
    most_in_hand: int = 0

    async def __call__(self, key: str) -> float | None:
        assert key not in self.in_hand, "two workers on one key"
        self.in_hand.add(key)
        self.most_in_hand = max(self.most_in_hand, len(self.in_hand))
        self.begun.append((now(), key))
        try:
            await asyncio.sleep(self.seconds)
            return self.answer(key, sum(begun == key for _, begun in self.begun))
        finally:
            self.in_hand.discard(key)
            self.ended.append((now(), key))

    @property
    def keys(self) -> list[str]:
        return [key for _, key in self.begun]

    @property
    def times(self) -> list[float]:
        return [round(at, 6) for at, _ in self.begun]


def now() -> float:
    return asyncio.get_running_loop().time()


def worked(
    work: Worked, story: Callable[[WorkQueue[str]], Awaitable[None]], pace: RateLimiter | None = None
) -> Metrics:
    """Runs a queue while a story happens, and until it has nothing more to do."""
    metrics = Metrics()

    async def play() -> None:
        queue = WorkQueue(work, metrics, pace or RateLimiter(workers=2), expected=(TryAgain,), clock=now)
        running = asyncio.create_task(queue.run())
        await story(queue)
        queue.stop()
        await running

    run_virtually(play())
    return metrics


class TryAgain(Exception):
    """An error that the queue expects."""


# --- what is worked on when -----------------------------------------------------------------------------------------


def test_a_key_added_many_times_is_worked_on_once() -> None:
    work = Worked()

    async def story(queue: WorkQueue[str]) -> None:
        for _ in range(5):
            queue.add("a")
        await asyncio.sleep(1)

    worked(work, story)
    assert work.keys == ["a"]


def test_a_key_added_while_it_is_worked_on_comes_up_once_more() -> None:
    work = Worked(seconds=10)

    async def story(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(5)
        queue.add("a")
        queue.add("a", after_seconds=1)
        await asyncio.sleep(30)

    worked(work, story)
    assert work.begun == [(0, "a"), (10, "a")]


@pytest.mark.parametrize(
    ("adds", "expected"),
    [
        pytest.param([3.0], [3.0], id="later"),
        pytest.param([5.0, 2.0], [2.0], id="the earlier of two"),
        pytest.param([2.0, 5.0], [2.0], id="a later one changes nothing"),
        pytest.param([5.0, 0.0], [0.0], id="now instead of later"),
    ],
)
def test_of_several_times_the_earliest_counts(adds: list[float], expected: list[float]) -> None:
    work = Worked()

    async def story(queue: WorkQueue[str]) -> None:
        for seconds in adds:
            queue.add("a", seconds)
        await asyncio.sleep(60)

    worked(work, story)
    assert work.times == expected


def test_work_says_when_it_wants_to_look_again() -> None:
    work = Worked(answer=lambda _, count: 30.0 if count < 3 else None)

    async def story(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(300)

    worked(work, story)
    assert work.times == [0, 30, 60]


def test_no_more_keys_are_in_hand_than_there_are_workers() -> None:
    work = Worked(seconds=1)

    async def story(queue: WorkQueue[str]) -> None:
        for number in range(10):
            queue.add(f"job-{number}")
        await asyncio.sleep(10)

    worked(work, story, RateLimiter(workers=3))
    assert work.most_in_hand == 3
    assert work.times == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_two_looks_at_one_key_lie_apart_and_others_do_not_wait_for_that() -> None:
    work = Worked()

    async def story(queue: WorkQueue[str]) -> None:
        for _ in range(4):
            queue.add("a")
            queue.add("b")
            await asyncio.sleep(0.3)

    worked(work, story, RateLimiter(workers=1, spacing_seconds=0.5))
    assert [(round(at, 6), key) for at, key in work.begun] == [
        (0, "a"),
        (0, "b"),
        (0.5, "a"),
        (0.5, "b"),
        (1, "a"),
        (1, "b"),
    ]


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "chance", "seconds"),
    [
        pytest.param(1, 0.0, 0.05, id="at least half of the first delay"),
        pytest.param(1, 1.0, 0.1, id="at most all of it"),
        pytest.param(2, 1.0, 0.2, id="doubled"),
        pytest.param(5, 1.0, 1.6, id="again and again"),
        pytest.param(10_000, 1.0, 30.0, id="capped"),
    ],
)
def test_delays_double_up_to_a_cap_and_are_spread(failures: int, chance: float, seconds: float) -> None:
    assert Backoff().delay_seconds(failures, chance) == pytest.approx(seconds)


def test_a_failed_key_is_tried_again_ever_later_until_it_works_and_then_starts_afresh() -> None:
    def answer(_: str, count: int) -> float | None:
        if count in (1, 2, 3, 5):
            raise TryAgain
        return 100.0 if count == 4 else None

    work = Worked(answer=answer)

    async def story(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(200)

    metrics = worked(work, story, RateLimiter(backoff=Backoff(1, 60), chance=lambda: 1.0))
    assert work.times == [0, 1, 3, 7, 107, 108]
    assert [outcome for _, outcome in metrics.endings] == [
        *[WorkOutcome.RETRIED] * 3, WorkOutcome.DONE, WorkOutcome.RETRIED, WorkOutcome.DONE,
    ]  # fmt: skip


def test_a_bug_in_the_work_on_one_key_is_logged_and_no_other_key_notices(caplog: pytest.LogCaptureFixture) -> None:
    def answer(key: str, _: int) -> float | None:
        if key == "a":
            raise ZeroDivisionError
        return 1.0

    work = Worked(answer=answer)

    async def story(queue: WorkQueue[str]) -> None:
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(10.5)

    metrics = worked(work, story, RateLimiter(workers=1, backoff=Backoff(4, 4), chance=lambda: 1.0))
    assert work.keys.count("b") == 11
    assert [at for at, key in work.begun if key == "a"] == [0, 4, 8]
    assert sum(outcome is WorkOutcome.BROKEN for _, outcome in metrics.endings) == 3
    assert "ZeroDivisionError" in caplog.text


def test_news_about_a_failed_key_does_not_wait_for_its_delay() -> None:
    def answer(_: str, count: int) -> None:
        if count == 1:
            raise TryAgain

    work = Worked(answer=answer)

    async def story(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        await asyncio.sleep(99)

    worked(work, story, RateLimiter(backoff=Backoff(50, 50), chance=lambda: 1.0))
    assert work.times == [0, 1]


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_stop_waits_for_the_work_in_hand_and_begins_no_more() -> None:
    work = Worked(seconds=10)

    async def story(queue: WorkQueue[str]) -> None:
        for key in KEYS:
            queue.add(key)
        await asyncio.sleep(3)
        queue.stop()

    worked(work, story, RateLimiter(workers=2))
    assert work.ended == [(10, "a"), (10, "b")]


def test_a_cancelled_queue_ends_at_once_and_its_keys_are_not_lost() -> None:
    work = Worked(seconds=10)

    async def play() -> None:
        queue = WorkQueue(work, Metrics(), RateLimiter(workers=2))
        for key in KEYS:
            queue.add(key)
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert now() == 3
        assert not work.in_hand
        again = asyncio.create_task(queue.run())
        await asyncio.sleep(100)
        queue.stop()
        await again

    run_virtually(play())
    assert sorted(key for at, key in work.ended if at > 3) == KEYS


def test_what_is_added_while_nothing_runs_is_worked_on_later() -> None:
    work = Worked()

    async def play() -> None:
        queue = WorkQueue(work, Metrics(), RateLimiter())
        queue.add("a")
        await asyncio.sleep(50)
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(1)
        queue.stop()
        await running

    run_virtually(play())
    assert work.begun == [(50, "a")]


def test_metrics_say_how_many_wait_for_how_long_and_how_it_went() -> None:
    work = Worked(seconds=2)

    async def story(queue: WorkQueue[str]) -> None:
        for key in KEYS:
            queue.add(key)
        await asyncio.sleep(10)

    metrics = worked(work, story, RateLimiter(workers=1))
    assert metrics.waits == [0, 2, 4]
    assert metrics.endings == [(2, WorkOutcome.DONE)] * 3
    assert max(metrics.depths) == 3
    assert metrics.depths[-1] == 0


# --- any schedule ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """After a pause, a key is added for later; working on it then takes a while and may fail."""

    pause: float
    key: str
    after: float


TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0])
ACTS = st.lists(st.builds(Act, TIMES, st.sampled_from(KEYS), TIMES), max_size=40)


@given(acts=ACTS, takes=TIMES, fails=st.sets(st.integers(0, 30)), workers=st.integers(1, 3), spacing=TIMES)
def test_whatever_happens_every_add_is_followed_by_a_look_that_succeeds(
    acts: list[Act], takes: float, fails: set[int], workers: int, spacing: float
) -> None:
    adds: list[tuple[float, str]] = []
    successes: list[tuple[float, str]] = []

    def answer(key: str, _: int) -> None:
        if len(work.begun) in fails:
            raise TryAgain
        successes.append((now() - takes, key))

    work = Worked(seconds=takes, answer=answer)

    async def story(queue: WorkQueue[str]) -> None:
        for act in acts:
            await asyncio.sleep(act.pause)
            queue.add(act.key, act.after)
            adds.append((now(), act.key))
        await asyncio.sleep(10_000)

    metrics = worked(work, story, RateLimiter(workers, spacing, Backoff(0.5, 2)))
    for at, key in adds:
        assert any(begun >= at - 1e-6 for begun, found in successes if found == key)
    assert not metrics.depths or metrics.depths[-1] == 0
    assert work.most_in_hand <= workers
    for key in KEYS:
        starts = [begun for begun, found in work.begun if found == key]
        assert all(later - earlier >= spacing - 1e-6 for earlier, later in pairwise(starts))


@given(bursts=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), max_size=12), workers=st.integers(1, 3))
def test_nobody_overtakes_a_key_that_is_due(bursts: list[list[str]], workers: int) -> None:
    """However often others are added, a key waits only for those that were due before it."""
    work = Worked(seconds=1.0)

    async def story(queue: WorkQueue[str]) -> None:
        for burst in bursts:
            for key in burst:
                queue.add(key)
            await asyncio.sleep(0.5)
        await asyncio.sleep(1000)

    metrics = worked(work, story, RateLimiter(workers))
    # Eight keys, one of them possibly in hand when it is added, before it at most all the seven others twice.
    assert all(wait <= 8 * 2 / workers + 1 for wait in metrics.waits)


@dataclass
class Ledger:
    """A reference schedule, kept in the simplest way there is."""

    due: dict[str, tuple[float, int]] = field(default_factory=dict)
    again: dict[str, float] = field(default_factory=dict)
    in_hand: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, key: str, at: float) -> None:
        if key in self.in_hand:
            self.again[key] = min(at, self.again.get(key, at))
        elif key not in self.due or at < self.due[key][0]:
            self.count += 1
            self.due[key] = (at, self.count)

    def take(self, now: float) -> tuple[str, float] | None:
        first = min(self.due, key=lambda each: self.due[each], default=None)
        if first is None or self.due[first][0] > now:
            return None
        self.in_hand.append(first)
        return first, self.due.pop(first)[0]

    def done(self, key: str) -> None:
        self.in_hand.remove(key)
        if key in self.again:
            self.add(key, self.again.pop(key))


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done"]), st.sampled_from(KEYS), TIMES), max_size=60))
def test_an_agenda_hands_out_what_is_due_longest_and_never_one_key_twice(steps: list[tuple[str, str, float]]) -> None:
    agenda: Schedule[str] = Schedule()
    ledger = Ledger()
    clock = 0.0
    for step, key, seconds in steps:
        clock += seconds
        if step == "add":
            agenda.add(key, clock + seconds)
            ledger.add(key, clock + seconds)
        elif step == "take":
            assert agenda.take_due(clock) == ledger.take(clock)
        elif key in ledger.in_hand:
            agenda.finish_key(key, clock)
            ledger.done(key)
        assert len(agenda) == len(ledger.due)
        assert agenda.next_at() == min((at for at, _ in ledger.due.values()), default=None)


def test_an_agenda_does_not_grow_with_times_that_no_longer_count() -> None:
    agenda: Schedule[str] = Schedule()
    for second in range(10_000):
        agenda.add("a", second + 1_000_000)
        agenda.add("a", second)
        assert agenda.take_due(second) == ("a", second)
        agenda.finish_key("a", second)
    assert len(agenda._heap) < 200  # noqa: SLF001


def test_an_agenda_forgets_when_it_last_handed_out_a_key() -> None:
    agenda: Schedule[str] = Schedule(spacing_seconds=10)
    for second in range(1000):
        agenda.add(f"job-{second}", second)
        agenda.take_due(second)
        agenda.finish_key(f"job-{second}", second)
    assert len(agenda._started_at) <= 10  # noqa: SLF001
