"""Sampling: the target's own law under every system, and one seed's tokens under all of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import treegraft_core.decoder as decoder_module
import treegraft_core.verify as verify_module
from tests import reference as slow
from tests.conftest import tiny_llama, word_tokenizer
from tests.drafters import small_of, with_mid
from tests.test_artifact import random_artifact
from tests.test_decoder import AnyGuard
from tests.test_inputs import profile
from treegraft_core.decoder import TreeGraftDecoder, decode_plain
from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.guard import AS_DEFINED, RuntimeConfig
from treegraft_core.pair import Pair
from treegraft_core.sampling import Chooser, Sampling
from treegraft_core.schedulers import (
    DistilledScheduler,
    FixedSchedule,
    RandomSchedule,
    Scheduler,
    all_mid,
    all_small,
)
from treegraft_core.tree import DraftTree, IntArray

PROMPTS = ([5], [7, 9, 7, 9, 7], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15])


# Systems --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A way to decode: a scheduler and what rounds may do."""

    scheduler: Callable[[], Scheduler]
    drafting: dict[str, Any] = field(default_factory=dict)
    runtime: RuntimeConfig = AS_DEFINED
    small: str = "ngram"
    mid: str = "model"

    def decoder(self, pair: Pair, **options: Any) -> TreeGraftDecoder:
        """Return a decoder with a small width and budget."""
        small = small_of(self.small, pair.target_vocab)
        rules = {"width": 4, "verify_nodes": 12, "small": small, **self.drafting}
        config, pair = DraftingConfig(**rules), with_mid(pair, self.mid)
        runtime = options.pop("runtime", self.runtime)
        return TreeGraftDecoder(
            pair, self.scheduler(), config, profile(), runtime=runtime, **options
        )


def paper_fixed() -> FixedSchedule:
    """Return the paper's fixed schedule."""
    return FixedSchedule([1, 0, 1, 0, 1])


SYSTEMS: dict[str, System] = {
    "all_small": System(lambda: all_small(5)),
    "all_mid": System(lambda: all_mid(5)),
    "fixed": System(paper_fixed),
    "without_eg": System(paper_fixed, {"pool": "frontier"}),
    "without_nd": System(paper_fixed, {"graft": "replace"}),
    "csd": System(lambda: FixedSchedule([0, 1, 0, 1, 0]), {"structure": "sequence"}),
    "specinfer": System(lambda: all_mid(5), {"pool": "frontier", "expansion": "auto"}),
    "random": System(lambda: RandomSchedule(3)),
    "distilled": System(lambda: DistilledScheduler(random_artifact(5, seed=3))),
    "guarded": System(paper_fixed, runtime=RuntimeConfig()),
    "suffix": System(paper_fixed, small="corpus"),
    "head": System(paper_fixed, mid="head"),
    "head_suffix": System(lambda: RandomSchedule(4), small="suffix", mid="head"),
    "own": System(paper_fixed, small="successor", mid="table"),
}


# Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", float("nan")),
        ("top_p", None),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", False),
    ],
)
def test_bad_values(name: str, value: object) -> None:
    """The message names the argument and its value."""
    with pytest.raises(InputError, match=rf"sampling\.{name}={value}: must be"):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_whole_numbers_are_numbers(name: str) -> None:
    """1 and 1.0 (and 2 and 2.0) sample alike."""
    value = 1 if name == "top_p" else 2
    whole, point = (
        Chooser(Sampling(**{"temperature": 1.0, name: v})) for v in (value, float(value))
    )
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    p = whole.probabilities([2, 1], logits)
    assert p.tolist() == point.probabilities([2, 1], logits).tolist()
    assert p.tolist() == pytest.approx(
        slow.distribution(logits.tolist(), [2, 1], **{name: value}), abs=1e-6
    )


