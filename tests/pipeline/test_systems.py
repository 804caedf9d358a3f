"""Online planning, the peers, and the systems that a configuration gives."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig

from pipeline import evaluate, peers
from pipeline.engine import drafting_config, open_pair, open_profile
from pipeline.hardware import outcomes
from pipeline.planning import OnlinePlanner
from pipeline.replay import follow, planned_decisions, tries_of
from pipeline.rows import bits_text
from pipeline.systems import Bench, System, fixed_bits
from pipeline.texts import Text
from pipeline.value import ValueModel
from tests.conftest import VOCAB, tiny_llama
from tests.pipeline.conftest import assert_refused, conf, overrides, random_value, write_fit
from tests.test_enumeration import repetitive_case
from tests.test_inputs import GRID, profile
from treegraft_core import (
    AS_DEFINED,
    SIGNALS,
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    Sampling,
    StepState,
    TreeGraftDecoder,
    decode_plain,
    load_scheduler,
)
from treegraft_core.student import DraftVocabulary

GREEDY = Sampling()
PROMPTS = ([5], [7, 9, 7, 9, 7], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15], [2, 1, 2, 1, 2])
LENGTHS = (1, 3, 8)


# Online planning ------------------------------------------------------------------------------


def slow_row(model: ValueModel, state: StepState, ahead: Sequence[int]) -> list[float]:
    """Return the value network's input for one schedule of the remaining steps."""
    assert state.signals is not None
    before = list(state.bits)
    row = [
        math.log(1 + state.prompt_tokens),
        state.target_ms,
        state.mid_ms,
        math.log(state.target_ms / state.mid_ms),
        state.step / state.depth,
        sum(before) / state.depth,
    ]
    row += [before[j] if j < len(before) else 0 for j in range(state.depth)]
    row += [float(dict(zip(SIGNALS, state.signals, strict=True))[name]) for name in model.signals]
    row += [0] * len(before) + [1 if bit else -1 for bit in ahead]
    return row


def slow_decision(
    model: ValueModel, state: StepState, numerator: str, rate: float | None = None
) -> int:
    """Return the first bit of the best remaining schedule, one after the other."""
    best, first = -math.inf, -1
    for ahead in product((0, 1), repeat=state.depth - len(state.bits)):
        tokens, draft_ms, verify_ms = model.heads(np.array([slow_row(model, state, ahead)]))[0]
        tokens -= numerator == "accepted"
        ms = draft_ms + verify_ms
        worth = 1000 * tokens / ms if rate is None else 1000 * (tokens - rate * ms)
        if worth > best:
            best, first = worth, ahead[0]
    return first


def exact_value(depth: int, seed: int) -> ValueModel:
    """Return a value network in float64, where a row's figures do not depend on its batch."""
    model = random_value(depth, seed)
    for module in model.modules:
        module.double()
    return model


@pytest.mark.parametrize("rate", [None, 0.05])
@pytest.mark.parametrize("numerator", ["committed", "accepted"])
@pytest.mark.parametrize("depth", range(1, 6))
def test_planning_equals_trying_every_schedule(
    depth: int, numerator: str, rate: float | None
) -> None:
    """Random weights, random states, every step."""
    rng = np.random.default_rng(depth)
    taken = []
    for seed in range(30):
        model = exact_value(depth, seed)
        planner = OnlinePlanner(model, numerator, rate)
        for step in range(1, depth + 1):
            state = StepState(
                step=step,
                bits=tuple(rng.integers(0, 2, step - 1).tolist()),
                depth=depth,
                prompt_tokens=int(rng.integers(1, 900)),
                target_ms=float(rng.uniform(1, 90)),
                mid_ms=float(rng.uniform(0.5, 40)),
                signals=rng.normal(scale=3, size=len(SIGNALS)),
            )
            decided = planner.decide(state)
            assert decided == slow_decision(model, state, numerator, rate)
            taken.append(decided)
    assert set(taken) == {0, 1}


