"""Whatever workers do, every unit ends once: committed, or recorded as failed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import dispatch
from pipeline.dispatch import Dispatcher, Stop
from pipeline.engines import Lost, Message
from pipeline.tasks import TaskPrompt
from pipeline.units import Unit
from pipeline.worker import DATA, MEMORY, STORAGE, Order, Ready, Refused, Result
from treegraft_core import InputError, StageError
from treegraft_core.prompts import Prompt


def units(count: int) -> list[Unit]:
    return [Unit(TaskPrompt("t", Prompt(str(i), "", (f"w{i}",)))) for i in range(count)]


class Fake:
    """Workers that do, fail, lose or hold units as a random generator says."""

    name = "fake"

    def __init__(self, workers: int, seed: int, odds: dict[str, float]):
        self.workers = range(workers)
        self.rng, self.odds = random.Random(seed), odds
        self.orders: dict[int, Order] = {}
        self.events: list[tuple[int, Message]] = []
        self.sent: list[tuple[int, Order]] = []
        self.closed, self.files = False, 0

    def start(self, worker: int) -> None:
        assert worker not in self.orders
        ready: Message = Ready({"models.dtype": "float32"}, f"here:{worker}")
        if self.rng.random() < self.odds.get("start", 0):
            ready = Lost("ended with exit status 1")
        self.events.append((worker, ready))

    def send(self, worker: int, order: Order) -> None:
        assert worker not in self.orders, "two orders at once"
        self.orders[worker] = order
        self.sent.append((worker, order))

    def wait(self, timeout: float) -> list[tuple[int, Message]]:
        found, self.events = self.events, []
        for worker in self.rng.sample(sorted(self.orders), len(self.orders)):
            if self.rng.random() < self.odds.get("slow", 0):
                continue
            order = self.orders.pop(worker)
            found.append((worker, self.outcome(order)))
        return found

    def outcome(self, order: Order) -> Message:
        draw, key = self.rng.random(), order.unit.key
        for why in (MEMORY, STORAGE, DATA, "lost"):
            draw -= self.odds.get(why, 0)
            if draw < 0:
                if why == "lost":
                    return Lost("ended by signal 9")
                return Result(key, "failed", {"reason": f"{key}: {why}"}, why=why)
        self.files += 1
        return Result(key, "done", {"rows": 1, "states": 1}, f"temporary-{self.files}")

    def end(self, worker: int) -> None:
        self.orders.pop(worker)
        self.events.append((worker, Lost("ended by signal 9")))

    def close(self) -> None:
        self.closed = True


class Kept:
    """What a dispatcher commits and drops."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.files: Counter[str] = Counter()

    def commit(self, result: Result) -> None:
        self.records.append(dict(result.record))
        if result.temporary is not None:
            self.files[result.temporary] += 1

    def drop(self, result: Result) -> None:
        assert result.temporary is None or self.files[result.temporary] == 0


def dispatcher(fake: Fake, kept: Kept, count: int, retries: int = 2, **options: Any) -> Dispatcher:
    return Dispatcher(
        fake, units(count), lambda _: None, kept.commit, kept.drop, 4, retries, **options
    )


@settings(max_examples=300, deadline=None)
@given(
    workers=st.integers(1, 5),
    count=st.integers(1, 30),
    seed=st.integers(0, 10**6),
    lost=st.floats(0, 0.3),
    memory=st.floats(0, 0.3),
    data=st.floats(0, 0.2),
    slow=st.floats(0, 0.9),
    retries=st.integers(0, 3),
)
def test_every_unit_ends_once(
    workers: int,
    count: int,
    seed: int,
    lost: float,
    memory: float,
    data: float,
    slow: float,
    retries: int,
) -> None:
    fake = Fake(workers, seed, {"lost": lost, MEMORY: memory, DATA: data, "slow": slow})
    kept = Kept()
    tally = dispatcher(fake, kept, count, retries).run(Stop())
    ended = [(r["task"], r["prompt"]) for r in kept.records]
    assert sorted(ended) == sorted(u.key for u in units(count))
    assert tally.ended == count and fake.closed
    attempts = Counter(order.unit.key for _, order in fake.sent)
    assert max(attempts.values()) <= retries + 1
    for _, order in fake.sent:
        assert order.attempt > 1 or not order.smaller
        assert order.unit not in order.beside
    done = sum(r["status"] == "done" for r in kept.records)
    assert tally.finished["done"] == tally.rows == done == sum(kept.files.values())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), workers=st.integers(2, 4), count=st.integers(2, 12))
