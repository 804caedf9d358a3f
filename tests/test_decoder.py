"""The runtime decoder: lossless, equal to the slow twin, and honest in its statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

import treegraft_core.decoder as decoder_module
from tests import reference as slow
from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from treegraft_core.artifact import SchedulerArtifact
from treegraft_core.context import Context
from treegraft_core.decoder import TreeGraftDecoder, decode_plain
from treegraft_core.drafting import DraftingConfig, accepted_path
from treegraft_core.errors import InputError
from treegraft_core.guard import AS_DEFINED, RuntimeConfig
from treegraft_core.models import CachedModel
from treegraft_core.neural import MidDrafter
from treegraft_core.pair import Pair
from treegraft_core.rounds import Generation, Round
from treegraft_core.schedulers import (
    DistilledScheduler,
    FixedSchedule,
    RandomSchedule,
    Scheduler,
    StepState,
    all_mid,
    all_small,
)
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import DraftTree, IntArray
from treegraft_core.verify import TreeRead

PROMPTS = ([5], [7, 9, 7, 9, 7], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15], [2, 2, 2, 2])
CONFIG = DraftingConfig(depth=5, width=4, verify_nodes=12)
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "all_small": lambda: all_small(5),
    "all_mid": lambda: all_mid(5),
    "fixed": lambda: FixedSchedule([1, 0, 1, 0, 1]),
    "random": lambda: RandomSchedule(3),
}


class ByRound:
    """A scheduler with one schedule a round; the last one goes on."""

    reads_signals = False

    def __init__(self, *rounds: Sequence[int]) -> None:
        self.rounds = rounds
        self.at = -1

    def decide(self, state: StepState) -> int:
        self.at += state.step == 1
        return self.rounds[min(self.at, len(self.rounds) - 1)][state.step - 1]


def as_defined(
    pair: Pair, scheduler: Scheduler, config: DraftingConfig, **options: bool
) -> TreeGraftDecoder:
    """Return a decoder that speculates in every round and verifies B_ver nodes."""
    return TreeGraftDecoder(pair, scheduler, config, runtime=AS_DEFINED, **options)


class AnyGuard:
    """A guard that decides at random: modes, and how many of the kept nodes are verified."""

    def __init__(self, decoder: TreeGraftDecoder, seed: int):
        rng, guard = np.random.default_rng(seed), decoder.guard
        self.modes: list[str] = []

        def choose(context: int) -> str:
            self.modes.append(str(rng.choice(["plain", "small", "scheduled"])))
            return self.modes[-1]

        guard.choose = choose  # type: ignore[method-assign]
        guard.budget = (  # type: ignore[method-assign]
            lambda tree, kept, context: kept[: int(rng.integers(len(kept) + 1))]
        )


def greedy(model: PreTrainedModel, prompt: Sequence[int], n: int, eos: int | None = 1) -> list[int]:
    """Return the new tokens of ``model.generate(do_sample=False)``."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=n,
        eos_token_id=eos,
        pad_token_id=1,
    )
    return [int(t) for t in out[0, len(prompt) :]]


def on_grid(log_p: float) -> float:
    """Return an edge's log p as the core keeps it: a multiple of 2^-20 nats."""
    return round(log_p * 2**20) / 2**20


def plain_log_probs(
    model: PreTrainedModel, prefix: Sequence[int], edges: bool = False
) -> Callable[[tuple[int, ...]], list[float]]:
    """Return log p after ``prefix`` + path, by a full forward without a cache.

    With ``edges`` as the edges of a draft tree have it, on the grid.
    """

    @cache
    def log_probs(path: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prefix, *path]]), use_cache=False).logits[0, -1]
        values = [float(x) for x in logits.log_softmax(-1)]
        return [on_grid(x) for x in values] if edges else values

    return log_probs