def test_planning_many_states_equals_deciding_step_by_step() -> None:
    """The walk at every state of a text leads where the runtime's decisions would."""
    case = repetitive_case()
    found, clock = case.enumerate(case.model()), profile(verify=GRID)
    text = Text("math", "1", 0, case.tokens, 6, len(found) + 1, case.log_p)
    tries = tries_of("tiny", text, found, clock)
    taken = set()
    for seed in range(8):
        model = exact_value(4, seed)
        planner = OnlinePlanner(model, "committed")
        wanted = planned_decisions(planner, tries, outcomes(tries, clock))
        walked = follow(wanted, 4)
        for at in range(len(found)):
            every = found.outcomes(at)
            bits: tuple[int, ...] = ()
            while len(bits) < 4:
                seen = next(o for o in every if o.bits[: len(bits)] == bits)
                state = StepState(
                    step=len(bits) + 1,
                    bits=bits,
                    depth=4,
                    prompt_tokens=6,
                    target_ms=clock.target_ms,
                    mid_ms=clock.mid_ms,
                    signals=seen.signals[len(bits)],
                )
                bits = (*bits, planner.decide(state))
            assert walked[at] == int(bits_text(bits), 2)
            taken.add(bits)
    assert len(taken) > 3


def test_planning_needs_its_depth_and_signals() -> None:
    planner = OnlinePlanner(random_value(4), "committed")
    state = StepState(1, (), 5, 20, 8.0, 3.0, np.zeros(len(SIGNALS)))
    with pytest.raises(InputError, match=r"drafting\.depth=5.*fitted for depth 4"):
        planner.decide(state)
    with pytest.raises(ValueError, match="signals"):
        planner.decide(replace(state, depth=4, signals=None))


@pytest.mark.parametrize("depth", [1, 5])
def test_a_decision_takes_time(depth: int) -> None:
    assert 0 < OnlinePlanner(random_value(depth), "committed").decision_ms(100, 8.0, 3.0) < 1000


# Peers ------------------------------------------------------------------------------------------


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[peers.Arrivals]:
    """Return the clocks of the answers to come."""
    seen: list[peers.Arrivals] = []

    class Kept(peers.Arrivals):
        def __init__(self) -> None:
            super().__init__()
            seen.append(self)

    monkeypatch.setattr(peers, "Arrivals", Kept)
    return seen


def named(pair: Pair, kind: str, length: int) -> dict[str, Any]:
    """Return what ``generate`` takes for one kind of peer."""
    if kind == "assisted":
        assistant = peers.assistant_of(pair)
        assistant.generation_config.num_assistant_tokens = length
        return {"assistant_model": assistant}
    return {"prompt_lookup_num_tokens": length} if kind == "prompt_lookup" else {}


def every_peer(pair: Pair) -> dict[str, dict[str, Any]]:
    """Return every kind of peer with every draft length."""
    return {
        "plain": {},
        **{f"assisted {n}": named(pair, "assisted", n) for n in LENGTHS},
        **{f"prompt lookup {n}": named(pair, "prompt_lookup", n) for n in LENGTHS},
    }


def ours(pair: Pair, ids: Sequence[int], n: int, sampling: Sampling) -> list[int]:
    """Return the tokens of this project's decoder."""
    config = DraftingConfig(depth=3, width=4, verify_nodes=12)
    decoder = TreeGraftDecoder(pair, FixedSchedule([1, 0, 1]), config, runtime=AS_DEFINED)
    return decoder.generate(ids, n, sampling=sampling).tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(repetition_penalty=1.3)])
@pytest.mark.parametrize("ids", PROMPTS)
def test_greedy_peers_give_the_decoders_own_tokens(
    tiny_pair: Pair, ids: list[int], sampling: Sampling
) -> None:
    expected = ours(tiny_pair, ids, 24, sampling)
    for name, arguments in every_peer(tiny_pair).items():
        assert peers.generate(tiny_pair, ids, 24, sampling, **arguments).tokens == expected, name


