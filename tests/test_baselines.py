"""CSD, SpecInfer's tree and the ablations; caches that systems share; where mid calls pick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config

from tests import reference as slow
from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from tests.test_core_against_reference import Both, Case, FakeMid, cases, fake_log_probs
from tests.test_decoder import as_defined, greedy, noisy, plain_log_probs
from tests.test_sampling import SYSTEMS
from treegraft_core.context import Context
from treegraft_core.decoder import (
    Caches,
    Generation,
    Picks,
    TreeGraftDecoder,
    decode_plain,
    where_picked,
)
from treegraft_core.drafting import (
    DraftingConfig,
    MidCall,
    accepted_path,
    begin_mid_step,
    expand,
    mid_pool,
    nodes_of_shape,
    prune,
    select_frontier,
    small_step,
)
from treegraft_core.enumeration import enumerate_states
from treegraft_core.errors import InputError
from treegraft_core.guard import RuntimeConfig
from treegraft_core.models import CachedModel
from treegraft_core.pair import Pair
from treegraft_core.schedulers import FixedSchedule, RandomSchedule, all_mid
from treegraft_core.sequence import overwrite, unread, write_on
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import UNLIMITED, DraftTree, IntArray

PROMPTS = ([5], [7, 9, 7, 9, 7], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15])
CSD = DraftingConfig(5, 4, 12, structure="sequence")
SPECINFER = DraftingConfig(5, 4, 12, pool="frontier", expansion="auto")

properties = settings(derandomize=True, deadline=None, max_examples=100, database=None)


# Steps on made-up drafters --------------------------------------------------------------------


class RowMid(FakeMid):
    """A made-up drafter that marks the nodes it has read, as the real one does."""

    def evaluate(self, tree: DraftTree, nodes: IntArray) -> None:
        super().evaluate(tree, nodes)
        tree.node["row"][nodes] = 0


def draft(
    case: Case, config: DraftingConfig, mid: FakeMid, max_depth: int = UNLIMITED
) -> tuple[DraftTree, list[MidCall]]:
    """Draft by the case's schedule as the decoder does; return the tree and the mid calls."""
    tree = DraftTree.from_root(case.tokens[-1], max_depth)
    frontier, calls = np.zeros(1, np.int64), []
    for step, bit in enumerate(case.schedule, start=1):
        if config.structure == "sequence" and not bit:
            frontier = write_on(tree, frontier, case.context, step, config)
        elif not bit:
            frontier = small_step(tree, frontier, case.context, step, config).frontier
        else:
            calls.append(call := MidCall())
            if config.structure == "sequence":
                mid.evaluate(tree, unread(tree, frontier, call))
                frontier = overwrite(tree, mid, call)
                continue
            mid.evaluate(tree, begin_mid_step(tree, call, False))
            picked, missing = select_frontier(tree, frontier, mid, call, config)
            mid.evaluate(tree, missing)
            frontier = expand(tree, picked, mid, config, step)
    return tree, calls


def paths(tree: DraftTree, nodes: IntArray) -> list[tuple[int, ...]]:
    """Return the nodes' token paths."""
    return [tuple(tree.path_tokens(int(node))) for node in nodes]