def test_greedy_and_untouched() -> None:
    """A penalty changes greedy decoding; the other numbers are for sampling only."""
    assert Sampling().untouched and Sampling(top_p=0.5, top_k=3, seed=4).untouched
    penalised = Sampling(repetition_penalty=1.2)
    assert penalised.greedy and not penalised.untouched
    assert not Sampling(temperature=0.1).greedy


# The law of a token ---------------------------------------------------------------------------

LAWS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.6},
    "reward": {"temperature": 1.0, "repetition_penalty": 0.7},
    "all": {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", LAWS)
def test_probabilities_are_those_of_generate(name: str) -> None:
    """The softmax of the scores that ``generate`` draws each of 20 tokens from."""
    model = tiny_llama(0, dtype=torch.float32)
    ids = torch.tensor([PROMPTS[1]])
    torch.manual_seed(1)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **{"top_k": 0, "top_p": 1.0, **LAWS[name]},
    )
    chooser = Chooser(Sampling(**LAWS[name]))
    text = out.sequences[0].tolist()
    changed = 0
    for i, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        before = text[: len(PROMPTS[1]) + i]
        p = chooser.probabilities(before, logits[0])
        assert p.tolist() == pytest.approx(scores[0].softmax(-1).tolist(), abs=1e-7)
        assert p.tolist() == pytest.approx(
            slow.distribution(logits[0].tolist(), before, **LAWS[name]), abs=1e-5
        )
        changed += not torch.allclose(p, logits[0].softmax(-1), atol=1e-3)
    assert len(out.scores) == 20
    assert (changed > 10) == (name != "plain")


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_greedy_with_a_penalty_equals_generate(tiny_pair: Pair, penalty: float) -> None:
    """Token for token, and not what decoding without a penalty gives."""
    ids = torch.tensor([PROMPTS[1]])
    plain, expected = (
        tiny_pair.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=1,
            repetition_penalty=p,
        )[0, 5:].tolist()
        for p in (1.0, penalty)
    )
    assert expected != plain
    sampling = Sampling(repetition_penalty=penalty)
    assert decode_plain(tiny_pair, PROMPTS[1], 24, (), sampling).tokens == expected
    for name, system in SYSTEMS.items():
        result = system.decoder(tiny_pair).generate(PROMPTS[1], 24, (), sampling=sampling)
        assert result.tokens == expected, name


def test_the_chosen_token_has_a_probability() -> None:
    """Whatever the uniform number: never a token that top-k left out, at either end."""

    class Number:
        def __init__(self, value: float):
            self.value = value

        def random(self) -> float:
            return self.value

    logits = torch.tensor([0.0, 3.0, 0.0, 3.0, 3.0, 0.0])
    chooser = Chooser(Sampling(temperature=1.0, top_k=3))
    for value, token in ((0.0, 1), (0.333, 1), (0.334, 3), (0.667, 4), (1 - 2**-53, 4)):
        chooser._rng = Number(value)  # type: ignore[assignment]
        assert chooser.choose([2], logits) == token


# The rule of a node ---------------------------------------------------------------------------

properties = settings(derandomize=True, deadline=None, max_examples=60, database=None)


@properties
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), st.data())
def test_the_literal_rule_has_the_targets_law(weights: list[int], data: st.DataObject) -> None:
    """Exactly p, by fractions, for every choice and order of children; A is p of the children."""
    p = [slow.exactly(weights)[token] for token in range(len(weights))]
    subset = data.draw(st.sets(st.integers(0, len(p) - 1)))
    for children in permutations(subset):
        found = slow.law(partial(slow.literal_rule, children, p))
        law = {token: found.get((token, token in subset), 0) for token in range(len(p))}
        assert list(law.values()) == p
        assert sum(found.values()) == 1
        assert all(is_child == (token in subset) for token, is_child in found)


def test_a_rule_without_renormalising_has_another_law() -> None:
    """What the exact test is worth: the same loop without the renormalisation is seen."""

    def careless(pick: slow.Pick) -> int:
        for token in (0, 1):
            if pick([p[token], 1 - p[token]]) == 0:
                return token
        return pick(p)

    p = slow.exactly([3, 2, 1])
    assert [slow.law(careless)[token] for token in range(3)] != p


