"""The guard: what it measures, what it decides, and that it never changes a token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_llama, word_tokenizer
from treegraft_core import (
    AS_DEFINED,
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    RandomSchedule,
    RuntimeConfig,
    TreeGraftDecoder,
    decode_plain,
    kernels,
)
from treegraft_core.guard import (
    FIRST_WAIT,
    INITIAL_LOSS,
    LONGEST_WAIT,
    LOSS_RATE,
    EdgeRates,
    Guard,
    PassCost,
)
from treegraft_core.tree import DraftTree

PROMPT = [5, 9, 11, 30, 2, 7, 9, 11, 30, 2]


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    """Return a tree of small-drafted and mid-drafted nodes with random evidence and scores."""
    tree = DraftTree.from_root(0)
    while tree.size <= nodes:
        parent, token = int(rng.integers(tree.size)), int(rng.integers(6))
        if tree.child(parent, token) < 0:
            new = tree.add(parent, token, -float(rng.integers(0, 24)) / 4)
            tree.node["evidence"][new] = rng.integers(0, 9)
            if rng.random() < 0.5:
                tree.node["mid_log_p"][new] = tree.log_p[new]
    return tree


def slow_bin(tree: DraftTree, node: int) -> int:
    """Return the bin of the edge into a node, written as a table."""
    log_p = float(tree.log_p[node])
    if not np.isnan(tree.mid_log_p[node]):
        return sum(log_p <= edge for edge in (-0.02, -0.1, -0.3, -0.7, -1.4, -2.5, -4.5))
    coarse = sum(log_p <= edge for edge in (-0.3, -1.5))
    return 8 + 3 * min(int(tree.evidence[node]), 6) + coarse


def make(cost: dict[int, float], runtime: RuntimeConfig | None = None, **options) -> Guard:
    """Return a guard that has seen passes of the given cost."""
    guard = Guard(runtime or RuntimeConfig(), **options)
    for tokens, ms in cost.items():
        guard.cost.add(tokens, 10, ms)
    return guard


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.1, 30.0))
def test_budget_is_the_best_prefix_of_the_pruning_order(
    seed: int, nodes: int, slope: float
) -> None:
    """Against plain sums over paths and every budget tried in turn."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, nodes)
    guard = make({1: 10.0, 64: 10.0 + 63 * slope})
    guard.edges._tried[:] = rng.integers(1, 9, len(guard.edges._tried))
    guard.edges._taken[:] = guard.edges._tried * rng.random(len(guard.edges._tried))
    kept = kernels.prune(tree.node, tree.size, 1000)
    chosen = guard.budget(tree, kept, 10)
    assert chosen.tolist() == kept[: len(chosen)].tolist()

    rate = guard.edges.rate
    worth = []
    for budget in range(len(kept) + 1):
        expected = sum(
            float(np.prod([rate[slow_bin(tree, i)] for i in tree.path(int(node))]))
            for node in kept[:budget]
        )
        worth.append(expected - float(guard.cost.up_to(budget + 1, 10)[-1]) / 10.0)
    assert worth[len(chosen)] == pytest.approx(max(worth), abs=1e-9)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.lists(st.integers(0, 5), max_size=6))
def test_edges_are_counted_along_the_continuation(
    seed: int, nodes: int, continuation: list[int]
) -> None:
    """Every child of an accepted node was tried; the one that follows was taken."""
    tree = random_tree(np.random.default_rng(seed), nodes)
    tried, taken = np.zeros(kernels.EDGE_BINS), np.zeros(kernels.EDGE_BINS)
    kernels.count_edges(tree.node, np.array(continuation, np.int64), tried, taken)
    expected_tried, expected_taken = np.zeros_like(tried), np.zeros_like(taken)
    at = 0
    for token in continuation:
        children = [i for i in range(1, tree.size) if tree.parent[i] == at]
        for child in children:
            expected_tried[slow_bin(tree, child)] += 1
        at = tree.child(at, token)
        if at < 0:
            break
        expected_taken[slow_bin(tree, at)] += 1
    assert tried.tolist() == expected_tried.tolist()
    assert taken.tolist() == expected_taken.tolist()


def test_rates_become_the_frequencies() -> None:
    """Edges that are always taken, and edges that never are."""
    rates = EdgeRates()
    tree = DraftTree.from_root(0)
    for token, evidence in ((1, 5), (2, 1)):
        tree.node["evidence"][tree.add(0, token, -0.1)] = evidence
    for _ in range(300):
        rates.learn(tree, np.array([1, 3]))
    rate = rates.rate
    assert rate[slow_bin(tree, 1)] > 0.95
    assert rate[slow_bin(tree, 2)] < 0.05


def test_cost_follows_what_passes_took() -> None:
    """One token, many tokens, and in between."""
    cost = PassCost(None)
    assert not cost.known
    cost.add(1, 10, 20.0)
    assert cost.known
    assert cost.up_to(50, 10)[-1] == 20.0
    for _ in range(50):
        cost.add(64, 10, 83.0)
    assert cost.up_to(64, 10)[-1] == pytest.approx(83.0)
    assert 20.0 < cost.up_to(64, 10)[31] < 83.0
    assert cost.one(10) == 20.0
    assert cost.explored == 512