def prefixes(sequence: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return the first ``most`` prefixes of a sequence."""
    return [tuple(sequence[:n]) for n in range(1, min(len(sequence), most) + 1)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# CSD ------------------------------------------------------------------------------------------


@properties
@given(cases(), st.integers(0, 12) | st.just(UNLIMITED), st.lists(st.integers(0, 4), max_size=9))
def test_the_sequence_equals_the_lists(case: Case, deepest: int, continuation: list[int]) -> None:
    """One chain of living nodes: what is verified, what each mid call read, and A."""
    config = replace(case.config, structure="sequence")
    mid = RowMid(fake_log_probs(case.seed, case.vocab), config.width)
    tree, calls = draft(case, config, mid, deepest)

    def choice(path: tuple[int, ...]) -> int:
        values = mid.log_probs(path)
        return values.index(max(values))

    twin = slow.csd_round(case.tokens, case.schedule, choice, config.max_ngram, deepest)
    kept = prune(tree, config)
    assert paths(tree, kept) == prefixes(twin.sequence, config.verify_nodes)
    assert len(tree) == len(twin.sequence) + 1
    assert tree.n_children[tree.nodes()].tolist() == [1] * len(twin.sequence) + [0]
    assert [call.refresh_nodes for call in calls] == twin.read
    assert [call.all_nodes for call in calls] == twin.read
    assert [call.expand_nodes for call in calls] == [0] * len(calls)
    assert [call.pool_nodes for call in calls] == twin.length
    assert [bool(call.earlier_picks) for call in calls] == twin.overwrote
    assert len(mid.evaluated) == sum(twin.read)
    path, _ = accepted_path(tree, kept, continuation)
    assert len(path) == common(twin.sequence[: config.verify_nodes], continuation)


@settings(properties, max_examples=40)
@given(
    st.lists(st.sampled_from([3, 7, 9, 14, 30]), min_size=2, max_size=30),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_rounds_on_a_sequence_equal_the_lists(
    tokens: list[int], schedule: list[int], max_ngram: int, budget: int
) -> None:
    """With real models: kept nodes, counts, A and the committed tokens of a round."""
    pair, n = agreeing_pair(), len(schedule)
    config = DraftingConfig(n, 2, budget, max_ngram, structure="sequence")
    decoder = as_defined(pair, FixedSchedule(schedule), config, keep_trees=True)
    round_, committed = decoder.round(decoder.resume(tokens), len(tokens))
    mid, target = plain_log_probs(pair.mid, tokens), plain_log_probs(pair.target, tokens)
    twin = slow.csd_round(
        tokens, schedule, lambda path: int(np.argmax(mid(path))), config.max_ngram
    )
    sequence = twin.sequence[:budget]
    accepted = 0
    while accepted < len(sequence) and sequence[accepted] == np.argmax(
        target(tuple(sequence[:accepted]))
    ):
        accepted += 1
    bonus = int(np.argmax(target(tuple(sequence[:accepted]))))
    assert round_.kept == prefixes(twin.sequence, budget)
    assert [call.refresh_nodes for call in round_.calls] == twin.read
    assert [bool(call.earlier_picks) for call in round_.calls] == twin.overwrote
    assert round_.tree_nodes == len(twin.sequence) + 1
    assert round_.ranks == list(range(accepted))
    assert committed == [*sequence[:accepted], bonus]
    assert decoder._target.length == len(tokens) + accepted


@cache
def agreeing_pair() -> Pair:
    """Return a pair whose drafter often, not always, has the target's tokens."""
    target = tiny_llama(0)
    return Pair("agreeing", target, noisy(target, 0.03), word_tokenizer(), None, ())


def test_a_small_drafter_writes_on_and_the_mid_drafter_overwrites() -> None:
    """By hand: most recent place, longest match, shorter chains, one token put in place."""
    context = Context([1, 2, 9, 1, 2, 3, 4, 5, 6, 7, 1, 2], [0.0] + [-1.0] * 11)
    config = DraftingConfig(4, 2, 20, structure="sequence")
    tree = DraftTree.from_root(2)
    end = write_on(tree, np.zeros(1, np.int64), context, 1, config)
    assert tree.path_tokens(int(end[0])) == [3, 4, 5, 6, 7]
    end = write_on(tree, end, context, 2, config)
    assert tree.path_tokens(int(end[0])) == [3, 4, 5, 6, 7, 1, 2]  # four more would pass the end

    def log_probs(path: tuple[int, ...]) -> list[float]:
        best = 8 if path == (3, 4) else (*path, 0)[0] + len(path) if path else 3
        return [-0.1 if token == best else -3.0 for token in range(10)]

    mid, call = RowMid(log_probs, 2), MidCall()
    mid.evaluate(tree, unread(tree, end, call))
    end = overwrite(tree, mid, call)
    assert tree.path_tokens(int(end[0])) == [3, 4, 8]
    assert (call.refresh_nodes, call.pool_nodes, call.earlier_picks) == (8, 8, 1)
    end = write_on(tree, end, context, 4, config)
    assert tree.path_tokens(int(end[0])) == [3, 4, 8]  # 8 occurs nowhere, and step 4 is not 1
    mid.evaluate(tree, unread(tree, end, call := MidCall()))
    end = overwrite(tree, mid, call)
    assert tree.path_tokens(int(end[0])) == [3, 4, 8, 6]
    assert (call.refresh_nodes, call.pool_nodes, call.earlier_picks) == (1, 4, 0)


def test_the_guard_judges_a_sequence_by_a_sequence(tiny_pair: Pair) -> None:
    """Its drafts beside plain steps are what the small drafter would have drafted."""
    branching = {}
    for name in ("csd", "all_small"):
        decoder = SYSTEMS[name].decoder(tiny_pair, runtime=RuntimeConfig())
        drafts: list[DraftTree] = []
        decoder.guard.shadow = lambda tree, *_, drafts=drafts: drafts.append(tree)  # type: ignore
        decoder._shadow(decoder.resume([7, 1, 7, 2, 7, 3, 7]))
        (tree,) = drafts
        branching[name] = int(tree.n_children[tree.nodes()].max())
    assert branching == {"csd": 1, "all_small": 3}


# SpecInfer ------------------------------------------------------------------------------------


@properties
@given(st.integers(0, 9999), st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_fixed_shape_equals_the_recursion(seed: int, vocab: int, shape: list[int]) -> None:
    """Every node of every layer, all of them verified, layer by layer evaluated."""
    width = max(shape)
    config = DraftingConfig(
        len(shape), width, nodes_of_shape(shape), pool="frontier", expansion=tuple(shape)
    )
    mid = FakeMid(fake_log_probs(seed, vocab), width)
    case = Case([0], [0.0], [1] * len(shape), config, vocab, seed)
    tree, calls = draft(case, config, mid)
    expected = slow.fixed_shape(shape, mid.log_probs)
    kept = prune(tree, config)
    assert sorted(paths(tree, kept)) == sorted(expected)
    assert len(tree) == len(expected) + 1
    scores = tree.log_s[kept].tolist()
    assert scores == sorted(scores, reverse=True)
    for path, score in zip(paths(tree, kept), scores, strict=True):
        assert score == sum(mid.log_probs(path[:n])[path[n]] for n in range(len(path)))
    layers = [sum(len(path) == depth for path in expected) for depth in range(1, len(shape))]
    assert [call.expand_nodes for call in calls] == [1, *layers]
    assert [call.pool_nodes for call in calls] == [1, *layers]
    assert [call.refresh_nodes for call in calls] == [0] * len(shape)


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 2, 1), (3,), "auto"])
def test_rounds_of_a_fixed_shape_equal_the_recursion(shape: tuple[int, ...] | str) -> None:
    """With real models, over the rounds of a request."""
    pair, depth = agreeing_pair(), 4 if shape == "auto" else len(shape)
    config = DraftingConfig(depth, 3, 20, pool="frontier", expansion=shape)  # type: ignore[arg-type]
    decoder = as_defined(pair, all_mid(depth), config, keep_trees=True)
    result = decoder.generate(PROMPTS[2], 16)
    text = [*PROMPTS[2], *result.tokens]
    for round_ in result.rounds:
        log_probs = plain_log_probs(pair.mid, text[: round_.context_tokens], edges=True)
        assert isinstance(config.expansion, tuple)
        assert sorted(round_.kept) == sorted(slow.fixed_shape(config.expansion, log_probs))
        assert round_.kept_nodes == nodes_of_shape(config.expansion)
    assert sum(round_.accepted for round_ in result.rounds) > 0