class Scripted:
    """A chooser whose uniform numbers are picks, so that a walk's law can be enumerated."""

    sampling = Sampling(temperature=1.0)

    def __init__(self, pick: slow.Pick):
        self.pick = pick

    def choose(self, tokens: IntArray, row: list[float]) -> int:
        return self.pick(row)


@dataclass
class RandomTree:
    """A tree of few tokens, the nodes kept, and the target's distribution after each node."""

    tree: DraftTree
    order: IntArray
    laws: list[list[float]]
    children: dict[tuple[int, ...], list[int]]

    @classmethod
    def make(cls, seed: int, vocab: int, nodes: int) -> RandomTree:
        rng = np.random.default_rng(seed)
        tree = DraftTree.from_root(0)
        for _ in range(nodes):
            parent, token = int(rng.integers(tree.size)), int(rng.integers(vocab))
            if tree.child(parent, token) < 0:
                tree.add(parent, token, -float(rng.integers(0, 8)) / 4)
        kept = [n for n in range(1, tree.size) if rng.random() < 0.8]
        kept = [n for n in kept if set(tree.path(n)) <= set(kept)]
        children: dict[tuple[int, ...], list[int]] = {}
        for node in rng.permutation(kept).astype(int).tolist():  # tried in any order
            path = tree.path_tokens(node)
            children.setdefault(tuple(path[:-1]), []).append(path[-1])
        order = np.array([0, *kept], np.int64)
        laws = rng.dirichlet(np.full(vocab, 0.7), len(order))
        if vocab > 1:  # top-k leaves some out
            laws[:, int(rng.integers(vocab))] *= rng.random(len(order)) < 0.7
        return cls(tree, order, (laws / laws.sum(1, keepdims=True)).tolist(), children)

    def law_after(self, path: tuple[int, ...]) -> list[float]:
        """Return the target's distribution after a path of kept nodes."""
        node = 0
        for token in path:
            node = self.tree.child(node, token)
        return self.laws[self.order.tolist().index(node)]

    def fast(self, pick: slow.Pick) -> tuple[int, tuple[int, ...]]:
        """Walk as the core does; return A and the tokens."""
        path, rows, tokens = verify_module.walk(
            self.tree, self.order, self.laws, np.array([0]), Scripted(pick)
        )
        assert [int(self.order[row]) for row in rows] == [0, *path]
        assert [int(self.tree.token[node]) for node in path] == tokens[:-1]
        return len(path), tuple(tokens)

    def literal(self, pick: slow.Pick) -> tuple[int, tuple[int, ...]]:
        """Walk by the design's rule; return A and the tokens."""
        return slow.literal_walk(self.children, self.law_after, pick)


@properties
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 12))
def test_the_walk_has_the_law_of_the_literal_rule(seed: int, vocab: int, nodes: int) -> None:
    """Of A and the tokens together, exactly, on random trees with children in any order."""
    case = RandomTree.make(seed, vocab, nodes)
    fast, literal = slow.law(case.fast), slow.law(case.literal)
    assert sum(fast.values()) == pytest.approx(1.0)
    outcomes = [o for o in {*fast, *literal} if max(fast.get(o, 0), literal.get(o, 0)) > 1e-12]
    assert [fast.get(o, 0) for o in outcomes] == pytest.approx(
        [literal.get(o, 0) for o in outcomes], abs=1e-9
    )


