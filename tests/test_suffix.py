"""The suffix drafter: what it proposes, what it remembers, and that memory is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import suffix as plain
from treegraft_core import Context, InputError
from treegraft_core.suffix import MOST_SEGMENTS, SuffixDrafter, TextIndex, sorted_positions
from treegraft_core.suffix_kernels import in_corpus
from treegraft_core.tree import LOG_P_STEP

UNCUT = 1e-9
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def context_of(tokens: list[int]) -> Context:
    return Context(tokens, np.zeros(len(tokens)))


def check_same(found: list, expected: list) -> None:
    """Compare chains as sets with repetition; log p to the grid."""
    found, expected = sorted(found), sorted(expected)
    assert [(c[0], c[2]) for c in found] == [(c[0], c[2]) for c in expected]
    for one, two in zip(found, expected, strict=True):
        assert np.allclose(one[1], two[1], rtol=0, atol=2 * LOG_P_STEP)


@settings(max_examples=200, deadline=None)
@given(
    TEXT,
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(TEXT, max_size=4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_chains_are_those_of_a_scan(
    tokens: list[int], path: list[int], corpus: list, longest: int, chain: int, ahead: int
) -> None:
    length = max(1, len(tokens) - ahead)
    small = SuffixDrafter(
        longest_match=longest,
        places=100,
        chain=chain,
        doubt=0.7,
        min_probability=UNCUT,
        corpus=corpus,
        corpus_weight=0.3,
    )
    found = [(c.tokens, c.log_p, c.match) for c in small.propose(context_of(tokens), path, length)]
    usable = [text for text in corpus if len(text) > 1]
    expected = plain.chains(tokens[:length], path, usable, longest, 100, chain, 0.7, 0.3)
    check_same(found, expected)
    matches = [match for _, _, match in found]
    assert matches == sorted(matches, reverse=True)


@settings(max_examples=80, deadline=None)
@given(TEXT, st.lists(TEXT, max_size=3), st.floats(0.01, 0.9))
def test_a_chain_ends_before_it_gets_unlikely(
    tokens: list[int], corpus: list, least: float
) -> None:
    whole, cut = (SuffixDrafter(chain=4, corpus=corpus, min_probability=p) for p in (UNCUT, least))
    expected = []
    for i, chain in enumerate(whole.propose(context_of(tokens), [], len(tokens))):
        reach = np.exp(np.cumsum(chain.log_p))
        if (abs(reach - least) < 1e-4).any():
            return  # too close to tell
        kept = int((reach >= least).sum()) or int(i == 0)
        if kept:
            expected.append((chain.tokens[:kept], chain.log_p[:kept], chain.match))
    found = cut.propose(context_of(tokens), [], len(tokens))
    assert [(c.tokens, c.log_p, c.match) for c in found] == expected


@settings(max_examples=80, deadline=None)
@given(TEXT, st.integers(1, 4))
def test_few_places_are_the_longest_matches_and_the_most_recent(
    tokens: list[int], few: int
) -> None:
    small = SuffixDrafter(places=few, chain=1, min_probability=UNCUT)
    found = small.propose(context_of(tokens), [], len(tokens))
    every = sorted(plain.occurrences(tokens, tokens[-32:]), reverse=True)[:few]
    assert [(c.match, c.tokens[0]) for c in found] == [(m, tokens[at]) for m, at in every]


@settings(max_examples=80, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6), TEXT, st.integers(1, 5))
def test_few_places_of_a_corpus_are_the_longest_matches(
    corpus: list, tail: list[int], few: int
) -> None:
    index = TextIndex(1000)
    index.add(corpus)
    last_first = np.array(tail[::-1], np.int64)
    place, match = in_corpus(last_first, index.tokens, index.order, index.segments, few)
    usable = [text for text in corpus if len(text) > 1]
    every = sorted((m for text in usable for m, _ in plain.occurrences(text, tail)), reverse=True)
    assert match.tolist() == every[:few]
    assert len(set(place.tolist())) == len(place)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=2, max_size=60))
def test_positions_are_sorted_by_what_precedes_them(tokens: list[int]) -> None:
    flat = np.array(tokens, np.int32)
    order = sorted_positions(flat).tolist()
    assert sorted(order) == [i for i in range(len(flat) - 1) if flat[i] >= 0 and flat[i + 1] >= 0]
    keys = [tuple(tokens[i::-1]) for i in order]
    assert keys == sorted(keys)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=20), st.integers(5, 200))
def test_an_index_keeps_the_newest_texts_within_its_limit(batches: list, most: int) -> None:
    index = TextIndex(most)
    kept: list[list[int]] = []
    for batch in batches:
        index.add(batch)
        kept += [text[-most:] for text in batch if len(text[-most:]) > 1]
        while sum(map(len, kept)) > most:
            kept.pop(0)
        assert len(index) == sum(map(len, kept)) <= most
        assert len(index.segments) - 1 <= MOST_SEGMENTS
        assert index.tokens.tolist() == [t for text in kept for t in (*text, -1)]
        assert sorted(index.order.tolist()) == sorted(
            i for i in range(len(index.tokens) - 1)
            if index.tokens[i] >= 0 and index.tokens[i + 1] >= 0
        )  # fmt: skip


def test_memory_is_bounded_by_config() -> None:
    small = SuffixDrafter(remember_tokens=2000)
    rng = np.random.default_rng(0)
    for _ in range(300):
        small.remember(rng.integers(0, 50, size=int(rng.integers(2, 80))).tolist())
    assert len(small.answers) <= 2000
    assert small.answers.bytes < 2000 * 8 + 4 * 2000 + 1000


def test_finished_answers_are_found_in_later_requests() -> None:
    small = SuffixDrafter(remember_tokens=100)
    context = context_of([9, 5, 6])
    assert small.propose(context, [], 3) == []
    small.remember([5, 6, 7, 8])
    found = small.propose(context, [], 3)
    assert [c.tokens for c in found] == [(7, 8)] and found[0].match == 2
    forgetful = SuffixDrafter()
    forgetful.remember([5, 6, 7, 8])
    assert forgetful.propose(context, [], 3) == []


def test_log_probabilities_are_on_the_grid_and_at_most_zero() -> None:
    small = SuffixDrafter()
    found = small.proposals(context_of([1, 2, 3, 1, 2, 4, 1, 2]), np.array([[-1]]), np.array([8]))
    values = found.log_p[found.tokens >= 0]
    assert (values <= 0).all() and np.array_equal(
        values, np.round(values / LOG_P_STEP) * LOG_P_STEP
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("places", 0), ("chain", 65), ("longest_match", 2.5), ("longest_match", True),
        ("doubt", 0), ("doubt", float("nan")), ("min_probability", 0), ("min_probability", 1.5),
        ("corpus_weight", -1), ("remember_tokens", -1),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"small\.{name}={value}: must be"):
        SuffixDrafter(**{name: value})  # type: ignore[arg-type]