@pytest.mark.parametrize(
    ("depth", "width", "budget", "shape"),
    [
        (5, 10, 63, (2, 2, 2, 2, 2)),
        (5, 10, 7, (1, 1, 1, 2, 1)),
        (5, 10, 5, (1, 1, 1, 1, 1)),
        (1, 10, 63, (10,)),
        (1, 10, 7, (7,)),
        (3, 2, 1000, (2, 2, 2)),
    ],
)
def test_automatic_shapes(depth: int, width: int, budget: int, shape: tuple[int, ...]) -> None:
    """By turns, first step first, as far as B_ver and W allow."""
    config = DraftingConfig(depth, width, budget, pool="frontier", expansion="auto")
    assert config.expansion == shape


@properties
@given(st.integers(1, 7), st.integers(1, 12), st.integers(1, 200))
def test_an_automatic_shape_is_as_wide_as_it_can_be(depth: int, width: int, budget: int) -> None:
    """Within B_ver and W, and with any single number one higher it is not."""
    if depth > budget:
        with pytest.raises(InputError, match=r"drafting\.expansion=auto: a chain of"):
            DraftingConfig(depth, width, budget, pool="frontier", expansion="auto")
        return
    config = DraftingConfig(depth, width, budget, pool="frontier", expansion="auto")
    shape = config.expansion
    assert isinstance(shape, tuple)

    def nodes(shape: Sequence[int]) -> int:
        return sum(math.prod(shape[:k]) for k in range(1, len(shape) + 1))

    assert nodes(shape) == nodes_of_shape(shape) <= budget
    for k in range(depth):
        wider = [*shape[:k], shape[k] + 1, *shape[k + 1 :]]
        assert wider[k] > width or nodes(wider) > budget
    again = replace(config)
    assert again.expansion == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "tree"}, r"expansion=auto: needs drafting\.pool=frontier"),
        ({"structure": "sequence"}, r"needs .*drafting\.structure=tree"),
        ({"verify_nodes": 4}, r"a chain of drafting\.depth=5 nodes"),
        ({"expansion": ()}, r"give auto, or drafting\.depth=5 whole numbers"),
        ({"expansion": (1, 1, 1, 1)}, r"expansion=.*1, 1, 1, 1.*drafting\.depth=5"),
        ({"expansion": (1, 1, 1, 1, 0)}, r"from 1 to drafting\.width=4"),
        ({"expansion": (5, 1, 1, 1, 1)}, r"from 1 to drafting\.width=4"),
        ({"expansion": (1, 1, 1, 1, True)}, r"give auto, or"),
        ({"expansion": (1, 1, 1, 1, 1.0)}, r"give auto, or"),
        ({"expansion": (4, 1, 1, 1, 1)}, r"has 20 nodes, more than drafting\.verify_nodes=12"),
        ({"expansion": "wide"}, r"expansion=wide: give auto, or"),
        ({"expansion": 2}, r"expansion=2: give auto, or"),
        ({"structure": "list"}, r"drafting\.structure=list: choose one of tree, sequence"),
    ],
)
def test_bad_shapes(change: dict[str, Any], message: str) -> None:
    """The message names the argument, its value, and what is allowed."""
    good = {"depth": 5, "width": 4, "verify_nodes": 12, "pool": "frontier", "expansion": "auto"}
    with pytest.raises(InputError, match=message):
        DraftingConfig(**{**good, **change})


