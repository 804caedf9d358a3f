"""The fast core equals the slow twin in ``tests/reference`` on random trees and contexts.

Scores are multiples of 1/4, so sums are exact and ties, which the rules must break, are common.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference as slow
from treegraft_core.context import Context, table_log_p
from treegraft_core.drafting import (
    DraftingConfig,
    MidCall,
    accepted_path,
    begin_mid_step,
    expand,
    mid_pool,
    prune,
    select_frontier,
    small_step,
)
from treegraft_core.signals import SIGNALS, signals
from treegraft_core.tree import DraftTree, FloatArray, IntArray

properties = settings(derandomize=True, deadline=None, max_examples=80, database=None)


def fake_log_probs(seed: int, vocab: int) -> Callable[[tuple[int, ...]], list[float]]:
    """Return a made-up drafter: log p of every token, fixed by the seed and the path."""

    def log_probs(path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed}/{path}")
        return [-0.25 * rng.randint(0, 12) for _ in range(vocab)]

    return log_probs


class FakeMid:
    """`MidScores` over a made-up drafter; it refuses to score what was not evaluated."""

    def __init__(self, log_probs: Callable[[tuple[int, ...]], list[float]], width: int):
        self.log_probs = log_probs
        self.width = width
        self.evaluated: list[int] = []

    def evaluate(self, tree: DraftTree, nodes: IntArray) -> None:
        for node in nodes.tolist():
            assert node not in self.evaluated
            assert set(tree.path(node)[:-1]) <= {*self.evaluated}
            self.evaluated.append(node)

    def log_p(self, tree: DraftTree, parents: IntArray, tokens: IntArray) -> FloatArray:
        assert set(parents.tolist()) <= set(self.evaluated)
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        return np.array([self.log_probs(tuple(tree.path_tokens(p)))[t] for p, t in pairs])

    def top(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, FloatArray]:
        assert set(nodes.tolist()) <= set(self.evaluated)
        rows = [self.log_probs(tuple(tree.path_tokens(n))) for n in nodes.tolist()]
        tokens = [sorted(range(len(r)), key=lambda t, r=r: (-r[t], t))[: self.width] for r in rows]
        values = [[r[t] for t in ts] for r, ts in zip(rows, tokens, strict=True)]
        return np.array(tokens, np.int64), np.array(values)


def fast_mid_step(
    tree: DraftTree, frontier: IntArray, mid: FakeMid, config: DraftingConfig
) -> tuple[IntArray, IntArray, MidCall]:
    """Run the core's mid step as the decoder does; return F_k, N_{k+1} and the counts."""
    everything, call = config.evaluation == "all", MidCall()
    mid.evaluate(tree, begin_mid_step(tree, call, everything))
    picked, missing = select_frontier(tree, frontier, mid, call, config)
    if not everything:
        mid.evaluate(tree, missing)
    return picked, expand(tree, picked, mid, config), call


@dataclass
class Case:
    """A random decoding state and everything that a round needs."""

    tokens: list[int]
    log_p: list[float]
    schedule: list[int]
    config: DraftingConfig
    vocab: int
    seed: int

    @property
    def context(self) -> Context:
        return Context(self.tokens, self.log_p, self.config.max_ngram)


@st.composite
def cases(draw: st.DrawFn, **fixed: str) -> Case:
    """Draw small alphabets (frequent matches), also contexts of one to three tokens."""
    vocab = draw(st.integers(1, 5))
    length = draw(st.one_of(st.integers(1, 3), st.integers(4, 30)))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=length, max_size=length))
    quarters = draw(st.lists(st.integers(0, 12), min_size=length, max_size=length))
    schedule = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    config = DraftingConfig(
        depth=len(schedule),
        width=draw(st.integers(1, 6)),
        verify_nodes=draw(st.integers(1, 20)),
        max_ngram=draw(st.integers(1, 5)),
        pool=fixed.get("pool") or draw(st.sampled_from(["tree", "frontier"])),
        graft=fixed.get("graft") or draw(st.sampled_from(["add", "replace"])),
        evaluation=fixed.get("evaluation") or draw(st.sampled_from(["needed", "all"])),
    )
    return Case(
        tokens, [-0.25 * q for q in quarters], schedule, config, vocab, draw(st.integers(0, 9999))
    )