@pytest.mark.parametrize("seed", range(6))
def test_draws_of_the_walk_and_of_the_literal_rule_agree(seed: int) -> None:
    """Two samples of 4,000 draws each on a random tree, chi-square of one law."""
    case = RandomTree.make(seed, 4, 30)
    assert len(case.order) > 4
    draws = []
    for walk, start in ((case.fast, 0), (case.literal, 1)):
        pick = slow.random_pick(2 * seed + start)
        draws.append(Counter(walk(pick) for _ in range(4000)))
    outcomes = sorted(draws[0] | draws[1])
    often = [o for o in outcomes if draws[0][o] + draws[1][o] >= 20]
    table = [[d[o] for o in often] + [4000 - sum(d[o] for o in often)] for d in draws]
    table = [row if min(row[-1] for row in table) else row[:-1] for row in table]
    assert len(often) >= 4
    assert stats.chi2_contingency(table).pvalue > 1e-4


# The joint law of three tokens under every system ---------------------------------------------

VOCAB, TOKENS, DRAWS = 6, 3, 200_000
PROMPT = [2, 3, 4, 2, 3, 5, 4, 2, 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 5},
}
JOINT = [*SYSTEMS, "decode_plain"]


def soft_llama(seed: int) -> PreTrainedModel:
    """Return a one-layer Llama of six tokens, none of which is certain."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)
    return model.eval().requires_grad_(False)


@cache
def soft_pair() -> Pair:
    """Return a pair whose mid drafter is a noisy copy of its target."""
    mid = soft_llama(0)
    generator = torch.Generator().manual_seed(1)
    for p in mid.parameters():
        p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return Pair("soft", soft_llama(0), mid, word_tokenizer(VOCAB), None, ())


@cache
def exact(name: str) -> dict[tuple[int, ...], float]:
    """Return the probability of every three tokens, by forwards of the target alone."""
    target, settings = soft_pair().target, SETTINGS[name]

    @cache
    def after(tokens: tuple[int, ...]) -> list[float]:
        logits = target(torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1]
        return slow.distribution(logits.tolist(), [*PROMPT, *tokens], **settings)

    joint = {}
    for a, b, c in product(range(VOCAB), repeat=TOKENS):
        joint[a, b, c] = after(())[a] * after((a,))[b] * after((a, b))[c]
    return joint


def p_value(counts: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Return the chi-square test's p; cells of expectation below 5 count as one.

    0 if anything impossible was drawn.
    """
    n = counts.total()
    if any(joint[cell] == 0.0 for cell in counts):
        return 0.0
    cells = sorted((cell for cell in joint if joint[cell] > 0.0), key=joint.__getitem__)
    observed, expected = [0.0], [0.0]
    for cell in cells:
        if expected[-1] >= 5.0:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[cell]
        expected[-1] += n * joint[cell]
    assert len(expected) > 20 and min(expected) >= 5.0
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@dataclass(frozen=True)
class Step:
    """One way in which a system may go on at a context.

    A schedule of a round (None: the scheduler's own), the guard's mode, and how many of the kept
    nodes it lets through.
    """

    bits: tuple[int, ...] | None = None
    mode: str = "scheduled"
    budget: int | None = None


@dataclass
class Verification:
    """What a round has when its verification pass is over; of a plain step, the logits alone."""

    context: IntArray
    logits: list[Tensor]
    tree: DraftTree | None = None
    order: IntArray | None = None