# Lossless -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_every_system_is_lossless(tiny_pair: Pair, name: str, prompt: list[int]) -> None:
    """Token for token what ``generate(do_sample=False)`` gives."""
    result = SYSTEMS[name].decoder(tiny_pair).generate(prompt, 24, ())
    assert result.tokens == greedy(tiny_pair.target, prompt, 24, eos=None)


def student_pair(target: Any) -> Pair:
    """Return a pair whose drafter has every second token only."""
    words = torch.arange(0, VOCAB, 2)
    student = noisy(target)
    head = torch.nn.Linear(32, len(words), bias=False, dtype=torch.float64)
    head.weight = torch.nn.Parameter(student.lm_head.weight[words].clone(), requires_grad=False)
    student.lm_head = head
    return Pair("student", target, student, word_tokenizer(), DraftVocabulary(words, -9.0), ())


def short_mid_pair(target: Any) -> Pair:
    """Return a pair whose drafter has 32 positions only."""
    mid = noisy(target)
    mid.config.max_position_embeddings = 32
    return Pair("short", target, mid, word_tokenizer(), None, ())


PAIRS = {
    "student": student_pair,
    "short_mid": short_mid_pair,
    "narrow": lambda target: Pair(
        "narrow", target, tiny_llama(0, vocab=VOCAB - 8), word_tokenizer(), None, ()
    ),
    "wide": lambda target: Pair(
        "wide", target, tiny_llama(2, vocab=VOCAB + 16), word_tokenizer(), None, ()
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("config", [CSD, SPECINFER], ids=["csd", "specinfer"])
@pytest.mark.parametrize("evaluation", ["needed", "all"])
def test_baselines_are_lossless_with_any_drafter(
    kind: str, config: DraftingConfig, evaluation: str
) -> None:
    """Restricted, narrower and wider heads, a shorter context; random schedules."""
    pair = PAIRS[kind](tiny_llama(0))
    config = replace(config, evaluation=evaluation)  # type: ignore[arg-type]
    decoder = as_defined(pair, RandomSchedule(2), config)
    prompt = [t % (VOCAB - 8) for t in PROMPTS[2]]
    result = decoder.generate(prompt, 24)
    assert result.tokens == greedy(pair.target, prompt, 24, eos=None)
    called = [bool(round_.calls) for round_ in result.rounds]
    assert any(called)
    if kind == "short_mid":
        assert not called[-1]


@pytest.mark.parametrize("config", [CSD, SPECINFER], ids=["csd", "specinfer"])
def test_baselines_fill_a_table_of_positions(config: DraftingConfig) -> None:
    """GPT-2's learned positions end, and so does the text."""
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=20, initializer_range=0.4
    )
    target = AutoModelForCausalLM.from_config(shape, dtype=torch.float64).eval()
    pair = Pair("gpt2", target, noisy(target), word_tokenizer(), None, ())
    for length, seed in ((3, 0), (12, 1), (18, 2), (19, 3)):
        prompt = (PROMPTS[2] * 2)[:length]
        result = as_defined(pair, RandomSchedule(seed), config).generate(prompt, 100)
        assert result.stopped == "context"
        assert result.tokens == greedy(target, prompt, 20 - length, eos=None)


# What the ablations destroy -------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "without_nd": {"graft": "replace"},
    "csd": {"structure": "sequence"},
}