@dataclass
class Both:
    """The fast and the slow tree of one state, grown side by side."""

    case: Case
    fast: DraftTree
    slow: slow.Tree
    mid: FakeMid
    fast_frontier: IntArray
    slow_frontier: list[slow.Node]

    @classmethod
    def start(cls, case: Case) -> Both:
        root = case.tokens[-1]
        twin = slow.Tree(root)
        mid = FakeMid(fake_log_probs(case.seed, case.vocab), case.config.width)
        return cls(case, DraftTree.from_root(root), twin, mid, np.zeros(1, np.int64), [twin.root])

    def small(self, step: int) -> int:
        """Take a small step on both; return the number of nodes that the core says it added."""
        case, config = self.case, self.case.config
        result = small_step(self.fast, self.fast_frontier, case.context, step, config)
        self.fast_frontier = result.frontier
        self.slow_frontier = slow.small_step(
            self.slow,
            self.slow_frontier,
            case.tokens,
            case.log_p,
            step,
            config.width,
            config.max_ngram,
        )
        return result.added

    def graft(self) -> tuple[IntArray, list[slow.Node], MidCall, slow.Counts]:
        """Take a mid step on both; return both F_k and both counts."""
        config = self.case.config
        fast = fast_mid_step(self.fast, self.fast_frontier, self.mid, config)
        twin = slow.mid_step(
            self.slow,
            self.slow_frontier,
            self.mid.log_probs,
            config.width,
            config.pool,
            config.graft,
        )
        self.fast_frontier, self.slow_frontier = fast[1], twin[1]
        return fast[0], twin[0], fast[2], twin[2]

    def run(self, steps: Sequence[int]) -> None:
        """Take the steps of a schedule."""
        for step, bit in enumerate(steps, start=1):
            if bit:
                self.graft()
            else:
                self.small(step)

    def check(self) -> None:
        """Compare every node, oldest first, and the frontier in order."""
        nodes, twins = self.fast.nodes().tolist(), self.slow.nodes()
        assert fast_paths(self.fast, nodes) == slow_paths(twins)
        assert len(self.fast) == len(twins)
        for node, twin in zip(nodes, twins, strict=True):
            mid_log_p = None if np.isnan(self.fast.mid_log_p[node]) else self.fast.mid_log_p[node]
            assert self.fast.log_p[node] == twin.log_p
            assert self.fast.log_s[node] == twin.score()
            assert self.fast.depth[node] == twin.depth()
            assert self.fast.n_children[node] == len(twin.children)
            assert bool(self.fast.expanded[node]) == twin.expanded
            assert twin.parent is None or mid_log_p == twin.mid_log_p
            for token in range(self.case.vocab):
                assert (self.fast.child(node, token) >= 0) == (twin.child(token) is not None)
        assert fast_paths(self.fast, self.fast_frontier) == slow_paths(self.slow_frontier)


def fast_paths(tree: DraftTree, nodes: Sequence[int] | IntArray) -> list[tuple[int, ...]]:
    """Return the token paths of nodes of the core's tree."""
    return [tuple(tree.path_tokens(int(n))) for n in nodes]


def slow_paths(nodes: Sequence[slow.Node]) -> list[tuple[int, ...]]:
    """Return the token paths of nodes of the twin's tree."""
    return [n.path() for n in nodes]


# n-gram matching ------------------------------------------------------------------------------


@properties
@given(cases(), st.lists(st.integers(0, 4), max_size=6), st.data())
def test_matches_equal_a_scan(case: Case, path: list[int], data: st.DataObject) -> None:
    """Longest match and its followers, also when only part of a shared context counts."""
    length = data.draw(st.integers(1, len(case.tokens)))
    n = case.config.max_ngram
    assert case.context.matches(path) == slow.matches(case.tokens, path, n)
    assert case.context.matches(path, length) == slow.matches(case.tokens[:length], path, n)