def test_a_repetition_penalty_changes_the_answer(tiny_pair: Pair) -> None:
    assert any(
        ours(tiny_pair, ids, 24, GREEDY) != ours(tiny_pair, ids, 24, Sampling(0, 1.0, 0, 1.3))
        for ids in PROMPTS
    )


@pytest.mark.parametrize("ids", PROMPTS)
def test_all_but_the_first_arrival_count(
    tiny_pair: Pair, ids: list[int], arrivals: list[peers.Arrivals]
) -> None:
    for name, arguments in every_peer(tiny_pair).items():
        done = peers.generate(tiny_pair, ids, 20, GREEDY, **arguments)
        prompt, first, *others = arrivals.pop().counts
        assert prompt == len(ids), name
        assert done.counted == sum(others) == len(done.tokens) - first, name
        longest = 1 + int(name.split()[-1]) if " " in name else 1
        assert 1 <= first <= longest and max(others, default=1) <= longest, name
        assert done.ms > 0


def test_the_first_arrival_of_an_assistant_is_what_the_target_agrees_with(tiny_pair: Pair) -> None:
    """By hand: the mid drafter's greedy tokens as far as they are the target's, and one more."""
    pair = replace(tiny_pair, eos_token_ids=())
    mid = replace(pair, target=pair.mid)
    firsts = set()
    for ids in ([t, u] for t in (4, 11, 29) for u in range(2, 12)):
        drafted = decode_plain(mid, ids, 4).tokens
        wanted = decode_plain(pair, ids, 20).tokens
        agreed = next((i for i in range(4) if drafted[i] != wanted[i]), 4)
        done = peers.generate(pair, ids, 20, GREEDY, **named(pair, "assisted", 4))
        assert done.tokens == wanted
        assert done.counted == 20 - (agreed + 1)
        firsts.add(agreed)
    assert len(firsts) > 1


def test_an_assistant_that_always_agrees(tiny_pair: Pair, arrivals: list[peers.Arrivals]) -> None:
    """Every arrival is a draft of the configured length and one more token."""
    pair = replace(tiny_pair, mid=tiny_pair.target, eos_token_ids=())
    for length in LENGTHS:
        n = 3 * (length + 1)
        done = peers.generate(pair, PROMPTS[1], n, GREEDY, **named(pair, "assisted", length))
        assert arrivals.pop().counts[1:] == [length + 1] * 3
        assert done.counted == 2 * (length + 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_answers(tiny_pair: Pair, n: int) -> None:
    pair = replace(tiny_pair, eos_token_ids=())
    for ids in PROMPTS:
        expected = ours(pair, ids, n, GREEDY)
        for name, arguments in every_peer(pair).items():
            done = peers.generate(pair, ids, n, GREEDY, **arguments)
            assert done.tokens == expected, name
            assert done.counted <= n - 1 and done.ms >= 0, name
            assert n > 1 or done.counted == 0


@pytest.mark.parametrize("at", [0, 1, 4])
def test_answers_end_with_the_end_of_sequence(tiny_pair: Pair, at: int) -> None:
    """At once, or in the middle of a draft."""
    free = replace(tiny_pair, eos_token_ids=())
    for ids in PROMPTS:
        text = decode_plain(free, ids, 12).tokens
        pair = replace(tiny_pair, eos_token_ids=(text[at], 47))
        expected = ours(pair, ids, 12, GREEDY)
        assert len(expected) <= at + 1
        for name, arguments in every_peer(pair).items():
            done = peers.generate(pair, ids, 12, GREEDY, **arguments)
            assert done.tokens == expected, name
            assert 0 <= done.counted < len(expected), name


@pytest.mark.parametrize("kind", ["plain", "assisted", "prompt_lookup"])
def test_samples_depend_on_the_seed_alone(tiny_pair: Pair, kind: str) -> None:
    """The global generator neither matters nor moves."""
    pair = replace(tiny_pair, eos_token_ids=())
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=20)
    found = []
    for seed in (0, 0, 1, 2, 3):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        drawn = replace(sampling, seed=seed)
        found.append(peers.generate(pair, PROMPTS[2], 16, drawn, **named(pair, kind, 4)).tokens)
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found}) > 2