class Drafts:
    """What a system's real decoder does up to verification, once for each context and step.

    Its trees and the target's logits depend on the context alone. So 200,000 draws need no more
    than a few hundred rounds, and go through the real walk and the real choice of tokens.
    """

    def __init__(self, name: str):
        self.name = name
        self.steps = [Step()]
        if name == "random":
            schedules = RandomSchedule(5)
            self.steps = [
                Step(tuple(schedules.decide(None) for _ in range(5)))  # type: ignore[arg-type]
                for _ in range(6)
            ]
        if name == "guarded":  # whatever it decides, which depends on measured times
            modes = product(("small", "scheduled"), (0, 1, 4, 12))
            self.steps = [Step(mode="plain"), *(Step(mode=m, budget=b) for m, b in modes)]
        self.seen: list[dict[tuple[int, ...], Verification]] = [{} for _ in self.steps]
        if name == "decode_plain":
            self._plainly()
        else:
            self.decoder = SYSTEMS[name].decoder(soft_pair(), runtime=AS_DEFINED)

    def after(self, tokens: tuple[int, ...], step: int) -> Verification:
        """Return the verification after the prompt and ``tokens`` by one of the steps."""
        found = self.seen[step].get(tokens)
        if found is None:
            found = self.seen[step][tokens] = self._run(tokens, self.steps[step])
        return found

    def _run(self, tokens: tuple[int, ...], step: Step) -> Verification:
        found: list[Verification] = []
        walk = verify_module.walk

        def spy_walk(tree, order, logits, context, chooser):
            found.append(Verification(context.copy(), list(logits), tree, order))
            return walk(tree, order, logits, context, chooser)

        def spy_next(chooser, before, logits):
            found.append(Verification(np.array(before), list(logits[-1:])))
            return 0

        decoder = self.decoder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder_module, "walk", spy_walk)
            patch.setattr(decoder_module, "_next", spy_next)
            if step.bits is not None:
                patch.setattr(decoder, "scheduler", FixedSchedule(step.bits))
            patch.setattr(decoder.guard, "budget", lambda tree, kept, at: kept[: step.budget])
            if not tokens:
                decoder.start(PROMPT, Sampling(temperature=1.0))
            else:
                context = decoder.resume([*PROMPT, *tokens], Sampling(temperature=1.0))
                if step.mode == "plain":
                    decoder.plain_step(context)
                else:
                    decoder.round(context, len(PROMPT), step.mode)  # type: ignore[arg-type]
        (verification,) = found
        return verification

    def _plainly(self) -> None:
        # decode_plain on every three tokens, put in the place of those chosen.
        for script in product(range(VOCAB), repeat=TOKENS):
            left = list(script)

            def spy(chooser, before, logits, left=left):
                tokens = tuple(int(t) for t in before)[len(PROMPT) :]
                found = Verification(np.array(before), list(logits[-1:].clone()))
                self.seen[0].setdefault(tokens, found)
                return left.pop(0)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decoder_module, "_next", spy)
                assert decode_plain(soft_pair(), PROMPT, TOKENS, ()).tokens == list(script)


drafts = cache(Drafts)


class Quick(Chooser):
    """The real chooser with its numbers drawn in blocks and its laws kept, one a row of logits."""

    def __init__(self, sampling: Sampling):
        super().__init__(sampling)
        self.uniform = self._numbers().__next__
        self._laws: dict[int, tuple[Tensor, list[float], list[float]]] = {}

    def _numbers(self) -> Iterator[float]:
        while True:
            yield from np.minimum(self._rng.random(1 << 15), 1 - 1e-12).tolist()

    def law(self, tokens: IntArray, logits: Tensor) -> tuple[Tensor, list[float], list[float]]:
        """Return the row of logits, p and its cumulative sum."""
        found = self._laws.get(id(logits))
        if found is None:
            p = self.probabilities(tokens, logits.double())
            found = self._laws[id(logits)] = logits, p.tolist(), p.cumsum(-1).tolist()
        return found

    def choose(self, tokens: IntArray, logits: Tensor) -> int:
        reach = self.law(tokens, logits)[2]
        return bisect_right(reach, self.uniform() * reach[-1])


Walk = Callable[..., tuple[list[int], list[int], list[int]]]


def draw(
    name: str, sampling: Sampling, n: int = DRAWS, walk: Walk = verify_module.walk
) -> Counter[tuple[int, ...]]:
    """Draw the first three tokens ``n`` times."""
    source, chooser = drafts(name), Quick(sampling)
    after, choose, steps = source.after, decoder_module._next, len(source.steps)
    which = np.random.default_rng(sampling.seed + 1).integers(steps, size=n).tolist()
    drawn = []
    for step in which:
        tokens: tuple[int, ...] = ()
        while len(tokens) < TOKENS:
            at = after(tokens, step)
            step = (step + 1) % steps
            if at.tree is None:
                tokens += (choose(chooser, at.context, at.logits),)  # type: ignore[arg-type]
            else:
                tokens += tuple(walk(at.tree, at.order, at.logits, at.context, chooser)[2])
        drawn.append(tokens[:TOKENS])
    return Counter(drawn)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", JOINT)