def test_stragglers_are_done_twice_and_count_once(seed: int, workers: int, count: int) -> None:
    fake, kept = Fake(workers, seed, {"slow": 0.8, "lost": 0.1}), Kept()
    before = dispatch.STRAGGLER_RATIO, dispatch.STRAGGLER_S
    dispatch.STRAGGLER_RATIO, dispatch.STRAGGLER_S = 0.0, 0.0
    try:
        dispatcher(fake, kept, count, 99).run(Stop())
    finally:
        dispatch.STRAGGLER_RATIO, dispatch.STRAGGLER_S = before
    assert len({r["prompt"] for r in kept.records}) == len(kept.records) == count


def test_a_bundle_that_ends_its_worker_is_not_decoded_together_again() -> None:
    fake, kept = Fake(1, 0, {}), Kept()
    odd = units(8)[2]
    outcome = fake.outcome

    def breaks(order: Order) -> Message:
        if odd in (order.unit, *order.beside):
            return Lost("ended by signal 11")
        return outcome(order)

    fake.outcome = breaks  # type: ignore[method-assign]
    tally = dispatcher(fake, kept, 8, 1).run(Stop())
    assert [r["prompt"] for r in kept.records if r["status"] == "failed"] == ["2"]
    assert tally.lost <= 3


@pytest.mark.parametrize("signal", [2, 15])
def test_a_stop_finishes_what_is_running(signal: int) -> None:
    fake, kept, stop = Fake(2, 0, {"slow": 0.3}), Kept(), Stop()

    def watch(tally: Any) -> None:
        if tally.ended >= 3:
            stop.signal = signal

    tally = dispatcher(fake, kept, 20, watch=watch).run(stop)
    assert 3 <= tally.ended < 20 and tally.ended == len(kept.records)
    assert not fake.orders and fake.closed


def test_nothing_can_be_written() -> None:
    fake, kept = Fake(2, 0, {STORAGE: 1.0}), Kept()
    with pytest.raises(StageError, match="storage; free space there"):
        dispatcher(fake, kept, 5).run(Stop())
    assert fake.closed and not kept.records

    def full(result: Result) -> None:
        raise OSError(28, "No space left on device", "manifest")

    kept.commit = full  # type: ignore[method-assign]
    with pytest.raises(StageError, match="manifest: no space left"):
        dispatcher(Fake(2, 0, {}), kept, 5).run(Stop())


def test_no_worker_becomes_ready() -> None:
    fake = Fake(2, 0, {"start": 1.0})
    with pytest.raises(StageError, match="every worker ended before it was ready"):
        dispatcher(fake, Kept(), 3).run(Stop())
    assert fake.closed


def test_a_worker_that_cannot_start_says_why() -> None:
    fake = Fake(2, 0, {})
    fake.start = lambda worker: fake.events.append((worker, Refused("pair.mid.path=x: no")))  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"pair\.mid\.path=x: no"):
        dispatcher(fake, Kept(), 3).run(Stop())
    assert fake.closed


def test_models_that_do_not_belong_to_the_dataset() -> None:
    fake = Fake(1, 0, {})
    made = dispatcher(fake, Kept(), 3)

    def refuse(about: dict[str, Any]) -> None:
        raise InputError("models.mid: another")

    made.accept = refuse
    with pytest.raises(InputError, match=r"models\.mid"):
        made.run(Stop())
    assert fake.closed


def test_a_unit_that_takes_too_long_is_ended() -> None:
    fake, kept = Fake(2, 0, {"slow": 1.0}), Kept()
    made = dispatcher(fake, kept, 2, 1, timeout_s=1e-9)
    tally = made.run(Stop())
    assert tally.finished["failed"] == 2 and tally.lost == 4


def test_units_are_told_apart_by_their_text() -> None:
    one = units(1)[0]
    other = replace(one, prompt=TaskPrompt("t", Prompt("0", "", ("another",))))
    assert one.key == other.key and one.digest != other.digest