def test_an_unknown_machine_is_explored_step_by_step() -> None:
    """Without a profile the first rounds verify few nodes, the next ones more."""
    tree = DraftTree.from_root(0)
    at = 0
    for i in range(60):
        at = tree.add(at, i, 0.0)
        tree.node["mid_log_p"][at] = 0.0
    kept = kernels.prune(tree.node, tree.size, 63)
    assert len(make({1: 10.0}).budget(tree, kept, 10)) == 7
    assert len(make({1: 10.0, 8: 10.0}).budget(tree, kept, 10)) == 60


def test_a_fixed_budget_is_left_alone() -> None:
    """Rounds as defined verify B_ver nodes whatever they cost."""
    tree = random_tree(np.random.default_rng(0), 30)
    kept = kernels.prune(tree.node, tree.size, 20)
    guard = make({1: 1.0, 64: 1e6}, AS_DEFINED)
    assert guard.budget(tree, kept, 10).tolist() == kept.tolist()
    assert guard.choose(10) == "scheduled"


def losing_request(guard: Guard, tokens: int, plain: float, round_ms: float) -> tuple[int, float]:
    """Decode a request whose drafts always fail; return rounds and time lost, ms."""
    tree = DraftTree.from_root(0)
    tree.add(0, 1, -0.5)
    guard.begin(tokens)
    done, rounds, lost = 0, 0, 0.0
    while done < tokens:
        mode = guard.choose(100 + done)
        if mode == "plain":
            guard.plain_step(100 + done, plain)
        else:
            rounds += 1
            lost += round_ms - plain
            guard.round(mode, tree, np.array([9]), 1, 100 + done, plain, round_ms)
        done += 1
    return rounds, lost


def test_what_a_hopeless_request_loses_is_bounded() -> None:
    """Every draft fails: the loss stays within the allowance and one round."""
    for round_ms in (12.0, 30.0, 200.0):
        guard = make({1: 10.0, 8: 20.0})
        for tokens in (32, 256):
            rounds, lost = losing_request(guard, tokens, 10.0, round_ms)
            allowed = 10.0 * tokens * (INITIAL_LOSS + LOSS_RATE)
            assert lost <= allowed + round_ms
            assert rounds < tokens
            assert guard.decisions[-1].mode == "plain"


def test_rounds_that_pay_go_on() -> None:
    """Three tokens a round in twice the time of one: no plain step after the start."""
    guard = make({1: 10.0})
    tree = DraftTree.from_root(0)
    guard.begin(100)
    modes = []
    for _ in range(40):
        modes.append(guard.choose(50))
        guard.round(modes[-1], tree, np.array([1, 2, 3]), 3, 50, 15.0, 20.0)
    assert "plain" not in modes[2:]


def test_the_wait_between_probes_doubles() -> None:
    """Failed probes of scheduled rounds come ever more rarely, up to a limit."""
    guard = make({1: 10.0, 8: 11.0})
    losing_request(guard, 2000, 10.0, 14.0)
    assert guard._wait == LONGEST_WAIT > FIRST_WAIT


def test_small_drafts_are_judged_by_what_follows() -> None:
    """A shadow that would have been accepted raises the rate of small rounds."""
    guard = make({1: 10.0, 8: 12.0}, has_schedule=False)
    guard.begin(50)
    guard.choose(5)
    tree = DraftTree.from_root(0)
    kept = np.array([tree.add(0, 7, -0.1)])
    before = guard._rates["small"].rate
    for _ in range(10):
        guard.shadow(tree, kept, 5, 0.2)
        guard.judge(np.array([1, 2, 3, 4, 5, 7, 8]), 2)
    assert guard._rates["small"].rate > before
    assert not guard._shadows


@pytest.mark.parametrize("seed", range(3))
def test_output_is_the_targets_whatever_the_guard_decides(seed: int) -> None:
    """Modes drawn at random, budgets chosen by it: greedy output, token for token."""
    pair = Pair("tiny", tiny_llama(0), tiny_llama(0), word_tokenizer(), None, ())
    decoder = TreeGraftDecoder(pair, RandomSchedule(seed), DraftingConfig(5, 4, 12))
    rng = np.random.default_rng(seed)
    modes = []

    def choose(context: int) -> str:
        modes.append(str(rng.choice(["plain", "small", "scheduled"])))
        return modes[-1]

    decoder.guard.choose = choose  # type: ignore[assignment,method-assign]
    done = decoder.generate(PROMPT, 60)
    assert done.tokens == decode_plain(pair, PROMPT, 60).tokens
    assert done.plain_steps == modes.count("plain") > 0
    assert len(done.rounds) == len(modes) - done.plain_steps
    assert {r.mode for r in done.rounds} == {"small", "scheduled"}
    assert all(not any(r.schedule) for r in done.rounds if r.mode == "small")


def test_decisions_are_in_the_statistics() -> None:
    """What was decided, when, and the rates that it was decided by."""
    pair = Pair("tiny", tiny_llama(0), tiny_llama(3), word_tokenizer(), None, ())
    decoder = TreeGraftDecoder(pair, FixedSchedule([1] * 5))
    done = decoder.generate(PROMPT, 60)
    assert done.decisions[0].mode == "plain"
    assert done.decisions[0].at_token == 0
    assert all(set(d.rates) <= {"plain", "small", "scheduled"} for d in done.decisions)
    assert done.plain_steps + sum(r.committed for r in done.rounds) == 59


def test_wrong_budget_is_refused() -> None:
    """One line that names the key and the choices."""
    with pytest.raises(InputError, match=r"runtime.budget=all: choose one of auto, fixed"):
        RuntimeConfig(budget="all")  # type: ignore[arg-type]