def test_the_joint_law_of_three_tokens(name: str, setting: str) -> None:
    """200,000 draws against exact probabilities."""
    sampling = Sampling(**SETTINGS[setting], seed=JOINT.index(name))
    assert p_value(draw(name, sampling), exact(setting)) > 1e-4


def test_the_drafts_are_worth_drawing_from() -> None:
    """Every system that drafts has trees from which tokens are accepted, not all of them."""
    for name in SYSTEMS:
        rng = np.random.default_rng(0)
        source, chooser = drafts(name), Quick(Sampling(temperature=1.0))
        accepted = []
        for first, second in rng.integers(VOCAB, size=(200, 2)).tolist():
            at = source.after((first, second), int(rng.integers(len(source.steps))))
            if at.tree is not None:
                path, _, _ = verify_module.walk(at.tree, at.order, at.logits, at.context, chooser)  # type: ignore[arg-type]
                accepted.append(len(path))
        assert np.mean(accepted) > 0.1 and min(accepted) == 0, name


@pytest.mark.parametrize("setting", SETTINGS)
def test_quick_draws_are_the_choosers_own(setting: str) -> None:
    """The same tokens as the chooser of the same seed."""
    rows = [torch.from_numpy(row) for row in np.random.default_rng(0).normal(size=(8, VOCAB))]
    quick, real = (c(Sampling(**SETTINGS[setting], seed=4)) for c in (Quick, Chooser))
    for i in range(3000):
        assert quick.choose([1], rows[i % 8]) == real.choose([1], rows[i % 8])


@pytest.mark.parametrize(("decides", "setting"), [("chance", "plain"), ("guard", "top_k")])
def test_the_joint_law_of_whole_requests(decides: str, setting: str) -> None:
    """5,000 requests with nothing kept between them but the prompt, each with a seed of its own.

    Plain steps, small and scheduled rounds by chance; and the guarded runtime as it is.
    """
    short = System(lambda: FixedSchedule([1, 0]), {"depth": 2, "width": 3}, RuntimeConfig())
    decoder = (short if decides == "chance" else SYSTEMS["guarded"]).decoder(soft_pair())
    modes = AnyGuard(decoder, 0).modes if decides == "chance" else []
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(5000):
        sampling = Sampling(**SETTINGS[setting], seed=seed)
        counts[tuple(decoder.generate(PROMPT, TOKENS, (), sampling=sampling).tokens)] += 1
    assert p_value(counts, exact(setting)) > 1e-4
    assert decides == "guard" or min(Counter(modes).values()) > 1000


# Rules that are wrong -------------------------------------------------------------------------


Children = list[tuple[int, int, float]]
"""Node, token and the drafter's log p of the children of a node, oldest first."""


def without_renormalising(children: Children, p: list[float], chooser: Quick) -> int | None:
    """Accept a child with p of the whole, also after a refusal; the bonus is drawn from p."""
    return next((node for node, token, _ in children if chooser.uniform() < p[token]), None)


def by_the_drafter(children: Children, p: list[float], chooser: Quick) -> int | None:
    """Accept a child with the drafter's own probability."""
    return next((node for node, _, log_p in children if chooser.uniform() < math.exp(log_p)), None)


def greedily(children: Children, p: list[float], chooser: Quick) -> int | None:
    """Accept the child that the target thinks likeliest."""
    return next((node for node, token, _ in children if p[token] == max(p)), None)