@properties
@given(cases(), st.data())
def test_context_grown_in_pieces_equals_one_made_at_once(case: Case, data: st.DataObject) -> None:
    """Extending by the committed tokens leaves the same index."""
    cut = data.draw(st.integers(0, len(case.tokens)))
    context = Context(case.tokens[:cut], case.log_p[:cut], case.config.max_ngram)
    context.extend(case.tokens[cut:], case.log_p[cut:])
    for end in range(len(case.tokens) + 1):
        path = case.tokens[:end]
        assert context.matches(path) == case.context.matches(path)
    assert context.most_frequent() == case.context.most_frequent()


@properties
@given(cases(), st.data())
def test_followers_equal_a_scan(case: Case, data: st.DataObject) -> None:
    """The distinct tokens after each occurrence; below a root without any, the fallback child."""
    n = data.draw(st.integers(0, 8))
    size = {"min_size": n, "max_size": n}
    token = st.integers(0, case.vocab + 1)
    last = data.draw(st.lists(st.one_of(token, st.just(999)), **size))
    roots = data.draw(st.lists(st.booleans(), **size))
    lengths = data.draw(st.lists(st.integers(1, len(case.tokens)), **size))
    context = case.context
    for read in (lengths, [len(case.tokens)] * n):
        start, found = context.followers(
            np.array(last, np.int64),
            np.array(roots, bool),
            np.array(read, np.int64) if read is lengths else None,
        )
        assert len(start) == n + 1 and start[0] == 0 and start[-1] == len(found)
        for i in range(n):
            text = case.tokens[: read[i]]
            expected = {b for a, b in pairwise(text) if a == last[i]}
            if roots[i] and not expected:
                expected = {max(text, key=lambda t: (text.count(t), text[::-1].index(t) * -1))}
            assert sorted(found[start[i] : start[i + 1]].tolist()) == sorted(expected)
        assert not context.index[4].any()


def test_a_token_with_many_followers() -> None:
    """More than the first array has room for, for several paths at once."""
    many = [t for following in range(1, 300) for t in (0, following)]
    context = Context([*many, 0], [0.0] * (len(many) + 1))
    paths = np.array([0, 5, 0, 299, 7], np.int64)
    start, found = context.followers(paths, np.zeros(5, bool))
    assert np.diff(start).tolist() == [299, 1, 299, 1, 1]
    assert sorted(found[:299].tolist()) == list(range(1, 300))
    assert found[300:599].tolist() == found[:299].tolist()
    assert found[[299, 599, 600]].tolist() == [0, 0, 0]


def test_context_refuses_values_that_do_not_fit_the_tokens() -> None:
    """One log-probability a token, and token ids only."""
    with pytest.raises(ValueError, match="log_p: 1 values for 2 tokens"):
        Context([1, 2], [0.0])
    with pytest.raises(ValueError, match="tokens: -3 is not a token id"):
        Context([1, -3], [0.0, 0.0])


def test_table_log_p_inside_and_outside() -> None:
    """A token outside the table gets its last value minus 5."""
    assert table_log_p([7, 3], [-0.5, -2.0], 3) == -2.0
    assert table_log_p([7, 3], [-0.5, -2.0], 4) == -7.0


# Steps ----------------------------------------------------------------------------------------


@properties
@given(cases())
def test_small_step(case: Case) -> None:
    """Tree, scores and frontier after each of several small steps."""
    both = Both.start(case)
    for step in range(1, case.config.depth + 1):
        before = both.fast.size
        added = both.small(step)
        both.check()
        assert added == both.fast.size - before


@properties
@given(cases(graft="add"), st.data())
def test_small_step_reads_only_the_given_length(case: Case, data: st.DataObject) -> None:
    """A small step on the first tokens of a shared context equals one on those tokens alone."""
    length = data.draw(st.integers(1, len(case.tokens)))
    trees, frontiers = [], []
    short = Context(case.tokens[:length], case.log_p[:length], case.config.max_ngram)
    for context, limit in ((case.context, length), (short, None)):
        tree, frontier = DraftTree.from_root(case.tokens[length - 1]), np.zeros(1, np.int64)
        for step in range(1, case.config.depth + 1):
            frontier = small_step(tree, frontier, context, step, case.config, limit).frontier
        trees.append(tree)
        frontiers.append(frontier.tolist())
    assert frontiers[0] == frontiers[1]
    assert fast_paths(trees[0], trees[0].nodes()) == fast_paths(trees[1], trees[1].nodes())
    assert trees[0].log_s[: trees[0].size].tolist() == trees[1].log_s[: trees[1].size].tolist()