def noisy(model: PreTrainedModel, scale: float = 0.05) -> PreTrainedModel:
    """Return a copy of ``model`` with noise on its weights."""
    generator = torch.Generator().manual_seed(1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return other


# Lossless -------------------------------------------------------------------------------------


RUNTIMES = {
    "as_defined": AS_DEFINED,
    "guarded": RuntimeConfig(),
    "guard_alone": RuntimeConfig(budget="fixed"),
    "budget_alone": RuntimeConfig(guard=False),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_generate_equals_the_targets_own_greedy_tokens(
    tiny_pair: Pair, name: str, prompt: list[int], runtime: str
) -> None:
    """Token for token; every token is of a round or of a plain step."""
    expected = greedy(tiny_pair.target, prompt, 40)
    decoder = TreeGraftDecoder(tiny_pair, SCHEDULERS[name](), CONFIG, runtime=RUNTIMES[runtime])
    result = decoder.generate(prompt, 40)
    assert result.tokens == expected
    assert result.stopped == ("eos" if expected[-1] == 1 else "length")
    assert sum(r.committed for r in result.rounds) + result.plain_steps == len(expected) - 1
    assert not result.plain_steps or RUNTIMES[runtime].guard
    assert decode_plain(tiny_pair, prompt, 40).tokens == expected


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_guard_decides_is_lossless(tiny_pair: Pair, seed: int) -> None:
    """Any order of plain steps, small and scheduled rounds, any part of the tree verified."""
    decoder = TreeGraftDecoder(tiny_pair, RandomSchedule(seed), CONFIG, keep_trees=True)
    guard, accepting = AnyGuard(decoder, seed), set()
    for prompt in PROMPTS:
        guard.modes.clear()
        result = decoder.generate(prompt, 40, ())
        assert result.tokens == greedy(tiny_pair.target, prompt, 40, eos=None)
        assert result.plain_steps == guard.modes.count("plain") > 0
        assert [r.mode for r in result.rounds] == [m for m in guard.modes if m != "plain"]
        for r in result.rounds:
            assert r.mode == "scheduled" or not any(r.schedule)
            assert r.accepted <= r.kept_nodes == len(r.kept)
        accepting |= {r.mode for r in result.rounds if r.accepted}
    assert accepting == {"small", "scheduled"}


def test_drafts_are_accepted_by_both_drafters(tiny_pair: Pair) -> None:
    """The losslessness tests are worth something: rounds accept draft tokens."""
    for name in SCHEDULERS:
        decoder = as_defined(tiny_pair, SCHEDULERS[name](), CONFIG)
        results = [decoder.generate(prompt, 40, ()) for prompt in PROMPTS[1:3]]
        assert sum(r.accepted for result in results for r in result.rounds) >= 10


@pytest.mark.parametrize("pool", ["tree", "frontier"])
@pytest.mark.parametrize("graft", ["add", "replace"])
@pytest.mark.parametrize("evaluation", ["needed", "all"])
def test_ablations_are_lossless(tiny_pair: Pair, pool: str, graft: str, evaluation: str) -> None:
    """Pool, graft and evaluation change trees, never tokens."""
    config = DraftingConfig(4, 3, 7, pool=pool, graft=graft, evaluation=evaluation)
    decoder = as_defined(tiny_pair, RandomSchedule(7), config)
    expected = greedy(tiny_pair.target, PROMPTS[2], 30, eos=None)
    assert decoder.generate(PROMPTS[2], 30, ()).tokens == expected


def test_a_decoder_can_be_used_again(tiny_pair: Pair) -> None:
    """Nothing of one request leaks into the next."""
    decoder = as_defined(tiny_pair, FixedSchedule([1, 0, 1, 0, 1]), CONFIG, keep_trees=True)
    first = decoder.generate(PROMPTS[0], 20, ())
    decoder.generate(PROMPTS[2], 20, ())
    again = decoder.generate(PROMPTS[0], 20, ())
    assert again.tokens == first.tokens
    assert [r.kept for r in again.rounds] == [r.kept for r in first.rounds]


ARCHITECTURES: dict[str, PretrainedConfig] = {
    "gpt_neox": GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.4,
    ),
    "qwen3": Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.4, tie_word_embeddings=False,
    ),
    "mistral_sliding": MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        sliding_window=8, initializer_range=0.4,
    ),
    "qwen3_sliding": Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        use_sliding_window=True, sliding_window=8, max_window_layers=1, initializer_range=0.4,
        tie_word_embeddings=False,
    ),
    "gemma3_sliding_and_full": Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8, initializer_range=0.4,
    ),
    "gpt2_learned_positions": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4,
    ),
}  # fmt: skip