class WrongWalk:
    """A walk by a rule that accepts a child or none; then the bonus is drawn from all of p."""

    def __init__(self, accept: Callable[[Children, list[float], Quick], int | None]):
        self.accept = accept
        self._known: dict[int, list[tuple[int, int, Children]]] = {}

    def __call__(
        self,
        tree: DraftTree,
        order: IntArray,
        logits: list[Tensor],
        context: IntArray,
        chooser: Quick,
    ) -> tuple[list[int], list[int], list[int]]:
        if id(tree) not in self._known:
            self._known[id(tree)] = self._nodes(tree, order.tolist())
        nodes, at = self._known[id(tree)], 0
        found: list[int] = []
        while True:
            row, _, children = nodes[at]
            _, p, reach = chooser.law(context, logits[row])
            at = self.accept(children, p, chooser) or 0
            if not at:
                return [], [], [*found, bisect_right(reach, chooser.uniform() * reach[-1])]
            found.append(nodes[at][1])

    def _nodes(self, tree: DraftTree, order: list[int]) -> list[tuple[int, int, Children]]:
        # Row of logits, token and children of each node; those not kept have row -1.
        def children(node: int) -> Children:
            below = [n for n in order if n and tree.parent[n] == node]
            return [(n, int(tree.token[n]), float(tree.log_p[n])) for n in below]

        return [
            (order.index(n) if n in order else -1, int(tree.token[n]), children(n))
            for n in range(tree.size)
        ]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", [without_renormalising, by_the_drafter, greedily])
