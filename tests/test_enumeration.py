"""Packed enumeration equals the slow twin, each schedule run alone, under any packing."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import reference as slow
from tests.conftest import VOCAB, tiny_llama
from treegraft_core import models
from treegraft_core.context import Context
from treegraft_core.decoder import decode_plain
from treegraft_core.drafting import DraftingConfig
from treegraft_core.enumeration import (
    DEFAULT_MEMORY,
    FIRST_PACK,
    Enumeration,
    PackTooLargeError,
    enumerate_states,
    packs,
)
from treegraft_core.errors import InputError
from treegraft_core.models import CachedModel, Visibility
from treegraft_core.neural import NO_ROW_LOG_P
from treegraft_core.pair import Pair
from treegraft_core.signals import SIGNALS
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import UNLIMITED, IntArray, on_grid
from treegraft_core.verify import token_log_p

properties = settings(derandomize=True, deadline=None, max_examples=150, database=None)

TOKEN_BYTES = 1 << 24
"""What a token of a fake pass takes: more than all trees of any case here together."""


# A made-up drafter ----------------------------------------------------------------------------


class Head:
    """A made-up drafter: after every text the same values, in an order fixed by seed and text.

    All values lie on the grid, so sums along paths tie whenever they hold the same values, in
    whatever order; within one distribution no two are equal, so that its top W is unambiguous.

    Parameters
    ----------
    kind : {"full", "wide", "narrow", "draft"}
        Columns for all tokens of the target; for more; for the first ones only; for a draft
        vocabulary.
    vocab : int
        Tokens of the target.
    tokens : list of int
        The target's tokens that the head has columns for, ascending.
    quarters : list of int
        A weight for each of ``tokens``, in quarters of a nat, distinct.
    """

    def __init__(
        self, kind: str, vocab: int, tokens: Sequence[int], quarters: Sequence[int], seed: int
    ):
        self.kind, self.vocab, self.tokens, self.seed = kind, vocab, list(tokens), seed
        weights = -0.25 * np.array(quarters)
        self.exact = weights - np.log(np.exp(weights).sum())
        self.values = on_grid(self.exact).tolist()
        self.floor = -2.5 if kind == "draft" else NO_ROW_LOG_P
        self.vocabulary = DraftVocabulary(torch.tensor(self.tokens), self.floor)
        self._order: dict[tuple[int, ...], list[int]] = {}

    def order(self, text: tuple[int, ...]) -> list[int]:
        """Return which value each column has after ``text``."""
        if text not in self._order:
            columns = list(range(len(self.tokens)))
            random.Random(f"{self.seed}/{text}").shuffle(columns)
            self._order[text] = columns
        return self._order[text]

    def logits(self, text: tuple[int, ...]) -> list[float]:
        """Return the drafter's output after ``text``."""
        row = self.exact[self.order(text)].tolist()
        return [*row, 3.0, 4.0] if self.kind == "wide" else row

    def log_probs(self, text: tuple[int, ...]) -> list[float]:
        """Return log p of each token of the target after ``text``, on the grid."""
        row = [self.floor] * self.vocab
        for token, place in zip(self.tokens, self.order(text), strict=True):
            row[token] = self.values[place]
        return row


class FakeModel:
    """What enumeration asks of a `CachedModel`, over a made-up drafter.

    It remembers each cached place's token and position, and puts together the text that each
    token of a pass sees. That must be a text: one place for each position up to its own.

    Parameters
    ----------
    head : Head
        The drafter.
    text : list of int
        What the cache holds.
    counts_cache : bool
        A pass takes memory for all paths in the cache, as a real one does, not for its own alone.
    """

    sequential = False

    def __init__(self, head: Head, text: Sequence[int], counts_cache: bool = False):
        self.head, self.counts_cache = head, counts_cache
        self.text = list(text)
        self.tokens, self.positions = list(text), list(range(len(text)))
        self.passes: list[int] = []
        self.attempts: list[Counter[tuple[int, ...]]] = [Counter()]

    @property
    def length(self) -> int:
        return len(self.tokens)

    def shrink(self) -> None:
        """Do nothing: a list has no spare room."""

    def bytes_of_pass(self, q: int) -> int:
        cached = self.length - len(self.text) if self.counts_cache else 0
        return TOKEN_BYTES * (cached + q)

    def run(
        self,
        tokens: IntArray,
        positions: IntArray,
        visible: Visibility | None = None,
        rows: IntArray | None = None,
    ) -> Tensor:
        assert visible is not None and rows is None
        first = self.length
        self.tokens += tokens.tolist()
        self.positions += positions.tolist()
        self.passes.append(len(tokens))
        logits = []
        for i in range(len(tokens)):
            places = {*range(int(visible.end[i])), *visible.slots[i].tolist()}
            assert first + i in places and max(places) < self.length
            ordered = sorted(places, key=lambda place: self.positions[place])
            assert ordered[-1] == first + i
            assert [self.positions[p] for p in ordered] == list(range(len(ordered)))
            seen = tuple(self.tokens[p] for p in ordered)
            self.attempts[-1][seen] += 1
            logits.append(self.head.logits(seen))
        return torch.tensor(logits, dtype=torch.float64)

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        assert not len(slots)
        del self.tokens[prefix:], self.positions[prefix:]
        self.attempts.append(Counter())