@properties
@given(cases(pool="tree", graft="add"))
def test_mid_step(case: Case) -> None:
    """Pool, refresh, expansion, counts and the promise that nothing is ever deleted."""
    both = Both.start(case)
    both.run(case.schedule[:-1])
    fast = both.fast
    before, subtrees = fast_paths(fast, fast.nodes()), _children(fast)
    expanded = set(np.flatnonzero(fast.expanded[: fast.size]).tolist())
    pool = mid_pool(fast, both.fast_frontier, case.config).tolist()
    assert pool == [n for n in range(fast.size) if n not in expanded]

    picked, slow_picked, call, counts = both.graft()
    both.check()
    assert fast_paths(fast, picked) == slow_paths(slow_picked)
    assert not expanded & set(picked.tolist())
    assert set(np.flatnonzero(fast.expanded[: fast.size])) == expanded | set(picked.tolist())
    assert astuple(call) == (
        counts.refresh_nodes,
        counts.expand_nodes,
        counts.all_nodes,
        counts.pool_nodes,
        counts.earlier_picks,
        counts.refresh_levels,
        counts.all_levels,
    )
    after = fast_paths(fast, fast.nodes())
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)
    for node, children in subtrees.items():
        assert _children(fast)[node][: len(children)] == children
    for node in range(1, fast.size):
        path = after[node]
        assert fast.log_p[node] == both.mid.log_probs(path[:-1])[path[-1]]


def _children(tree: DraftTree) -> dict[int, list[int]]:
    return {n: [c for c in range(1, tree.size) if tree.parent[c] == n] for n in range(tree.size)}


@properties
@given(cases(pool="frontier", graft="replace"))
def test_mid_step_frontier_pool_and_replacing_graft(case: Case) -> None:
    """Both ablations together equal the twin, node by node."""
    both = Both.start(case)
    for step, bit in enumerate(case.schedule, start=1):
        if bit:
            frontier = fast_paths(both.fast, both.fast_frontier)
            picked, slow_picked, _, _ = both.graft()
            assert set(fast_paths(both.fast, picked)) <= set(frontier)
            assert fast_paths(both.fast, picked) == slow_paths(slow_picked)
        else:
            both.small(step)
        both.check()


@properties
@given(cases(), st.integers(0, 30))
def test_copies_are_independent(case: Case, token: int) -> None:
    """Growing a copy leaves the original alone."""
    both = Both.start(case)
    both.run(case.schedule)
    copy = both.fast.copy()
    node = int(copy.nodes()[-1])
    if copy.child(node, token) < 0:
        copy.add(node, token, -1.0)
    copy.log_p[0] = 7.0
    copy.expanded[:] = True
    both.check()


# Prune, verification, signals -----------------------------------------------------------------


@properties
@given(cases())
def test_prune(case: Case) -> None:
    """Within the budget, closed under ancestors, and the general rule's choice and order."""
    both = Both.start(case)
    both.run(case.schedule)
    tree = both.fast
    kept = prune(tree, case.config)
    assert len(kept) == min(case.config.verify_nodes, len(tree) - 1)
    for place, node in enumerate(kept.tolist()):
        assert node != 0
        assert set(tree.path(node)[:-1]) <= set(kept[:place].tolist())
    assert fast_paths(tree, kept) == slow_paths(slow.prune(both.slow, case.config.verify_nodes))