def architecture_pair(name: str) -> Pair:
    """Return a random pair of this architecture."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(
        copy.deepcopy(ARCHITECTURES[name]), dtype=torch.float64
    )
    target = target.eval().requires_grad_(False)
    return Pair(name, target, noisy(target), word_tokenizer(), None, ())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_lossless_and_equal_to_plain_forwards(name: str) -> None:
    """Also where the sliding window is shorter than the text; trees equal the twin's, too."""
    pair = architecture_pair(name)
    prompt = PROMPTS[2]
    expected = greedy(pair.target, prompt, 24, eos=None)
    for scheduler in (all_small(3), all_mid(3), RandomSchedule(5)):
        config = DraftingConfig(3, 3, 8)
        decoder = as_defined(pair, scheduler, config, keep_trees=True)
        result = decoder.generate(prompt, 24)
        assert result.tokens == expected
    check_rounds_against_twin(pair, config, prompt, result, rounds=4)
    assert sum(len(r.calls) for r in result.rounds[:4]) > 0


# Whole rounds against the twin ----------------------------------------------------------------


def check_rounds_against_twin(
    pair: Pair, config: DraftingConfig, prompt: Sequence[int], result: Generation, rounds: int
) -> None:
    """Draft the first rounds again by plain forwards and compare trees, kept nodes, verdicts."""
    at = len(prompt) + 1
    text = [*prompt, *result.tokens]
    target_table = plain_log_probs(pair.target, (), edges=True)
    for round_ in result.rounds[:rounds]:
        context = text[:at]
        table = slow.context_table(context, target_table, config.width)
        twin = slow.run_round(
            context,
            table,
            round_.schedule,
            plain_log_probs(pair.mid, context, edges=True),
            config.width,
            config.verify_nodes,
            config.max_ngram,
            config.pool,
            config.graft,
        )
        path, bonus = slow.verify_greedy(
            twin.tree, twin.kept, plain_log_probs(pair.target, context)
        )
        assert round_.context_tokens == at
        assert round_.kept == [node.path() for node in twin.kept]
        assert round_.tree_nodes == len(twin.tree.nodes())
        assert round_.kept_nodes == len(twin.kept)
        assert round_.frontiers == [len(f) for f in twin.frontiers[:-1]]
        assert round_.ranks == [twin.kept.index(node) for node in path]
        assert round_.accepted == len(path) == slow.accepted(twin.tree, twin.kept, text[at:])
        committed = [*(node.token for node in path), bonus]
        assert text[at : at + round_.committed] == committed[: round_.committed]
        for call, counts in zip(round_.calls, twin.counts, strict=True):
            assert call.refresh_nodes == counts.refresh_nodes
            assert call.expand_nodes == counts.expand_nodes
            assert call.all_nodes == counts.all_nodes
            assert call.pool_nodes == counts.pool_nodes
            assert call.earlier_picks == counts.earlier_picks
            assert call.refresh_levels == counts.refresh_levels
            assert call.all_levels == counts.all_levels
        if round_.signals:
            assert np.array(round_.signals) == pytest.approx(np.array(twin.signals), abs=1e-9)
        at += round_.committed


