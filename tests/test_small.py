"""The small drafter's protocol: a written one goes wherever n-grams go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft_core import (
    Chain,
    Context,
    DraftingConfig,
    DraftTree,
    InputError,
    SmallDrafter,
    chain_kernels,
)
from treegraft_core.drafting import small_step
from treegraft_core.small import NGRAM, Chains
from treegraft_core.suffix import SuffixDrafter

TOKENS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


class WrittenNGram(SmallDrafter):
    """N-grams by the protocol alone."""

    name = "ngram"

    def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
        return NGRAM.propose(context, path, length)


def context_of(tokens: Sequence[int], max_ngram: int) -> Context:
    log_p = -np.random.default_rng(len(tokens)).random(len(tokens))
    return Context(tokens, log_p, max_ngram)


def grown(small: SmallDrafter, context: Context, length: int, room: int) -> list[np.ndarray]:
    config = DraftingConfig(depth=3, width=3, max_ngram=context.max_ngram, small=small)
    tree = DraftTree.from_root(int(context.tokens[length - 1]), room)
    frontier = np.zeros(1, np.int64)
    found: list[np.ndarray] = []
    for step in (1, 2, 3):
        frontier = small_step(tree, frontier, context, step, config, length).frontier
        found += [tree.node[: tree.size].copy(), frontier.copy()]
    return found


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(1, 5), st.integers(0, 4), st.integers(0, 10))
def test_written_ngrams_grow_the_compiled_ones_trees(
    tokens: list[int], max_ngram: int, ahead: int, room: int
) -> None:
    context = context_of(tokens, max_ngram)
    length = max(1, len(tokens) - ahead)
    for one, two in zip(
        grown(NGRAM, context, length, room),
        grown(WrittenNGram(), context, length, room),
        strict=True,
    ):
        assert one.shape == two.shape
        for name in one.dtype.names or ():
            nan = one[name].dtype.kind == "f"
            assert np.array_equal(one[name], two[name], equal_nan=nan), name
        assert one.dtype.names or np.array_equal(one, two)


@settings(max_examples=80, deadline=None)
@given(TOKENS, st.integers(1, 5), st.sampled_from(["ngram", "written", "suffix"]))
def test_every_child_that_is_drafted_is_a_follower(
    tokens: list[int], max_ngram: int, kind: str
) -> None:
    drafters = {"ngram": NGRAM, "written": WrittenNGram(), "suffix": SuffixDrafter(chain=4)}
    small, context = drafters[kind], context_of(tokens, max_ngram)
    config = DraftingConfig(depth=4, width=3, max_ngram=max_ngram, small=small)
    tree = DraftTree.from_root(tokens[-1])
    frontier = np.zeros(1, np.int64)
    for step in (1, 2, 3, 4):
        frontier = small_step(tree, frontier, context, step, config).frontier
    nodes = np.arange(tree.size)
    paths = chain_kernels.paths_to(tree.node, nodes)
    start, found = small.followers(context, paths, np.full(tree.size, len(tokens)))
    for node in range(1, tree.size):
        parent = int(tree.parent[node])
        assert int(tree.token[node]) in found[start[parent] : start[parent + 1]]
    for i in range(tree.size):
        own = found[start[i] : start[i + 1]].tolist()
        assert len(own) == len(set(own))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=4)), max_size=12))
def test_prefixes_are_distinct_and_complete(rows: list[tuple[int, list[int]]]) -> None:
    deepest = max((len(path) for _, path in rows), default=0) or 1
    paths = np.full((len(rows), deepest), -1, np.int64)
    for i, (_, path) in enumerate(rows):
        paths[i, : len(path)] = path
    lengths = np.array([length for length, _ in rows], np.int64)
    prefixes, their, row = chain_kernels.prefixes_of(paths, lengths)
    keys = [
        (int(n), tuple(t for t in p if t >= 0))
        for n, p in zip(their, prefixes.tolist(), strict=True)
    ]
    assert len(keys) == len(set(keys))
    for i, (length, path) in enumerate(rows):
        assert [keys[row[i, d]] for d in range(len(path) + 1)] == [
            (length, tuple(path[:d])) for d in range(len(path) + 1)
        ]
        assert (row[i, len(path) + 1 :] == -1).all()
    assert set(keys) == {
        (length, tuple(path[:d])) for length, path in rows for d in range(len(path) + 1)
    }


class Repeat(SmallDrafter):
    """Says the last token again."""

    name = "repeat"

    def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
        text = [*context.tokens[:length].tolist(), *path]
        return [Chain((text[-1],), (-1.0,), 1)]


def test_nothing_proposed_is_the_most_frequent_token_at_the_root_once() -> None:
    class Nothing(Repeat):
        def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
            return []

    context = context_of([3, 1, 3, 2], 2)
    nodes = grown(Nothing(), context, 4, 9)
    assert nodes[0]["token"].tolist() == [2, 3] and nodes[1].tolist() == [1]
    assert len(nodes[2]) == 2 and not len(nodes[3])
    start, found = Nothing().followers(context, np.array([[-1], [3]]), np.array([4, 4]))
    assert start.tolist() == [0, 1, 1] and found.tolist() == [3]


def test_proposals_are_asked_for_once_a_path() -> None:
    asked = []

    class Counted(Repeat):
        def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
            asked.append((length, *path))
            return super().propose(context, path, length)

    small, context = Counted(), context_of([1, 2, 1], 2)
    paths = np.array([[1, -1], [1, 1], [1, -1]])
    for _ in range(2):
        small.proposals(context, paths, np.array([3, 3, 3]))
    assert asked == [(3, 1), (3, 1, 1)]
    context.extend([2], [-0.5])
    small.proposals(context, paths, np.array([4, 4, 4]))
    assert len(asked) == 4


@pytest.mark.parametrize(
    "chain",
    [((), (), 0), ((1,), (), 0), ((-1,), (-1.0,), 0), ((1,), (0.5,), 0), ((1,), (float("nan"),), 0),
     ((1,), (-1.0,), -1)],
)  # fmt: skip
def test_a_chain_that_is_none_is_refused(chain: tuple) -> None:
    with pytest.raises(InputError, match=r"^small: a chain"):
        Chain(*chain)


def test_no_drafter_is_refused() -> None:
    with pytest.raises(InputError, match=r"drafting\.small='ngram': must be a"):
        DraftingConfig(small="ngram")  # type: ignore[arg-type]


def test_chains_of_lists() -> None:
    found = Chains.of([[Chain((1, 2), (-1.0, -0.5), 3)], [], [Chain((4,), (0.0,))]])
    assert found.start.tolist() == [0, 1, 1, 2]
    assert found.tokens.tolist() == [[1, 2], [4, -1]]
    assert found.match.tolist() == [3, 0]


def test_rules_tell_drafters_apart() -> None:
    drafters = [SuffixDrafter(), SuffixDrafter(chain=5)]
    drafters += [SuffixDrafter(corpus=[[1, 2, last]]) for last in (3, 4)]
    rules = {NGRAM.rule(), *(small.rule() for small in drafters)}
    assert len(rules) == 5 and NGRAM.rule() == "ngram"