@properties
@given(cases(), st.integers(0, 4))
def test_no_node_lies_beyond_the_models_context(case: Case, depth: int) -> None:
    """With a depth limit no node is deeper, and all-small trees are the unlimited ones cut off."""
    limited, free = Both.start(case), Both.start(case)
    limited.fast.max_depth = depth
    for step, action in enumerate(case.schedule, start=1):
        tree, frontier = limited.fast, limited.fast_frontier
        if action:
            _, limited.fast_frontier, _ = fast_mid_step(tree, frontier, limited.mid, case.config)
        else:
            limited.fast_frontier = small_step(
                tree, frontier, case.context, step, case.config
            ).frontier
    assert limited.fast.depth[: limited.fast.size].max() <= depth
    first = small_step(free.fast, free.fast_frontier, case.context, 1, case.config)
    again = Both.start(case)
    again.fast.max_depth = depth
    small_step(again.fast, again.fast_frontier, case.context, 1, case.config)
    assert first.added >= again.fast.size - 1
    within = {p for p in fast_paths(free.fast, free.fast.nodes()[1:]) if len(p) <= depth}
    assert set(fast_paths(again.fast, again.fast.nodes()[1:])) == within


@properties
@given(cases(), st.lists(st.integers(0, 4), max_size=8))
def test_accepted_path_and_ranks(case: Case, continuation: list[int]) -> None:
    """A from the known continuation; the ranks give A for every smaller budget."""
    both = Both.start(case)
    both.run(case.schedule)
    kept = prune(both.fast, case.config)
    path, ranks = accepted_path(both.fast, kept, continuation)
    twins = slow.prune(both.slow, case.config.verify_nodes)
    assert len(path) == slow.accepted(both.slow, twins, continuation)
    assert fast_paths(both.fast, path) == [tuple(continuation[:n]) for n in range(1, len(path) + 1)]
    assert [int(kept[r]) for r in ranks] == path
    for budget in range(1, case.config.verify_nodes + 1):
        smaller = slow.prune(both.slow, budget)
        leading = next(i for i, r in enumerate([*ranks, 10**6]) if r >= budget)
        assert leading == slow.accepted(both.slow, smaller, continuation)


@properties
@given(cases())
def test_signals(case: Case) -> None:
    """All ten, before each step."""
    both = Both.start(case)
    for step, bit in enumerate(case.schedule, start=1):
        fast = signals(both.fast, both.fast_frontier, case.config)
        twin = slow.signals(both.slow, both.slow_frontier, case.config.width, case.config.pool)
        assert fast.shape == (len(SIGNALS),)
        assert fast.tolist() == pytest.approx(twin, abs=1e-12)
        both.graft() if bit else both.small(step)


@properties
@given(cases())
def test_whole_rounds(case: Case) -> None:
    """Random schedules, widths, budgets and ablations: the same tree and the same kept nodes."""
    both = Both.start(case)
    both.run(case.schedule)
    both.check()
    config = case.config
    twin = slow.run_round(
        case.tokens,
        case.log_p,
        case.schedule,
        both.mid.log_probs,
        config.width,
        config.verify_nodes,
        config.max_ngram,
        config.pool,
        config.graft,
    )
    assert fast_paths(both.fast, prune(both.fast, config)) == slow_paths(twin.kept)


@properties
@given(cases(evaluation="needed"))
def test_both_ways_of_evaluating_give_the_same_tree(case: Case) -> None:
    """``needed`` and ``all``: same nodes, scores, kept nodes and counts."""
    results = []
    for evaluation in ("needed", "all"):
        config = DraftingConfig(
            depth=case.config.depth,
            width=case.config.width,
            verify_nodes=case.config.verify_nodes,
            max_ngram=case.config.max_ngram,
            pool=case.config.pool,
            graft=case.config.graft,
            evaluation=evaluation,
        )
        both = Both.start(
            Case(case.tokens, case.log_p, case.schedule, config, case.vocab, case.seed)
        )
        calls = []
        for step, bit in enumerate(case.schedule, start=1):
            if bit:
                calls.append(both.graft()[2])
            else:
                both.small(step)
        tree = both.fast
        evaluated = len(both.mid.evaluated)
        if evaluation == "needed":
            assert evaluated == sum(c.refresh_nodes + c.expand_nodes for c in calls)
        else:
            assert evaluated == sum(c.all_nodes for c in calls)
        results.append(
            (
                fast_paths(tree, tree.nodes()),
                tree.log_s[tree.nodes()].tolist(),
                prune(tree, config).tolist(),
                calls,
            )
        )
    assert results[0] == results[1]