@pytest.mark.parametrize("seed", range(6))
def test_rounds_equal_the_twin(tiny_pair: Pair, seed: int) -> None:
    """Random widths, budgets and schedules; signals, trees, counts and ranks of every round."""
    rng = np.random.default_rng(seed)
    config = DraftingConfig(
        depth=int(rng.integers(1, 7)),
        width=int(rng.integers(1, 7)),
        verify_nodes=int(rng.integers(1, 21)),
        max_ngram=int(rng.integers(1, 6)),
        pool=["tree", "frontier"][seed % 2],
        graft=["add", "replace"][seed // 2 % 2],
        evaluation=["needed", "all"][seed // 3 % 2],
    )
    decoder = as_defined(tiny_pair, RandomSchedule(seed), config, keep_trees=True, log_signals=True)
    prompt = PROMPTS[seed % len(PROMPTS)]
    result = decoder.generate(prompt, 24, ())
    assert all(len(r.signals) == config.depth for r in result.rounds)
    check_rounds_against_twin(tiny_pair, config, prompt, result, rounds=4)


def test_needed_and_all_give_the_same_trees(tiny_pair: Pair) -> None:
    """Two ways to evaluate, one result; both log both counts."""
    results = []
    for evaluation in ("needed", "all"):
        config = DraftingConfig(5, 4, 12, evaluation=evaluation)
        decoder = as_defined(tiny_pair, RandomSchedule(2), config, keep_trees=True)
        results.append(decoder.generate(PROMPTS[2], 30, ()))
    needed, everything = results
    assert [r.kept for r in needed.rounds] == [r.kept for r in everything.rounds]
    assert [r.calls for r in needed.rounds] == [r.calls for r in everything.rounds]
    assert [r.ranks for r in needed.rounds] == [r.ranks for r in everything.rounds]


def test_accepted_path_from_the_known_continuation_equals_verification(tiny_pair: Pair) -> None:
    """A needs no target pass once the target's continuation is known."""
    decoder = as_defined(tiny_pair, RandomSchedule(4), CONFIG)
    expected = greedy(tiny_pair.target, PROMPTS[1], 60, eos=None)
    text = [*PROMPTS[1], *expected]
    seen: list[tuple[DraftTree, IntArray]] = []
    original = decoder_module.read_tree

    def spy(target: CachedModel, tree: DraftTree, kept: IntArray, *rest: Any) -> TreeRead:
        seen.append((tree.copy(), kept.copy()))
        return original(target, tree, kept, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_module, "read_tree", spy)
        result = decoder.generate(PROMPTS[1], 30, ())
    assert len(seen) == len(result.rounds) > 2
    for (tree, kept), round_ in zip(seen, result.rounds, strict=True):
        path, ranks = accepted_path(tree, kept, text[round_.context_tokens :])
        assert (len(path), ranks) == (round_.accepted, round_.ranks)


# Where generation stops -----------------------------------------------------------------------


def unlimited(pair: Pair, prompt: Sequence[int]) -> Generation:
    """Return 40 tokens without EOS, and the rounds that made them."""
    return as_defined(pair, all_mid(5), CONFIG).generate(prompt, 40, ())


def ends_of_rounds(result: Generation) -> set[int]:
    """Return the lengths at which a round of ``result`` ended."""
    return set(np.cumsum([1, *(r.committed for r in result.rounds)]).tolist())


def test_stops_exactly_at_the_limit(tiny_pair: Pair) -> None:
    """Every limit, most of them inside an accepted path."""
    full = unlimited(tiny_pair, PROMPTS[1])
    decoder = as_defined(tiny_pair, all_mid(5), CONFIG)
    inside = 0
    for limit in range(1, 21):
        result = decoder.generate(PROMPTS[1], limit, ())
        assert result.tokens == full.tokens[:limit]
        assert result.stopped == "length"
        if limit not in ends_of_rounds(full):
            inside += 1
            assert result.rounds[-1].committed < result.rounds[-1].accepted + 1
    assert inside > 0


def test_stops_exactly_at_eos(tiny_pair: Pair) -> None:
    """Every token as EOS: its first occurrence is the last token, also inside a path."""
    inside = 0
    for prompt in PROMPTS[1:3]:
        full = unlimited(tiny_pair, prompt)
        for eos in sorted(set(full.tokens[:20])):
            cut = full.tokens.index(eos) + 1
            result = as_defined(tiny_pair, all_mid(5), CONFIG).generate(prompt, 40, [eos])
            assert result.tokens == full.tokens[:cut]
            assert result.stopped == "eos"
            assert result.tokens == greedy(tiny_pair.target, prompt, 40, eos)
            inside += cut not in ends_of_rounds(full)
    assert inside > 0


def test_eos_of_the_pair_is_the_default(tiny_pair: Pair) -> None:
    """Without an argument the pair's own EOS counts."""
    full = unlimited(tiny_pair, PROMPTS[0])
    eos = full.tokens[5]
    pair = Pair("tiny", tiny_pair.target, tiny_pair.mid, tiny_pair.tokenizer, None, (eos,))
    result = as_defined(pair, all_small(5), CONFIG).generate(PROMPTS[0], 40)
    assert result.tokens == full.tokens[: full.tokens.index(eos) + 1]


def spy_positions(patch: pytest.MonkeyPatch) -> list[int]:
    """Record the positions that any model is asked to read."""
    positions: list[int] = []
    original = CachedModel.run

    def run(self, tokens, at, *args, **kwargs):
        positions.extend(int(p) for p in at)
        return original(self, tokens, at, *args, **kwargs)

    patch.setattr(CachedModel, "run", run)
    return positions


@pytest.mark.parametrize("name", SCHEDULERS)
def test_never_exceeds_the_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ``max_position_embeddings``: text fills it, and no model reads a position beyond it."""
    target = tiny_llama(0)
    target.config.max_position_embeddings = 24
    pair = Pair("tiny", target, noisy(target), word_tokenizer(), None, ())
    positions = spy_positions(monkeypatch)
    for length in (5, 22, 23):
        prompt = (PROMPTS[2] * 2)[:length]
        result = as_defined(pair, SCHEDULERS[name](), CONFIG).generate(prompt, 100)
        assert result.stopped == "context"
        assert len(prompt) + len(result.tokens) == 24
        assert result.tokens == greedy(target, prompt, 24 - length, eos=None)
        assert sum(r.committed for r in result.rounds) == len(result.tokens) - 1
    assert max(positions) <= 23


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_end_of_learned_positions(name: str) -> None:
    """A model whose positions are a table (GPT-2) is decoded to the end of its context."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=20, initializer_range=0.4
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    pair = Pair("gpt2", target, noisy(target), word_tokenizer(), None, ())
    for length in (5, 18, 19):
        prompt = (PROMPTS[2] * 2)[:length]
        result = as_defined(pair, SCHEDULERS[name](), CONFIG).generate(prompt, 100)
        assert result.stopped == "context"
        assert len(result.tokens) == 20 - length
        assert result.tokens == greedy(target, prompt, 20 - length, eos=None)


# Streaming and input errors -------------------------------------------------------------------


def test_stream_yields_the_same_tokens(tiny_pair: Pair) -> None:
    """Piece by piece, and the callback sees the same pieces."""
    expected = greedy(tiny_pair.target, PROMPTS[2], 25, eos=None)
    decoder = as_defined(tiny_pair, all_mid(5), CONFIG)
    statistics = Generation()
    pieces = [list(p) for p in decoder.stream(PROMPTS[2], 25, (), statistics)]
    assert [t for piece in pieces for t in piece] == expected == statistics.tokens
    assert [len(p) for p in pieces] == [1, *(r.committed for r in statistics.rounds)]
    heard: list[list[int]] = []
    decoder.generate(PROMPTS[2], 25, (), on_tokens=lambda tokens: heard.append(list(tokens)))
    assert heard == pieces


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 5, "empty prompt"),
        ([3] * 256, 5, "256 tokens do not fit the model's context of 256"),
        ([3] * 300, 5, "300 tokens do not fit"),
        ([3], 0, "max_new_tokens=0"),
        ([3], -1, "max_new_tokens=-1"),
    ],
)
def test_bad_requests(tiny_pair: Pair, prompt: list[int], limit: int, message: str) -> None:
    """Empty and too long prompts and silly limits say what is wrong."""
    with pytest.raises(InputError, match=message):
        TreeGraftDecoder(tiny_pair, all_small(5), CONFIG).generate(prompt, limit)
    with pytest.raises(InputError, match=message):
        decode_plain(tiny_pair, prompt, limit)