def test_a_graft_destroys_the_targets_tokens_or_keeps_them() -> None:
    """By hand: the small drafter has the target's three tokens, the mid drafter has others."""
    context = Context([1, 2, 3, 4, 1], [0.0] + [-0.5] * 4)
    continuation = [2, 3, 4]  # the target's

    def log_probs(path: tuple[int, ...]) -> list[float]:
        return [-0.1, -3.0, -0.9, -4.0, -5.0]  # it would write 0 everywhere; 2 is its second

    accepted = {}
    for kind, options in KINDS.items():
        config = DraftingConfig(depth=2, width=2, **options)
        case = Case(context.tokens.tolist(), context.log_p.tolist(), [0], config, 5, 0)
        before, _ = draft(case, config, RowMid(log_probs, 2))
        assert paths(before, prune(before, config))[:3] == [(2,), (2, 3), (2, 3, 4)]
        assert len(accepted_path(before, prune(before, config), continuation)[0]) == 3
        case.schedule = [0, 1]
        after, _ = draft(case, config, RowMid(log_probs, 2))
        accepted[kind] = len(accepted_path(after, prune(after, config), continuation)[0])
        there = [after.nodes()[1:], paths(after, after.nodes()[1:])]
        assert ((2,) in there[1]) == (kind != "csd")
        assert ((2, 3, 4) in there[1]) == (kind == "full")
    # w/o ND grafts under the root, where 2 stands again, and no longer what hung below it.
    assert accepted == {"full": 3, "without_nd": 1, "csd": 0}