# Random cases ---------------------------------------------------------------------------------


@dataclass
class Case:
    """States of a random text, a drafter, and rules."""

    tokens: list[int]
    log_p: list[float]
    roots: list[int]
    config: DraftingConfig
    head: Head
    max_context: int
    cached: int

    def model(self, counts_cache: bool = False) -> FakeModel:
        return FakeModel(self.head, self.tokens[: self.cached], counts_cache)

    def enumerate(
        self, model: FakeModel, memory: int = DEFAULT_MEMORY, pack: int = 0
    ) -> Enumeration:
        """Enumerate; afterwards the cache must hold what it held before."""
        try:
            return enumerate_states(
                model,  # type: ignore[arg-type]
                Context(self.tokens, self.log_p, self.config.max_ngram),
                self.roots,
                self.config,
                self.head.vocabulary if self.head.kind == "draft" else None,
                self.head.vocab,
                True,
                self.max_context,
                memory,
                pack,
            )
        finally:
            assert model.tokens == self.tokens[: self.cached]

    def alone(self, root: int, bits: Sequence[int]) -> slow.RoundResult:
        """Run one schedule by the twin."""
        text, config = tuple(self.tokens[: root + 1]), self.config
        return slow.run_round(
            text,
            self.log_p[: root + 1],
            bits,
            lambda path: self.head.log_probs((*text, *path)),
            config.width,
            config.verify_nodes,
            config.max_ngram,
            config.pool,
            config.graft,
            self.max_context - (root + 1),
            self.head.tokens,
        )


@st.composite
def cases(draw: st.DrawFn, depth: int = 4, states: int = 4) -> Case:
    """Draw texts that repeat themselves over a few tokens, and everything else at random."""
    vocab = draw(st.integers(2, 6))
    token = st.integers(0, vocab - 1)
    motif = draw(st.lists(token, min_size=1, max_size=4))
    tokens = draw(st.lists(token, max_size=5)) + motif * draw(st.integers(1, 5))
    tokens += draw(st.lists(token, max_size=3))
    kind = draw(st.sampled_from(["full", "full", "wide", "narrow", "draft"]))
    inside = list(range(vocab))
    if kind == "narrow":
        inside = inside[: draw(st.integers(1, vocab - 1))]
    elif kind == "draft":
        inside = sorted(draw(st.sets(token, min_size=1, max_size=vocab - 1)))
    size = len(inside)
    quarters = draw(st.lists(st.integers(0, 14), min_size=size, max_size=size, unique=True))
    head = Head(kind, vocab, inside, quarters, draw(st.integers(0, 9999)))
    value = st.sampled_from([*head.values, -0.25, -1.5])
    log_p = draw(st.lists(value, min_size=len(tokens), max_size=len(tokens)))
    place = st.integers(0, len(tokens) - 1)
    roots = draw(st.lists(place, min_size=1, max_size=states, unique=True))
    last = max(roots) + 1
    config = DraftingConfig(
        depth=draw(st.integers(1, depth)),
        width=draw(st.integers(1, 4)),
        verify_nodes=draw(st.integers(1, 24)),
        max_ngram=draw(st.integers(1, 5)),
        pool=draw(st.sampled_from(["tree", "tree", "frontier"])),
        graft=draw(st.sampled_from(["add", "add", "replace"])),
    )
    room = draw(st.one_of(st.just(UNLIMITED), st.just(UNLIMITED), st.integers(0, 6)))
    return Case(
        tokens,
        log_p,
        roots,
        config,
        head,
        min(UNLIMITED, last + room),
        draw(st.integers(last, len(tokens))),
    )