def test_schedule_of_the_wrong_length(tiny_pair: Pair) -> None:
    """A fixed schedule needs one bit a step."""
    decoder = as_defined(tiny_pair, FixedSchedule([1, 0]), CONFIG)
    with pytest.raises(InputError, match=r"has 2 bits, drafting\.depth is 5"):
        decoder.generate(PROMPTS[0], 5, ())
    for bits in ([], [0, 2], [-1]):
        with pytest.raises(InputError, match="one 0 or 1 for each drafting step"):
            FixedSchedule(bits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("depth", 0),
        ("width", -1),
        ("verify_nodes", 2.5),
        ("max_ngram", True),
        ("pool", "forest"),
        ("graft", "none"),
        ("evaluation", "some"),
    ],
)
def test_bad_drafting_values(name: str, value: object) -> None:
    """The message names the argument and its value."""
    with pytest.raises(InputError, match=f"drafting.{name}={value}"):
        DraftingConfig(**{name: value})


def test_a_scheduler_that_reads_signals_needs_a_profile(tiny_pair: Pair) -> None:
    """T_tgt and T_mid come from the profile."""
    zeros = SchedulerArtifact(
        5, (), (np.zeros((1, 11)),), (np.zeros(1),), np.zeros(11), np.ones(11), 0.0, 1.0
    )
    with pytest.raises(InputError, match="profile=None"):
        TreeGraftDecoder(tiny_pair, DistilledScheduler(zeros), CONFIG)