def test_destruction_lowers_a_of_real_rounds() -> None:
    """Same state, same schedule: the target's tokens stood before the call; A drops after it."""
    pair = Pair("wrong", tiny_llama(0), tiny_llama(5), word_tokenizer(), None, ())
    text = [*PROMPTS[2], *greedy(pair.target, PROMPTS[2], 60, eos=None)]
    decoders = {
        kind: as_defined(pair, FixedSchedule([0, 1]), DraftingConfig(2, 2, 30, **options))
        for kind, options in KINDS.items()
    }
    lost = dict.fromkeys(KINDS, 0)
    for at in range(len(PROMPTS[2]) + 10, 60):
        stood = {}
        for kind, decoder in decoders.items():
            trees = spy_before(decoder)
            round_, _ = decoder.round(decoder.resume(text[:at]), len(PROMPTS[2]))
            (tree,) = trees
            stood[kind] = slow_reach(paths(tree, tree.nodes()), text[at:])
            lost[kind] += round_.accepted < stood[kind]
        assert stood["full"] == stood["without_nd"] >= stood["csd"]
    assert lost["full"] == 0  # nothing is deleted, and there is room
    assert min(lost["without_nd"], lost["csd"]) >= 3


def slow_reach(there: Sequence[tuple[int, ...]], continuation: Sequence[int]) -> int:
    """Return how many of the target's tokens stand in a tree of these paths."""
    n = 0
    while tuple(continuation[: n + 1]) in there:
        n += 1
    return n


def spy_before(decoder: TreeGraftDecoder) -> list[DraftTree]:
    """Record the trees before each mid step, from now on."""
    trees: list[DraftTree] = []
    mid_step = type(decoder).mid_step

    def spy(tree: DraftTree, *rest: Any) -> Any:
        trees.append(tree.copy())
        return mid_step(decoder, tree, *rest)

    decoder.mid_step = spy  # type: ignore[method-assign]
    return trees


# How deep drafts go ---------------------------------------------------------------------------


@properties
@given(cases(), st.data())
def test_deepest_bounds_every_path(case: Case, data: st.DataObject) -> None:
    """One sequence, and trees of fixed shape, under any schedule."""
    depth, width = case.config.depth, case.config.width
    if data.draw(st.booleans()):
        config = replace(case.config, structure="sequence")
    else:
        shape = data.draw(st.lists(st.integers(1, min(width, 2)), min_size=depth, max_size=depth))
        config = replace(
            case.config, pool="frontier", expansion=tuple(shape), verify_nodes=nodes_of_shape(shape)
        )
    tree, _ = draft(case, config, RowMid(fake_log_probs(case.seed, case.vocab), width))
    assert tree.depth[: tree.size].max() <= config.deepest


def test_deepest_is_reached() -> None:
    """By small steps alone on a text that repeats; by mid steps alone in a tree of fixed shape."""
    tokens = list(range(20)) * 3
    case = Case(tokens, [-0.5] * 60, [0] * 5, CSD, 20, 0)
    tree, _ = draft(case, CSD, RowMid(fake_log_probs(0, 20), 4))
    assert tree.depth[: tree.size].max() == CSD.deepest == 5 + 4 + 3 + 2 + 1
    shallow = replace(SPECINFER, max_ngram=1)
    case = Case(tokens, [-0.5] * 60, [1] * 5, shallow, 20, 0)
    tree, _ = draft(case, shallow, RowMid(fake_log_probs(0, 20), 4))
    assert tree.depth[: tree.size].max() == shallow.deepest == 5


@pytest.mark.parametrize("config", [CSD, SPECINFER], ids=["csd", "specinfer"])
def test_baselines_are_not_enumerated(tiny_pair: Pair, config: DraftingConfig) -> None:
    """Schedules are enumerated for grafted trees only."""
    with pytest.raises(InputError, match=r"drafting\.structure=.*drafting\.expansion="):
        enumerate_states(
            CachedModel(tiny_pair.mid), Context([3, 4], [0.0, -1.0]), [1], config, None, VOCAB
        )