def test_greedy_peers_leave_the_generator_alone(tiny_pair: Pair) -> None:
    before = torch.get_rng_state()
    for arguments in every_peer(tiny_pair).values():
        peers.generate(tiny_pair, PROMPTS[2], 8, GREEDY, **arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def student(tiny_pair: Pair) -> Pair:
    """Return the pair with a mid drafter that has rows for every second token only."""
    words = torch.arange(0, VOCAB, 2)
    mid = copy.deepcopy(tiny_pair.mid)
    head = torch.nn.Linear(32, len(words), bias=False, dtype=torch.float64)
    head.weight = torch.nn.Parameter(mid.lm_head.weight[words].clone(), requires_grad=False)
    mid.lm_head = head
    return replace(tiny_pair, mid=mid, vocabulary=DraftVocabulary(words, -9.0), eos_token_ids=())


def test_a_student_of_few_tokens_as_assistant(
    student: Pair, arrivals: list[peers.Arrivals]
) -> None:
    """It drafts from its own tokens, helps, and is left as it was."""
    before = student.mid.lm_head
    helped = 0
    for ids in PROMPTS:
        expected = ours(student, ids, 24, GREEDY)
        for length in LENGTHS:
            done = peers.generate(student, ids, 24, GREEDY, **named(student, "assisted", length))
            assert done.tokens == expected
            counts, at = arrivals.pop().counts[1:], 0
            for count in counts:
                drafted = done.tokens[at : at + count - 1]
                assert all(token % 2 == 0 for token in drafted)
                helped += len(drafted)
                at += count
    assert helped
    assert student.mid.lm_head is before and before.out_features == VOCAB // 2
    drawn = Sampling(temperature=1.0, seed=5)
    first, second = (
        peers.generate(student, PROMPTS[0], 16, drawn, **named(student, "assisted", 4)).tokens
        for _ in range(2)
    )
    assert first == second


def test_the_head_of_a_student_is_the_targets_columns(student: Pair) -> None:
    assistant = peers.assistant_of(student)
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    full, few = assistant.lm_head(hidden), student.mid.lm_head(hidden)
    assert full.shape == (2, 3, VOCAB)
    assert torch.equal(full[..., 0::2], few)
    assert torch.isneginf(full[..., 1::2]).all()


def padded(model: Any, rows: int) -> Any:
    """Return a copy with ``rows`` more rows of the vocabulary, which no token has."""
    wide = tiny_llama(0, vocab=VOCAB + rows)
    state = model.state_dict()
    for name, weight in wide.state_dict().items():
        weight[VOCAB:] = 0.0
        weight[: len(state[name])] = state[name]
    return wide


@pytest.mark.parametrize(("target_rows", "mid_rows"), [(0, 16), (16, 0), (16, 8), (0, 0)])
def test_paddings_of_the_vocabulary_may_differ(
    tiny_pair: Pair, target_rows: int, mid_rows: int
) -> None:
    """As in real families: the tokenizers are one, the sizes are not."""
    target, mid = (padded(tiny_pair.target, rows) for rows in (target_rows, mid_rows))
    pair = replace(tiny_pair, target=target, mid=mid, eos_token_ids=())
    before = mid.config.to_dict()
    for ids in PROMPTS:
        done = peers.generate(pair, ids, 15, GREEDY, **named(pair, "assisted", 4))
        assert done.tokens == ours(pair, ids, 15, GREEDY)
        assert done.counted == 10  # all drafts of the target's own copy are right
    assert mid.config.to_dict() == before


def test_defaults_that_an_assistant_ships_are_not_used(tiny_pair: Pair) -> None:
    """It drafts what the target is asked for, whatever its own generation config says."""
    mid = copy.deepcopy(tiny_pair.target)
    shipped = {"no_repeat_ngram_size": 1, "eos_token_id": list(range(VOCAB)), "min_p": 0.5}
    mid.generation_config.update(**shipped)
    pair = replace(tiny_pair, mid=mid, eos_token_ids=())
    done = peers.generate(pair, PROMPTS[1], 15, GREEDY, **named(pair, "assisted", 4))
    assert done.counted == 10


# Systems ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fit(tmp_path_factory.mktemp("systems"))


def composed(home: Path, data: Path, *extra: str) -> DictConfig:
    return conf(home, "evaluate", f"paths.data={data}", *extra)


def systems(home: Path, data: Path, *extra: str) -> dict[str, System]:
    settings = composed(home, data, *extra)
    artifact = load_scheduler(data / "schedulers" / "tiny")
    bench = Bench(settings, open_pair(settings), open_profile(settings), artifact, random_value(5))
    return bench.build()


def test_systems_of_the_configuration(home: Path, data: Path) -> None:
    found = systems(home, data)
    config = drafting_config(composed(home, data))
    assert list(found) == list(composed(home, data).systems)
    bits = {name: system.bits for name, system in found.items() if system.bits}
    assert bits == {
        "all_small": "00000",
        **dict.fromkeys(("all_mid", "specinfer"), "11111"),
        **dict.fromkeys(("csd", "without_nd", "without_eg", "fixed"), "10101"),
    }
    assert found["fixed"].label == "fixed 10101"
    changed = {n for n, s in found.items() if s.config is not None and s.config != config}
    assert changed == {"csd", "specinfer", "without_nd", "without_eg"}
    assert {n for n, s in found.items() if s.ablation} >= {*changed, "fixed"}
    assert {n for n, s in found.items() if s.variants} == {"fastest", "assisted", "prompt_lookup"}
    assert list(found["assisted"].variants) == ["2", "4", "8"]
    assert list(found["fastest"].variants) == [
        "own runtime, float64",
        "transformers generate, float64",
        "own runtime, float32",
    ]
    assert not found["fastest"].exact


def test_the_targets_own_dtype_is_a_candidate(home: Path, data: Path) -> None:
    found = systems(home, data, "systems.fastest.candidates=[float64]")
    assert list(found["fastest"].variants) == ["own runtime, float64"]


def test_schedules_that_are_always_the_same() -> None:
    schedule = composed_list([1, 0, 1])
    assert [fixed_bits(s, 3) for s in ("small", "mid", "scheduler", "online", schedule)] == [
        "000",
        "111",
        None,
        None,
        "101",
    ]


def composed_list(bits: list[int]) -> Any:
    return DictConfig({"bits": bits}).bits


@pytest.mark.parametrize("most", [3, 4, 5])
def test_a_small_budget_leaves_the_tree_of_fixed_shape_out(
    home: Path, data: Path, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Budgets that the stage itself advises; all else runs."""
    found = systems(home, data, f"drafting.verify_nodes={most}")
    left_out = set(composed(home, data).systems) - set(found)
    assert left_out == ({"specinfer"} if most < 5 else set())
    assert ("note: systems.specinfer: " in capsys.readouterr().out) == (most < 5)


BAD = {
    "system=[scheduler]": "lacks generate, plain",
    "system=[plain,scheduler]": "lacks generate",
    "systems.fixed.schedule=[1,0,2,0,1]": "systems.fixed.schedule",
    "systems.scheduler.schedule=best": "systems.scheduler.schedule=best",
    "systems.fixed.role=king": "systems.fixed.role=king",
    "systems.plain.role=other": "systems.plain",
    "systems.without_eg.drafting.pool=lake": "systems.without_eg: drafting.pool=lake",
    "drafting=csd": "systems.specinfer: drafting.expansion",
    "systems.specinfer.drafting.expansion=[9,9,9,9,9]": "drafting.expansion",
    "systems.assisted.draft_tokens=[]": "systems.assisted.draft_tokens",
    "systems.assisted.draft_tokens=[0]": "systems.assisted.draft_tokens",
    "systems.assisted.draft_tokens=[a]": "systems.assisted.draft_tokens",
    "systems.prompt_lookup.draft_tokens=[2.5]": "systems.prompt_lookup.draft_tokens",
    "systems.assisted.kind=magic": "systems.assisted.kind=magic",
    "systems.generate.kind=assisted": "systems.generate",
    "systems.fastest.candidates=[]": "systems.fastest.candidates",
    "systems.fastest.candidates=[int3]": "int3",
    "evaluate.ablation_tasks=words": "evaluate.ablation_tasks=words",
    "evaluate.ablation_tasks=5": "evaluate.ablation_tasks=5",
    "sampling.temperature=-1": "sampling.temperature=-1",
    "sampling.temperature=nan": "sampling.temperature=nan",
    "sampling.temperature=1e-300": "sampling.temperature=1e-300",
    "sampling.top_p=0": "sampling.top_p=0",
    "sampling.top_p=1.5": "sampling.top_p=1.5",
    "sampling.top_k=-1": "sampling.top_k=-1",
    "sampling.repetition_penalty=0": "sampling.repetition_penalty=0",
    "sampling.repetition_penalty=1e-9": "sampling.repetition_penalty=1e-09",
    "value.numerator=both": "value.numerator=both",
    # These are found while composing.
    "system=[plain,generate,magic]": "magic",
    "systems.fixed.drafting.colour=red": "colour",
    "systems.fixed.guard=5": "systems.fixed.guard=5",
    "systems.fixed.drafting=5": "systems.fixed.drafting",
    "systems.fixed.schedule=10101": "systems.fixed.schedule",
    "systems.assisted.draft_tokens=4": "systems.assisted.draft_tokens",
    "systems.fastest.candidates=same": "systems.fastest.candidates",
    "evaluate.decode=maybe": "evaluate.decode",
    "evaluate.restart=5": "evaluate.restart",
    "evaluate.prompts_per_task=-1": "evaluate.prompts_per_task",
    "evaluate.decode_prompts_per_task=-1": "evaluate.decode_prompts_per_task",
    "evaluate.max_new_tokens=1": "evaluate.max_new_tokens",
    "evaluate.warmup_prompts=0": "evaluate.warmup_prompts",
    "evaluate.warmup_tokens=1": "evaluate.warmup_tokens",
    "evaluate.bootstrap=1": "evaluate.bootstrap",
    "sampling.temperature=hot": "sampling.temperature",
    "sampling.top_k=2.5": "sampling.top_k",
    "sampling.colour=red": "sampling.colour",
    "+systems.own.role=scheduler": "systems.own",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_values_are_one_line_and_leave_nothing(
    home: Path,
    data: Path,
    override: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Through the command line's own function; its status is 2."""
    arguments = overrides(home, f"paths.data={data}", override)
    assert_refused("evaluate", arguments, data, BAD[override], monkeypatch, capfd)


@pytest.mark.parametrize("decode", ["true", "false"])
def test_a_value_network_of_another_depth(home: Path, tmp_path: Path, decode: str) -> None:
    write_fit(tmp_path)
    (tmp_path / "value").rename(tmp_path / "right")
    write_fit(tmp_path / "other", depth=4)
    (tmp_path / "other" / "value").rename(tmp_path / "value")
    with pytest.raises(InputError, match="fitted for depth 4"):
        evaluate.run(composed(home, tmp_path, f"evaluate.decode={decode}"))


# Whole evaluations ------------------------------------------------------------------------------


SHORT = ("evaluate.prompts_per_task=2", "evaluate.decode_prompts_per_task=2")


def evaluated(home: Path, data: Path, folder: Path, *extra: str) -> dict[str, Any]:
    """Run the stage on two prompts of three turns; return ``results.json``, or nothing."""
    evaluate.run(composed(home, data, f"paths.evaluation={folder}", *SHORT, *extra))
    path = folder / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured, a turn each."""
    parts = sorted(folder.glob("run-*/0*.json"))
    return [turn for part in parts for turn in json.loads(part.read_text())["turns"]]


def test_sampled_tokens_are_those_of_plain_sampling(home: Path, data: Path, tmp_path: Path) -> None:
    found = evaluated(home, data, tmp_path, "sampling.temperature=0.8", "sampling.top_p=0.9")
    roles = {s["name"]: s["role"] for s in found["systems"]}
    turns = records(tmp_path)
    assert len(turns) == len(found["turns"]) == 3
    for name, role in roles.items():
        if role in ("peer", "fastest"):
            assert all(run["same"] is None for run in found["runs"][name]), name
        else:
            assert all(run["same"] is True for run in found["runs"][name]), name
            for turn in turns:
                tokens = turn["outputs"][name]["tokens"]
                assert tokens == turn["outputs"]["plain"]["tokens"], name
    assert found["replay"] is None
    assert found["settings"]["sampling"]["temperature"] == 0.8
    printed = (tmp_path / "tables.txt").read_text()
    for title in ("real decoding, 3 turns of up to 12 tokens", "by task", "ablations"):
        assert title in printed
    assert "replay" not in printed and not (tmp_path / "replay.json").exists()


def test_another_depth_leaves_schedules_of_five_steps_out(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fit(tmp_path, depth=3)
    found = evaluated(home, tmp_path, tmp_path / "there", "drafting.depth=3")
    left_out = ["csd", "without_nd", "without_eg", "fixed"]
    printed = capsys.readouterr().out
    for name in left_out:
        assert f"note: systems.{name}.schedule=[1, 0, 1, 0, 1] has 5 steps" in printed
    names = [s["name"] for s in found["systems"]]
    assert names == [n for n in composed(home, tmp_path).systems if n not in left_out]
    for name in names:
        assert all(run["same"] in (True, None) for run in found["runs"][name])
        assert len(found["calls_by_step"].get(name, {"all": [0] * 3})["all"]) == 3
    assert len(found["replay"]["fixed"]) == 8
    assert [row["budget"] for row in found["replay"]["by_calls"]] == [0, 1, 2, 3]


def test_replay_alone(home: Path, data: Path, tmp_path: Path) -> None:
    assert evaluated(home, data, tmp_path, "evaluate.decode=false") == {}
    assert json.loads((tmp_path / "replay.json").read_text())["policies"]
    assert not list(tmp_path.glob("run-*"))
    with pytest.raises(InputError, match=r"evaluate\.decode=false"):
        evaluated(home, data, tmp_path, "evaluate.decode=false", "sampling.repetition_penalty=2")


def test_few_systems_give_few_rows(
    home: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("system=[plain,generate,scheduler]", "evaluate.ablation_tasks=[elsewhere]")
    found = evaluated(home, data, tmp_path, *few)
    assert "evaluate.ablation_tasks=['elsewhere']: none of file" in capsys.readouterr().out
    assert [s["name"] for s in found["systems"]] == ["plain", "generate", "scheduler"]
    assert list(found["runs"]) == ["plain", "generate", "scheduler"]
    assert "online" not in {p["name"] for p in found["replay"]["policies"]}
    printed = (tmp_path / "tables.txt").read_text()
    assert "TreeGraft" in printed and "SpecInfer" not in printed.split("ablations")[0]


def test_answers_of_one_token_are_said_before_anything_is_measured(
    home: Path, data: Path, tmp_path: Path
) -> None:
    settings = composed(home, data, f"paths.evaluation={tmp_path}")
    for name in ("target", "mid"):
        folder = Path(str(settings.pair[name].path))
        ends = tmp_path / name
        ends.mkdir()
        for path in folder.iterdir():
            (ends / path.name).write_bytes(path.read_bytes())
        path = ends / "generation_config.json"
        written = json.loads(path.read_text())
        path.write_text(json.dumps({**written, "eos_token_id": list(range(VOCAB))}))
        settings.pair[name].path = str(ends)
    with pytest.raises(InputError, match="no answer of two tokens or more"):
        evaluate.run(settings)
    assert not list(tmp_path.glob("run-*"))