@dataclass
class Twin:
    """What the twin says of a case."""

    rounds: list[list[slow.RoundResult]]
    needed: list[Counter[tuple[int, ...]]]

    @classmethod
    def of(cls, case: Case) -> Twin:
        """Run every schedule at every state alone."""
        schedules = list(product((0, 1), repeat=case.config.depth))
        rounds = [[case.alone(root, bits) for bits in schedules] for root in case.roots]
        needed = []
        for root, results in zip(case.roots, rounds, strict=True):
            paths = {p for result in results for counts in result.counts for p in counts.needed}
            needed.append(Counter((*case.tokens[: root + 1], *path) for path in paths))
        return cls(rounds, needed)

    @property
    def paths(self) -> int:
        """Distinct paths that all schedules ask for, over all states."""
        return sum(map(len, self.needed))


def check(case: Case, twin: Twin, found: Enumeration) -> None:
    """Compare everything that an enumeration holds with the twin's rounds."""
    config = case.config
    assert len(found) == len(case.roots)
    assert found.paths == twin.paths
    for state, root in enumerate(case.roots):
        outcomes = found.outcomes(state)
        assert [o.bits for o in outcomes] == list(product((0, 1), repeat=config.depth))
        continuation = case.tokens[root + 1 :]
        for o, alone in zip(outcomes, twin.rounds[state], strict=True):
            kept = [node.path() for node in alone.kept]
            assert o.kept == kept
            assert o.kept_nodes == len(kept)
            assert o.tree_nodes == len(alone.tree.nodes())
            assert o.accepted == slow.accepted(alone.tree, alone.kept, continuation)
            accepted = [tuple(continuation[: n + 1]) for n in range(o.accepted)]
            assert o.ranks == [kept.index(path) for path in accepted]
            assert [call is not None for call in o.calls] == [bool(bit) for bit in o.bits]
            calls = [astuple(call) for call in o.calls if call is not None]
            assert calls == [
                (
                    *(c.refresh_nodes, c.expand_nodes, c.all_nodes),
                    *(c.pool_nodes, c.earlier_picks, c.refresh_levels, c.all_levels),
                )
                for c in alone.counts
            ]
            assert np.array(o.signals) == pytest.approx(np.array(alone.signals), abs=1e-12)
    calls = found.bits[None, :, :, None] == 1
    assert not found.counts[~np.broadcast_to(calls, found.counts.shape)].any()


# Equal to the twin ----------------------------------------------------------------------------