def test_random_schedules_repeat_by_seed() -> None:
    """Same seed, same decisions; the call rate holds at its ends."""
    state = StepState(1, (), 5, 3, 1.0, 1.0)

    def draws(scheduler: RandomSchedule) -> list[int]:
        return [scheduler.decide(state) for _ in range(40)]

    assert draws(RandomSchedule(1)) == draws(RandomSchedule(1)) != draws(RandomSchedule(2))
    assert set(draws(RandomSchedule(1))) == {0, 1}
    assert set(draws(RandomSchedule(0, 0.0))) == {0}
    assert set(draws(RandomSchedule(0, 1.0))) == {1}


# The mid drafter's cache and the counts -------------------------------------------------------


def test_mid_cache_catches_up_after_rounds_without_calls(tiny_pair: Pair) -> None:
    """0s, then 1s, again and again: the distributions of a fresh drafter on the whole text."""
    schedule = ByRound([0] * 5, [0] * 5, [1, 0, 1, 0, 0], [1] * 5, [0] * 5, [0, 0, 1, 0, 1])
    decoder = as_defined(tiny_pair, schedule, CONFIG)
    context = decoder.start(PROMPTS[2])
    behind = 0
    seen = spy_log_probs(decoder._mid)
    for number in range(9):
        before = context.tokens.tolist()
        trees = spy_trees(decoder)
        seen.clear()
        round_, committed = decoder.round(context, len(PROMPTS[2]))
        assert context.tokens.tolist() == before + committed
        if not any(round_.schedule):
            assert not trees
            behind += len(committed)
            continue
        tree = trees[-1]
        text = Context(before, [0.0] * len(before))
        fresh = MidDrafter(CachedModel(tiny_pair.mid), CONFIG.width, None, VOCAB)
        expected = spy_log_probs(fresh)
        fresh.begin_round(text)
        other = tree.copy()
        nodes = np.flatnonzero(tree.row[: tree.size] >= 0)
        fresh.evaluate(other, nodes)
        assert len(nodes) == sum(c.refresh_nodes + c.expand_nodes for c in round_.calls)
        found = np.concatenate(seen)[tree.row[nodes]]
        assert found == pytest.approx(np.concatenate(expected)[other.row[nodes]], abs=1e-9)
        check_rows_hold(decoder._mid, tree, nodes, text, found)
        assert fresh.caught_up == len(before) - 1
        if number == 2:
            assert round_.caught_up == behind > 0
        behind = 0


def spy_log_probs(drafter: MidDrafter) -> list[np.ndarray]:
    """Record log p of every token of each pass's rows, from now on."""
    seen: list[np.ndarray] = []
    append = drafter.rows.append

    def spy(logits: torch.Tensor, start: IntArray, found: IntArray) -> IntArray:
        seen.append(logits.log_softmax(-1).numpy())
        return append(logits, start, found)

    drafter.rows.append = spy  # type: ignore[method-assign]
    return seen


def check_rows_hold(
    drafter: MidDrafter, tree: DraftTree, nodes: IntArray, context: Context, log_p: np.ndarray
) -> None:
    """Compare what rows keep, the W best and what small steps may propose, with whole rows."""
    top, values = drafter.rows.top(tree, nodes)
    order = np.argsort(-log_p, axis=1)[:, : drafter.rows.width]
    assert top.tolist() == order.tolist()
    assert values == pytest.approx(np.take_along_axis(log_p, order, 1), abs=2**-21 + 1e-9)
    text = context.tokens.tolist()
    for node, row in zip(nodes.tolist(), log_p, strict=True):
        following = {b for a, b in pairwise(text) if a == int(tree.token[node])}
        tokens = np.array(sorted(following), np.int64)
        kept = drafter.rows.log_p(tree, np.full(len(tokens), node), tokens)
        assert kept == pytest.approx(row[tokens], abs=2**-21 + 1e-9)


def spy_trees(decoder: TreeGraftDecoder) -> list[DraftTree]:
    """Record the trees that the mid drafter evaluates, from now on."""
    trees: list[DraftTree] = []
    evaluate = type(decoder._mid).evaluate

    def spy(tree: DraftTree, nodes: IntArray) -> None:
        trees.append(tree)
        evaluate(decoder._mid, tree, nodes)

    decoder._mid.evaluate = spy  # type: ignore[method-assign]
    return trees