def test_a_tree_outgrows_its_first_arrays() -> None:
    """Spare capacity runs out without a change of any value."""
    tree = DraftTree.from_root(1)
    for i in range(400):
        tree.add(i // 2, i % 2, -0.25)
    assert len(tree) == 401
    assert tree.parent[1:401].tolist() == [i // 2 for i in range(400)]
    assert np.isnan(tree.mid_log_p[1:401]).all()
    assert (tree.row[1:401] == -1).all()
    assert not tree.expanded[:401].any() and not tree.seen[:401].any()
    assert tree.log_s[1:401].tolist() == [-0.25 * tree.depth[i] for i in range(1, 401)]
    before = tree.log_s[:401].tolist()
    tree.update_scores()
    assert tree.log_s[:401].tolist() == before


# Examples written by hand ---------------------------------------------------------------------


def test_fallback_child_is_the_most_frequent_token_the_recent_one_of_two() -> None:
    """No match at the root: one child, scored by its last position."""
    config = DraftingConfig(depth=1, width=3)
    tree = DraftTree.from_root(9)
    context = Context([5, 6, 5, 6, 9], [0.0, -1.0, -2.0, -3.0, -4.0])
    frontier = small_step(tree, np.zeros(1, np.int64), context, 1, config).frontier
    assert fast_paths(tree, frontier) == [(6,)]
    assert tree.log_p[frontier].tolist() == [-3.0]

    alone = DraftTree.from_root(9)
    frontier = small_step(alone, np.zeros(1, np.int64), Context([9], [0.0]), 1, config).frontier
    assert fast_paths(alone, frontier) == [(9,)]
    assert alone.log_p[frontier].tolist() == [-5.0]


def test_a_mid_step_after_an_empty_frontier_still_picks_from_the_whole_tree() -> None:
    """Small steps that find nothing leave N empty; the pool is the tree all the same."""
    config = DraftingConfig(depth=3, width=2)
    context = Context([1, 2, 3], [0.0, -1.0, -1.0], config.max_ngram)
    tree = DraftTree.from_root(3)
    frontier = small_step(tree, np.zeros(1, np.int64), context, 1, config).frontier
    frontier = small_step(tree, frontier, context, 2, config).frontier
    assert fast_paths(tree, tree.nodes()) == [(), (3,)]
    assert frontier.tolist() == []
    picked, frontier, call = fast_mid_step(tree, frontier, FakeMid(fake_log_probs(1, 4), 2), config)
    assert picked.tolist() == [0, 1]
    assert call.pool_nodes == 2
    assert len(frontier) == 2


def test_a_replacing_graft_can_lose_the_targets_token() -> None:
    """Ablation ``w/o ND``: in the tree before the graft, gone after it; ``add`` keeps it."""
    context = Context([1, 2, 3, 1], [0.0, -0.5, -0.5, -0.5])
    continuation = [2, 3]  # what the small drafter proposes is what the target says

    def log_probs(path: tuple[int, ...]) -> list[float]:
        return [-0.1, -1.0, -3.0, -4.0]  # token 2 is not among the mid drafter's best two

    accepted = {}
    for graft in ("add", "replace"):
        config = DraftingConfig(depth=2, width=2, graft=graft)
        tree = DraftTree.from_root(1)
        frontier = small_step(tree, np.zeros(1, np.int64), context, 1, config).frontier
        assert accepted_path(tree, prune(tree, config), continuation)[0] != []
        fast_mid_step(tree, frontier, FakeMid(log_probs, 2), config)
        assert (tree.child(0, 2) >= 0) == (graft == "add")
        accepted[graft] = len(accepted_path(tree, prune(tree, config), continuation)[0])
    assert accepted == {"add": 2, "replace": 0}


def test_followers_outgrow_their_first_buffer() -> None:
    """Many roots without an earlier occurrence, in one call: a fallback for each."""
    n = 100
    context = Context(list(range(200)), [0.0] * 200)
    start, found = context.followers(np.arange(50, 150), np.ones(n, bool), np.arange(51, 151))
    assert start.tolist() == list(range(n + 1))
    assert found.tolist() == list(range(50, 150))