@properties
@given(cases(), st.integers(0, 5))
def test_packed_enumeration_equals_every_schedule_alone(case: Case, pack: int) -> None:
    """Trees, A, ranks, counts, signals; each path that any schedule needs is read once."""
    twin, model = Twin.of(case), case.model()
    found = case.enumerate(model, pack=pack)
    check(case, twin, found)
    assert sum(model.attempts, Counter()) == sum(twin.needed, Counter())
    n = min(pack or FIRST_PACK, len(case.roots))
    assert found.passes == len(model.passes) <= case.config.depth * -(-len(case.roots) // n)
    sizes = [len(case.roots[i : i + n]) for i in range(0, len(case.roots), n)]
    assert len([a for a in model.attempts if a]) <= len(sizes)


@properties
@given(cases(), st.integers(0, 5), st.integers(1, 9))
def test_a_pass_over_budget_is_split(case: Case, pack: int, most: int) -> None:
    """Passes of a few tokens at most; the same outcomes, and no path read twice."""
    twin, model = Twin.of(case), case.model()
    found = case.enumerate(model, TOKEN_BYTES * most + TOKEN_BYTES // 2, pack)
    check(case, twin, found)
    assert sum(model.attempts, Counter()) == sum(twin.needed, Counter())
    assert max(model.passes, default=0) <= most
    assert found.passes == len(model.passes)
    event(f"split: {found.passes > case.enumerate(case.model(), pack=pack).passes}")


@properties
@given(cases(), st.integers(0, 5), st.integers(0, 12))
def test_a_pack_over_budget_is_halved(case: Case, pack: int, more: int) -> None:
    """Where a pack's paths exceed the budget, fewer states go together: the same outcomes."""
    twin, model = Twin.of(case), case.model(counts_cache=True)
    most = max(map(len, twin.needed)) + more
    found = case.enumerate(model, TOKEN_BYTES * most + TOKEN_BYTES // 2, pack)
    check(case, twin, found)
    together = sum(twin.needed, Counter())
    for attempt in model.attempts:
        assert attempt.total() <= most
        assert not attempt - together
    halved = sum(attempt.total() for attempt in model.attempts) > twin.paths
    event(f"halved: {halved}")
    if pack == 0 and len(case.roots) <= FIRST_PACK and twin.paths <= most:
        assert not halved


@pytest.mark.parametrize(("counts_cache", "splits"), [(False, True), (True, False)])
def test_the_budgets_of_these_tests_bind(counts_cache: bool, splits: bool) -> None:
    """A case in which a pass is split, and one in which packs are halved, more than once."""
    case = repetitive_case()
    twin, model = Twin.of(case), case.model(counts_cache)
    most = max(map(len, twin.needed)) if counts_cache else 3
    found = case.enumerate(model, TOKEN_BYTES * most + TOKEN_BYTES // 2)
    check(case, twin, found)
    read = sum(attempt.total() for attempt in model.attempts)
    assert (found.passes > case.config.depth * len(case.roots)) == splits
    assert (read > twin.paths) == (not splits)
    assert len([a for a in model.attempts if a]) > 4 or splits


def repetitive_case(depth: int = 4, states: int = 8) -> Case:
    """Return states of a text that goes round in threes."""
    tokens = [0, 1, 2] * 7 + [3, 0, 1, 2, 0, 1]
    head = Head("full", 4, range(4), [0, 5, 7, 12], 7)
    log_p = [head.values[0]] * len(tokens)
    roots = list(range(5, 5 + 2 * states, 2))
    config = DraftingConfig(depth=depth, width=3, verify_nodes=40)
    return Case(tokens, log_p, roots, config, head, UNLIMITED, max(roots) + 1)


def test_exactly_depth_passes_when_nothing_is_split() -> None:
    """One pass a level for a whole pack, each with all new paths of the level."""
    case = repetitive_case()
    model = case.model()
    found = case.enumerate(model)
    assert found.passes == len(model.passes) == case.config.depth
    assert found.paths == sum(model.passes)
    alone = case.model()
    assert case.enumerate(alone, pack=1).passes == case.config.depth * len(case.roots)
    assert sorted(alone.passes)[-1] < min(model.passes[1:])


def test_a_path_deeper_than_the_depth_is_accepted() -> None:
    """A mid step grows on from a deep n-gram's end: A exceeds both D and n_max."""
    head = Head("full", 2, [0, 1], [0, 12], 0)
    head.order = lambda text: [0, 1]  # type: ignore[method-assign]  # always token 0
    tokens = [0] * 24
    config = DraftingConfig(depth=3, width=2, verify_nodes=63, max_ngram=3)
    case = Case(tokens, [head.values[0]] * 24, [12], config, head, UNLIMITED, 13)
    twin = Twin.of(case)
    deepest = max(slow.accepted(r.tree, r.kept, tokens[13:]) for r in twin.rounds[0])
    assert deepest > max(config.depth, config.max_ngram)
    check(case, twin, case.enumerate(case.model()))


# Memory ---------------------------------------------------------------------------------------


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9663676416 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"),
    MemoryError("Unable to allocate 9.00 GiB for an array"),
)


class FailingModel(FakeModel):
    """A machine on which passes of more than ``most`` tokens fail."""

    def __init__(self, case: Case, most: int, error: BaseException):
        super().__init__(case.head, case.tokens[: case.cached])
        self.most, self.error, self.failures = most, error, 0

    def run(self, tokens: IntArray, *arguments: Any) -> Tensor:
        if len(tokens) > self.most:
            self.failures += 1
            raise self.error
        return super().run(tokens, *arguments)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_machine_out_of_memory_gets_smaller_packs(error: BaseException) -> None:
    """Whatever the allocator raises: halve the pack and go on; the outcomes are the same."""
    case = repetitive_case()
    twin = Twin.of(case)
    most = max(max_pass_alone(case))
    model = FailingModel(case, most, error)
    found = case.enumerate(model)
    check(case, twin, found)
    assert model.failures >= 1
    assert max(model.passes, default=0) <= most


def max_pass_alone(case: Case) -> Iterator[int]:
    """Yield the largest pass that each state needs."""
    for root in case.roots:
        model = case.model()
        Case(**{**case.__dict__, "roots": [root]}).enumerate(model)
        yield max(model.passes)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_one_state_too_large_for_the_machine(error: BaseException) -> None:
    """The message names the key; the cause is kept."""
    case = repetitive_case()
    model = FailingModel(case, max(max_pass_alone(case)) - 1, error)
    with pytest.raises(InputError, match=r"collect\.memory_gb=4: one decoding state") as caught:
        case.enumerate(model)
    assert caught.value.__cause__ is error


def test_one_state_over_the_budget() -> None:
    """One token more than the budget has room for, and exactly as many."""
    case = repetitive_case(states=2)
    most = max(map(len, Twin.of(case).needed))
    model = case.model(counts_cache=True)
    budget = TOKEN_BYTES * most + TOKEN_BYTES // 2
    assert case.enumerate(model, budget).paths > most
    with pytest.raises(InputError, match=r"collect\.memory_gb=0\.\d+: one .* drafting\.depth"):
        case.enumerate(model, budget - TOKEN_BYTES)
    with pytest.raises(InputError, match=r"collect\.memory_gb"):
        case.enumerate(case.model(), 1000)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        AssertionError("step 2: 3 nodes without the mid drafter's score"),
        KeyboardInterrupt(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_other_errors_go_through(error: BaseException) -> None:
    """At once, unchanged, and with the cache cut back."""
    case = repetitive_case()
    model = FailingModel(case, 8, error)
    with pytest.raises(type(error)) as caught:
        case.enumerate(model)
    assert caught.value is error
    assert model.failures == 1


def no_outcomes(states: int) -> Enumeration:
    """Return an enumeration of a pack, empty but for its number of states."""
    zero = np.zeros((states, 1), np.int64)
    return Enumeration(zero[:1], zero, zero, zero, zero, zero, zero.astype(float))


@properties
@given(st.integers(1, 60), st.integers(0, 20), st.integers(1, 30), st.integers(1, 30))
def test_packs_cover_all_states_in_order(states: int, pack: int, fits: int, works: int) -> None:
    """Each state once, whatever the budget (estimated) and the machine (real) have room for."""
    done: list[int] = []
    tried: list[int] = []

    def attempt(first: int, count: int) -> tuple[Enumeration, int, int]:
        tried.append(count)
        assert first == len(done) and count >= 1
        if count > fits:
            raise PackTooLargeError
        if count > works:
            raise MemoryError
        done.extend(range(first, first + count))
        return no_outcomes(count), 0, count

    sizes = [len(part) for part in packs(states, fits, pack, attempt)]
    assert done == list(range(states))
    assert sum(sizes) == states
    assert max(sizes) <= min(pack or states, fits, works)
    # A pack is halved at most once for each power of two, and never grows to a size that failed.
    failed = [n for n in tried if n > min(fits, works)]
    assert len(failed) <= 6 and failed == sorted(failed, reverse=True)


def test_packs_grow_to_what_the_budget_has_room_for() -> None:
    """The first pack shows what a state takes; the next ones use the budget."""
    tried: list[int] = []

    def attempt(first: int, count: int) -> tuple[Enumeration, int, int]:
        tried.append(count)
        return no_outcomes(count), 5000, 5000 + 10 * count  # the text's own cache does not grow

    list(packs(100, 5520, 0, attempt))
    assert tried == [FIRST_PACK, 40, 40, 12]


# With a real model ----------------------------------------------------------------------------


CONFIG = DraftingConfig(depth=4, width=4, verify_nodes=16)


def real_text(pair: Pair) -> tuple[Context, list[int]]:
    """Return a prompt with the target's answer to it, and states of the answer."""
    prompt = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15]
    tokens = [*prompt, *decode_plain(pair, prompt, 36, ()).tokens]
    logits = CachedModel(pair.target).run(tokens, np.arange(len(tokens)))
    log_p = token_log_p(logits[:-1], tokens[1:], CONFIG.width)
    return Context(tokens, [0.0, *log_p]), list(range(14, 36, 2))


def enumerate_pair(
    pair: Pair, memory: int = DEFAULT_MEMORY, pack: int = 0
) -> tuple[Enumeration, list[int]]:
    """Enumerate states of a real text; return the tokens of each pass, too."""
    context, roots = real_text(pair)
    model, passes = CachedModel(pair.mid), []
    last = max(roots) + 1
    model.run(context.tokens[:last], np.arange(last), rows=np.zeros(0, np.int64))
    run = model.run

    def spy(tokens: IntArray, *arguments: Any) -> Tensor:
        passes.append(len(tokens))
        return run(tokens, *arguments)

    model.run = spy  # type: ignore[method-assign]
    found = enumerate_states(
        model, context, roots, CONFIG, None, VOCAB, True, pair.max_context, memory, pack
    )
    assert model.length == last
    return found, passes


ARRAYS = ("bits", "accepted", "tree_nodes", "kept_nodes", "ranks", "counts", "signals")


def test_packs_and_budgets_change_nothing(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: every pack size, and budgets down to the one that a state alone exceeds."""
    monkeypatch.setattr(models, "SCRATCH", 0)  # a tiny model's passes take less than libraries do
    whole, passes = enumerate_pair(tiny_pair)
    assert whole.accepted.max() > 1
    others = [enumerate_pair(tiny_pair, pack=pack)[0] for pack in (1, 2, 3, 7)]
    memory, budgets = 1 << 21, []
    while True:
        try:
            found, smaller = enumerate_pair(tiny_pair, memory)
        except InputError:
            break
        budgets.append((found.passes, sum(smaller)))
        others.append(found)
        memory = memory * 3 // 5
    for other in others:
        assert other.paths == whole.paths
        assert other.kept == whole.kept
        for name in ARRAYS:
            assert np.array_equal(getattr(other, name), getattr(whole, name)), name
    assert max(n for n, _ in budgets) > 2 * len(passes)  # small budgets split passes,
    assert max(read for _, read in budgets) > whole.paths  # and halved a pack


def test_a_state_that_fits_alone_fits_after_a_larger_pack_failed(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that grew for a failed pack do not count against the smaller ones."""
    monkeypatch.setattr(models, "SCRATCH", 0)
    monkeypatch.setattr(models, "MIN_CAPACITY", 4)
    pair = Pair("deep", tiny_pair.target, tiny_llama(0, layers=12), tiny_pair.tokenizer, None, ())
    alone = together = 0
    for memory in range(440_000, 600_000, 16_000):
        try:
            one, _ = enumerate_pair(pair, memory, pack=1)
        except InputError:
            continue
        alone += 1
        many, _ = enumerate_pair(pair, memory)
        together += np.array_equal(many.accepted, one.accepted)
    assert 0 < alone < 10
    assert together == alone


def test_no_states_are_an_error(tiny_pair: Pair) -> None:
    context, _ = real_text(tiny_pair)
    with pytest.raises(ValueError, match="roots"):
        enumerate_states(CachedModel(tiny_pair.mid), context, [], CONFIG, None, VOCAB)


SCORES = [SIGNALS.index("pre_reselect_score"), SIGNALS.index("score_before")]


def test_packs_in_float32_differ_by_rounding_alone(tiny_pair: Pair) -> None:
    """Scores by less than 10^-4 nats; where trees are the same, everything else by nothing."""
    target, mid = (copy.deepcopy(m).float() for m in (tiny_pair.target, tiny_pair.mid))
    pair = Pair("tiny32", target, mid, tiny_pair.tokenizer, None, ())
    whole, _ = enumerate_pair(pair)
    for pack in (1, 3):
        other, _ = enumerate_pair(pair, pack=pack)
        same = np.array(
            [
                [a == b for a, b in zip(x, y, strict=True)]
                for x, y in zip(whole.kept, other.kept, strict=True)
            ]
        )
        assert same.mean() > 0.98
        assert np.abs(other.signals - whole.signals)[same][..., SCORES].max() < 1e-4
        rest = np.delete(other.signals - whole.signals, SCORES, axis=-1)
        assert not rest[same].any()
        for name in ("accepted", "ranks", "kept_nodes", "tree_nodes", "counts"):
            assert np.array_equal(getattr(other, name)[same], getattr(whole, name)[same]), name