@pytest.mark.parametrize("evaluation", ["needed", "all"])
def test_counts_are_the_tokens_that_the_models_read(tiny_pair: Pair, evaluation: str) -> None:
    """Refresh + expand (or all) nodes, what was caught up, and kept nodes + root."""
    config = DraftingConfig(5, 4, 12, evaluation=evaluation)
    schedule = ByRound([1, 0, 1, 1, 0], [0] * 5, [0, 1, 0, 0, 1], [1] * 5, [0] * 5, [0, 0, 0, 1, 1])
    decoder = as_defined(tiny_pair, schedule, config)
    context = decoder.start(PROMPTS[2])
    read: dict[int, list[int]] = {}
    original = CachedModel.run

    def run(self, tokens, *args, **kwargs):
        read.setdefault(id(self), []).append(len(tokens))
        return original(self, tokens, *args, **kwargs)

    caught_up = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "run", run)
        for _ in range(8):
            read.clear()
            round_: Round = decoder.round(context, len(PROMPTS[2]))[0]
            if evaluation == "all":
                passes = [c.all_nodes for c in round_.calls]
            else:
                passes = [n for c in round_.calls for n in (c.refresh_nodes, c.expand_nodes)]
            passes = [n for n in passes if n]
            if passes:
                passes[0] += round_.caught_up
            assert read.get(id(decoder._mid.model), []) == passes
            assert read[id(decoder._target)] == [1 + round_.kept_nodes]
            assert len(round_.calls) == sum(round_.schedule)
            caught_up += round_.caught_up
    assert caught_up > 0


def test_caches_hold_the_committed_tokens_after_each_round(tiny_pair: Pair) -> None:
    """Positions run 0, 1, 2 …; the target holds all but the bonus, the mid drafter no more."""
    decoder = as_defined(tiny_pair, RandomSchedule(1), CONFIG)
    context = decoder.start(PROMPTS[1])
    for _ in range(6):
        decoder.round(context, len(PROMPTS[1]))
        assert decoder._target.positions.tolist() == list(range(len(context) - 1))
        mid = decoder._mid.model
        assert mid.positions.tolist() == list(range(mid.length))
        assert mid.length <= len(context) - 1


def test_resume_equals_having_decoded(tiny_pair: Pair) -> None:
    """A context read at once gives the next round that decoding up to it gives."""
    decoder = as_defined(tiny_pair, all_mid(5), CONFIG, keep_trees=True)
    context = decoder.start(PROMPTS[1])
    for _ in range(3):
        decoder.round(context, len(PROMPTS[1]))
    tokens, values = context.tokens.tolist(), context.log_p.tolist()
    expected, committed = decoder.round(context, len(PROMPTS[1]))

    other = as_defined(tiny_pair, all_mid(5), CONFIG, keep_trees=True)
    resumed: Context = other.resume(tokens)
    assert resumed.tokens.tolist() == tokens
    assert resumed.log_p == pytest.approx(values, abs=1e-9)
    round_, again = other.round(resumed, len(PROMPTS[1]))
    assert (round_.kept, round_.ranks, again) == (expected.kept, expected.ranks, committed)


def test_context_table_is_the_targets_own(tiny_pair: Pair) -> None:
    """Edge scores of n-grams come from plain target distributions, table of W."""
    decoder = as_defined(tiny_pair, all_mid(5), CONFIG)
    context = decoder.start(PROMPTS[2])
    for _ in range(3):
        decoder.round(context, len(PROMPTS[2]))
    expected = slow.context_table(
        context.tokens, plain_log_probs(tiny_pair.target, (), edges=True), CONFIG.width
    )
    assert context.log_p == pytest.approx(expected, abs=1e-9)


def every_token_follows(token: int) -> Context:
    """Return a context that ends in ``token`` and in which every token follows it somewhere."""
    tokens = [t for following in range(VOCAB) for t in (token, following)] + [token]
    return Context(tokens, [0.0] * len(tokens))