# Shared caches --------------------------------------------------------------------------------

WIDE = replace(SYSTEMS["fixed"], drafting={"width": 6})
SHARING = {
    **{name: SYSTEMS[name] for name in ("all_small", "fixed", "without_nd", "csd", "specinfer")},
    "wide": WIDE,
}


def facts(result: Generation) -> list[Any]:
    """Return everything of a request that no clock measures."""
    return [
        result.tokens,
        result.stopped,
        [
            (r.schedule, r.context_tokens, r.accepted, r.committed, r.tree_nodes, r.caught_up)
            for r in result.rounds
        ],
        [(r.calls, r.ranks, r.frontiers, r.kept, r.picks) for r in result.rounds],
    ]


@cache
def alone(name: str, prompt: int) -> list[Any]:
    """Return the facts of a request on new caches."""
    pair = agreeing_pair()
    if name == "plain":
        return facts(decode_plain(pair, PROMPTS[prompt], 12, ()))
    decoder = SHARING[name].decoder(pair, keep_trees=True, log_picks=True)
    return facts(decoder.generate(PROMPTS[prompt], 12, ()))


ACTIONS = st.tuples(
    st.sampled_from([*SHARING, "plain"]),
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from(["generate", "generate", "abandon", "rewind"]),
    st.integers(0, 20),
)


@settings(properties, max_examples=15)
@given(st.lists(ACTIONS, min_size=2, max_size=8))
def test_shared_caches_change_nothing(actions: list[tuple[str, int, str, int]]) -> None:
    """Any order of systems, widths and prompts, abandoned streams and rewinds in between."""
    pair = agreeing_pair()
    caches = Caches(pair)
    decoders = {
        name: system.decoder(pair, keep_trees=True, log_picks=True, caches=caches)
        for name, system in SHARING.items()
    }
    for name, prompt, action, number in [*actions, ("fixed", 2, "generate", 0)]:
        if action == "rewind":
            caches.rewind(number)
        elif name == "plain":
            result = decode_plain(pair, PROMPTS[prompt], 12, (), caches=caches, width=4)
            assert facts(result) == alone(name, prompt)
        elif action == "generate":
            assert facts(decoders[name].generate(PROMPTS[prompt], 12, ())) == alone(name, prompt)
        else:
            stream = decoders[name].stream(PROMPTS[prompt], 12, ())
            for _ in range(1 + number % 4):
                next(stream, None)
            if number % 2:
                stream.close()