@pytest.mark.parametrize("name", ["all_small", "all_mid", "csd"])
def test_wrong_rules_are_seen(name: str, rule: Callable[..., int | None], setting: str) -> None:
    """A tenth of the draws tells each of them from the target's law."""
    sampling = Sampling(**SETTINGS[setting], seed=1)
    counts = draw(name, sampling, DRAWS // 10, WrongWalk(rule))
    assert p_value(counts, exact(setting)) < 1e-6


# One seed, the same tokens --------------------------------------------------------------------

SEEDED = {"hot": LAWS["hot"], "all": LAWS["all"], "penalty": LAWS["penalty"]}


@pytest.mark.parametrize("setting", SEEDED)
@pytest.mark.parametrize("name", SYSTEMS)
def test_one_seed_gives_the_tokens_of_plain_decoding(
    tiny_pair: Pair, name: str, setting: str
) -> None:
    """Whatever was drafted."""
    accepted = 0
    decoder = SYSTEMS[name].decoder(tiny_pair)
    for seed, prompt in enumerate(PROMPTS):
        sampling = Sampling(**SEEDED[setting], seed=seed)
        result = decoder.generate(prompt, 16, (), sampling=sampling)
        assert result.tokens == decode_plain(tiny_pair, prompt, 16, (), sampling).tokens
        accepted += sum(r.accepted for r in result.rounds)
    assert accepted or name == "guarded"


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_seed_repeats_everything(tiny_pair: Pair, name: str) -> None:
    """Tokens, and where no clock decides also schedules and A."""
    sampling = Sampling(**LAWS["all"], seed=11)
    first, again = (
        SYSTEMS[name].decoder(tiny_pair).generate(PROMPTS[2], 16, (), sampling=sampling)
        for _ in range(2)
    )
    assert first.tokens == again.tokens
    if name != "guarded":
        assert [(r.schedule, r.accepted, r.ranks) for r in first.rounds] == [
            (r.schedule, r.accepted, r.ranks) for r in again.rounds
        ]
    plain = (decode_plain(tiny_pair, PROMPTS[2], 16, (), sampling).tokens for _ in range(2))
    assert [*plain] == [first.tokens] * 2


def test_a_decoder_begins_each_request_with_its_seed(tiny_pair: Pair) -> None:
    """Other requests in between change nothing."""
    decoder = SYSTEMS["fixed"].decoder(tiny_pair)
    requests = [(PROMPTS[2], 4), (PROMPTS[1], 5), (PROMPTS[2], 4)]
    first, _, again = (
        decoder.generate(prompt, 20, (), sampling=Sampling(temperature=1.5, seed=seed)).tokens
        for prompt, seed in requests
    )
    assert first == again


def test_seeds_differ(tiny_pair: Pair) -> None:
    """Eight seeds, eight texts, none of them the greedy one."""
    decoder = SYSTEMS["all_small"].decoder(tiny_pair)
    texts = {
        tuple(
            decoder.generate(
                PROMPTS[2], 20, (), sampling=Sampling(temperature=1.5, seed=seed)
            ).tokens
        )
        for seed in range(8)
    }
    assert len(texts) == 8
    assert tuple(decode_plain(tiny_pair, PROMPTS[2], 20, ()).tokens) not in texts


# Where sampling stops -------------------------------------------------------------------------

HOT = Sampling(temperature=1.3, top_p=0.95, seed=7)


@pytest.mark.parametrize("name", SYSTEMS)
def test_stops_at_eos_and_at_the_limit(tiny_pair: Pair, name: str) -> None:
    """Exactly there, as plain decoding does, wherever in a round that is."""
    full = decode_plain(tiny_pair, PROMPTS[1], 10, (), HOT).tokens
    decoder = SYSTEMS[name].decoder(tiny_pair)
    for limit in range(1, 7):
        result = decoder.generate(PROMPTS[1], limit, (), sampling=HOT)
        assert (result.tokens, result.stopped) == (full[:limit], "length")
    for eos in sorted(set(full)):
        cut = full.index(eos) + 1
        result = decoder.generate(PROMPTS[1], 40, [eos], sampling=HOT)
        assert (result.tokens, result.stopped) == (full[:cut], "eos")
        plain = decode_plain(tiny_pair, PROMPTS[1], 40, [eos], HOT)
        assert (plain.tokens, plain.stopped) == (full[:cut], "eos")


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_end_of_the_context(name: str) -> None:
    """The text fills it, and is the one that plain decoding samples."""
    target, mid = tiny_llama(0), tiny_llama(0)
    for model in (target, mid):
        model.config.max_position_embeddings = 24
    pair = Pair("short", target, mid, word_tokenizer(), None, ())
    decoder = SYSTEMS[name].decoder(pair)
    for length in (5, 21, 22, 23):
        prompt = (PROMPTS[2] * 2)[:length]
        result = decoder.generate(prompt, 100, (), sampling=HOT)
        plain = decode_plain(pair, prompt, 100, (), HOT)
        assert result.stopped == plain.stopped == "context"
        assert result.tokens == plain.tokens
        assert len(prompt) + len(result.tokens) == 24


# Logits that are not numbers ------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_chooser_refuses_logits_without_a_distribution(value: float) -> None:
    """One NaN or +inf among them, or nothing but -inf."""
    logits = torch.tensor([1.0, value, 0.5]) if value != float("-inf") else torch.full((3,), value)
    for name in SETTINGS:
        with pytest.raises(FloatingPointError, match="give no distribution"):
            Chooser(Sampling(**SETTINGS[name])).choose([0], logits)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_target_that_breaks_down_is_told_and_can_be_used_again(name: str) -> None:
    """At the prompt, at a round's verification, at a plain step; the next request is as ever."""
    pair = Pair("broken", tiny_llama(0), tiny_llama(0), word_tokenizer(), None, ())
    weight = pair.target.lm_head.weight
    good = weight.clone()
    decoder = SYSTEMS[name].decoder(pair)
    expected = decode_plain(pair, PROMPTS[2], 12, (), HOT).tokens
    weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the target's logits"):
        decoder.generate(PROMPTS[2], 12, (), sampling=HOT)
    with pytest.raises(FloatingPointError, match="the target's logits"):
        decode_plain(pair, PROMPTS[2], 12, (), HOT)
    weight.copy_(good)
    stream = decoder.stream(PROMPTS[1], 12, (), sampling=HOT)
    next(stream)
    weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the target's logits"):
        next(stream)
    weight.copy_(good)
    assert decoder.generate(PROMPTS[2], 12, (), sampling=HOT).tokens == expected