def test_restricted_vocabulary_gives_the_floor_outside(tiny_pair: Pair) -> None:
    """A student that cannot say a token gives it the floor and is lossless all the same."""
    words = torch.arange(0, VOCAB, 2)
    student = noisy(tiny_pair.target)
    head = torch.nn.Linear(32, len(words), bias=False, dtype=torch.float64)
    head.weight = torch.nn.Parameter(student.lm_head.weight[words].clone(), requires_grad=False)
    student.lm_head = head
    vocabulary = DraftVocabulary(words, -9.0)
    pair = Pair("student", tiny_pair.target, student, tiny_pair.tokenizer, vocabulary, ())
    drafter = MidDrafter(CachedModel(student), 3, vocabulary, VOCAB)
    context = every_token_follows(5)
    drafter.begin_round(context)
    tree = DraftTree.from_root(5)
    drafter.evaluate(tree, np.array([0]))
    got = drafter.rows.log_p(tree, np.zeros(VOCAB, np.int64), np.arange(VOCAB))
    plain = plain_log_probs(student, context.tokens.tolist(), edges=True)(())
    assert got[0::2] == pytest.approx(plain, abs=1e-9)
    assert got[1::2].tolist() == [-9.0] * (VOCAB // 2)
    top, values = drafter.rows.top(tree, np.array([0]))
    assert top[0].tolist() == [2 * c for c in np.argsort(plain)[::-1][:3]]
    assert values[0] == pytest.approx(sorted(plain)[::-1][:3], abs=1e-9)
    expected = greedy(tiny_pair.target, PROMPTS[2], 25, eos=None)
    decoder = as_defined(pair, RandomSchedule(6), CONFIG)
    assert decoder.generate(PROMPTS[2], 25).tokens == expected


def test_a_wider_head_of_the_mid_drafter_is_cut_to_the_targets(tiny_pair: Pair) -> None:
    """Padded vocabularies: log p is normalised over the target's tokens alone."""
    wide = tiny_llama(2, vocab=VOCAB + 16)
    drafter = MidDrafter(CachedModel(wide), VOCAB, None, VOCAB)
    context = every_token_follows(5)
    drafter.begin_round(context)
    tree = DraftTree.from_root(5)
    drafter.evaluate(tree, np.array([0]))
    got = drafter.rows.log_p(tree, np.zeros(VOCAB, np.int64), np.arange(VOCAB))
    plain = np.array(plain_log_probs(wide, context.tokens.tolist())(()))[:VOCAB]
    expected = [on_grid(x) for x in plain - np.log(np.exp(plain).sum())]
    assert got == pytest.approx(expected, abs=1e-9)
    assert sorted(drafter.rows.top(tree, np.array([0]))[0][0]) == list(range(VOCAB))
    pair = Pair("wide", tiny_pair.target, wide, tiny_pair.tokenizer, None, ())
    result = as_defined(pair, all_mid(5), CONFIG).generate(PROMPTS[1], 15)
    assert result.tokens == greedy(tiny_pair.target, PROMPTS[1], 15, eos=None)


def test_a_replacing_graft_accepts_less() -> None:
    """Ablation ``w/o ND`` at the decoder: a mid drafter that is wrong deletes right n-grams."""
    pair = Pair("wrong", tiny_llama(0), tiny_llama(5), word_tokenizer(), None, ())
    total = {}
    prompt = PROMPTS[2]
    for graft in ("add", "replace"):
        config = DraftingConfig(2, 2, 30, graft=graft)
        result = as_defined(pair, FixedSchedule([0, 1]), config).generate(prompt, 60)
        assert result.tokens == greedy(pair.target, prompt, 60, eos=None)
        total[graft] = len(result.rounds)
    assert total["add"] < total["replace"]


def test_models_with_recurrent_layers_are_refused() -> None:
    """Their state cannot be cut back to an accepted path."""
    model = tiny_llama(0)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(InputError, match="linear_attention"):
        CachedModel(model)


def test_a_narrower_head_of_the_mid_drafter_is_lossless(tiny_pair: Pair) -> None:
    """The target's head may be padded further than the mid drafter's."""
    narrow = tiny_llama(0, vocab=VOCAB - 8)
    pair = Pair("narrow", tiny_pair.target, narrow, tiny_pair.tokenizer, None, ())
    for prompt in PROMPTS[:3]:
        clipped = [t % (VOCAB - 8) for t in prompt]
        result = as_defined(pair, RandomSchedule(1), CONFIG).generate(clipped, 25)
        tokens = greedy(tiny_pair.target, clipped, 25, eos=None)
        assert result.tokens == tokens