def test_a_prompt_is_read_once_when_it_was_the_last_one(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens that the models read before the first round, target's and mid drafter's."""
    read: list[int] = []
    run = CachedModel.run

    def spy(self: CachedModel, tokens: Sequence[int], *rest: Any, **options: Any) -> torch.Tensor:
        read.append(len(tokens))
        return run(self, tokens, *rest, **options)

    monkeypatch.setattr(CachedModel, "run", spy)
    caches = Caches(tiny_pair)
    first, second = (SYSTEMS[name].decoder(tiny_pair, caches=caches) for name in ("csd", "all_mid"))
    wide = WIDE.decoder(tiny_pair, caches=caches)

    def start(decoder: TreeGraftDecoder, prompt: list[int]) -> list[int]:
        read.clear()
        decoder.start(prompt)
        return list(read)

    long, short = PROMPTS[2], PROMPTS[1]
    assert start(first, long) == [14, 14]
    assert start(second, long) == start(first, long) == []
    second.generate(long, 12, ())
    assert start(first, long) == []
    next(second.stream(long, 12, ()))
    assert start(first, long) == []
    assert start(first, short) == [5, 5]
    assert start(first, long) == [14, 14]
    assert start(wide, long) == [14, 14]  # its table is another
    first.rewind(14)
    assert start(wide, long) == []
    first.rewind(13)
    assert start(wide, long) == [14, 14]
    read.clear()
    decode_plain(tiny_pair, long, 1, (), caches=caches, width=6)
    assert read == []
    decode_plain(tiny_pair, short, 1, (), caches=caches, width=6)
    assert read == [5]
    assert start(wide, short) == [5]  # the mid drafter's part


def test_caches_serve_one_request_at_a_time(tiny_pair: Pair) -> None:
    """A stream that another decoder's request has overtaken says so; the other one is as ever."""
    caches = Caches(tiny_pair)
    first, second = (SYSTEMS[name].decoder(tiny_pair, caches=caches) for name in ("csd", "all_mid"))
    stream = first.stream(PROMPTS[2], 12, ())
    next(stream)
    tokens = second.generate(PROMPTS[2], 12, ()).tokens
    assert tokens == greedy(tiny_pair.target, PROMPTS[2], 12, eos=None)
    with pytest.raises(RuntimeError, match="another request has begun"):
        next(stream)


# Where mid calls pick -------------------------------------------------------------------------


@properties
@given(cases())
def test_picks_equal_a_slow_count(case: Case) -> None:
    """Offsets in the order of F_k, both pools; the pool is the one that the call counts."""
    both, seen = Both.start(case), 0
    for step, bit in enumerate(case.schedule, start=1):
        if not bit:
            both.small(step)
            continue
        frontier, twins = both.fast_frontier, both.slow_frontier
        pool = mid_pool(both.fast, frontier, case.config)
        slow_pool = slow.pool_of(both.slow, twins, case.config.pool)
        picked, slow_picked, call, _ = both.graft()
        picks = where_picked(both.fast, frontier, picked, pool)
        assert picks == Picks(*slow.where_picked(twins, slow_picked, slow_pool))
        assert picks.pool == call.pool_nodes >= picks.level_pool
        assert len(picks.offsets) == (len(picked) if twins else 0)
        seen += 1
    assert seen == sum(case.schedule)


@pytest.mark.parametrize("name", ["random", "without_eg", "without_nd", "specinfer", "fixed"])
def test_rounds_log_their_picks(name: str) -> None:
    """One entry a mid call; against trees drafted again by plain forwards."""
    pair = agreeing_pair()
    decoder = SYSTEMS[name].decoder(pair, log_picks=True)
    result = decoder.generate(PROMPTS[2], 10, ())
    text, config = [*PROMPTS[2], *result.tokens], decoder.config
    earlier = 0
    for round_ in result.rounds:
        assert [p.pool for p in round_.picks] == [c.pool_nodes for c in round_.calls]
        for picks in round_.picks:
            earlier += sum(offset < 0 for offset in picks.offsets)
            assert all(offset <= 0 for offset in picks.offsets) or config.pool == "tree"
        if config.expansion is None:
            context = text[: round_.context_tokens]
            assert round_.picks == twin_picks(pair, context, round_.schedule, config)
    assert bool(earlier) == (config.pool == "tree")
    quiet = SYSTEMS[name].decoder(pair).generate(PROMPTS[2], 10, ())
    assert not any(round_.picks for round_ in quiet.rounds)


def twin_picks(
    pair: Pair, context: list[int], schedule: Sequence[int], config: DraftingConfig
) -> list[Picks]:
    """Draft a round again by plain forwards and count where it picked."""
    target = plain_log_probs(pair.target, (), edges=True)
    table = slow.context_table(context, target, config.width)
    log_probs = plain_log_probs(pair.mid, context, edges=True)
    tree, found = slow.Tree(context[-1]), []
    frontier = [tree.root]
    for step, bit in enumerate(schedule, start=1):
        if not bit:
            frontier = slow.small_step(
                tree, frontier, context, table, step, config.width, config.max_ngram
            )
            continue
        before, pool = frontier, slow.pool_of(tree, frontier, config.pool)
        picked, frontier, _ = slow.mid_step(
            tree, frontier, log_probs, config.width, config.pool, config.graft
        )
        found.append(Picks(*slow.where_picked(before, picked, pool)))
    return found
