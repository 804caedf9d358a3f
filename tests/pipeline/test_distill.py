"""The classifier: losses and weights by hand, rollouts against loops, what rollouts bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from pipeline import distill, report, training
from pipeline.distill import (
    ClassifierRegressor,
    Rollouts,
    Trials,
    build,
    continuation_advantage,
    decisions,
    first_rates,
    fit_labels,
    improve,
    linear_layers,
)
from pipeline.episodes import EXPLORED, FIRST_OFFSETS
from pipeline.features import input_names, prompt_keys, scheduler_inputs, validation_states
from pipeline.hardware import Setting, outcomes, outcomes_in
from pipeline.hardware import settings as machine_settings
from pipeline.replay import follow, replay, texts_of
from pipeline.tries import Tries
from tests.pipeline.small import CHOSEN, DEPTH, PAIR, Sending, a_stage, config, texts
from tests.pipeline.synthetic import RULE_SIGNAL, THRESHOLD
from tests.pipeline.test_replay import parts, random_tries, slow_schedule
from tests.reference import offline as slow
from treegraft_core import SIGNALS

NAMES = input_names(DEPTH, CHOSEN)
PREFIXES = slow.prefixes(DEPTH)


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(report, "git_sha", lambda: "test")


@pytest.fixture(scope="module")
def tries(tmp_path_factory: pytest.TempPathFactory) -> Tries:
    return texts(tmp_path_factory.mktemp("distill"), 12, 9)


def conf_of(folder: Path, *overrides: str) -> DictConfig:
    return config(folder, "distill", *overrides)


def classifier(tries: Tries, conf: DictConfig, seed: int = 0) -> ClassifierRegressor:
    """Return a fresh one with statistics of the states, whose decisions are mixed."""
    module = build(len(NAMES), [16, 8], conf.distill, seed)
    z = scheduler_inputs(tries, CHOSEN).reshape(-1, len(NAMES))
    module.set_stats(z, np.zeros((len(z), 1)))
    margins = module.predict(z)
    with torch.no_grad():
        linear_layers(module)[-1].bias -= float(np.median(margins))
    return module


# --- what a mid call is worth ---------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_advantages_of_going_on_equal_the_recursion(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    gain, wanted = rng.normal(size=(3, 1 << depth)), rng.random((3, (1 << depth) - 1)) < 0.5
    ours = continuation_advantage(gain, wanted)
    for state in range(3):
        values = dict(zip(slow.schedules(depth), gain[state].tolist(), strict=True))
        calls = dict(zip(slow.prefixes(depth), wanted[state].tolist(), strict=True))
        assert ours[state].tolist() == pytest.approx(slow.continuation(depth, values, calls))


def test_rows_of_a_rollout_are_what_decoding_each_text_gives(tries: Tries, tmp_path: Path) -> None:
    """Labels, weights and rates, one text and one prefix at a time."""
    module = classifier(tries, conf_of(tmp_path, "distill.prompt_noise=0"))
    rollouts = Rollouts(tries, [Setting(PAIR, None)], 1.0, CHOSEN, module)
    (rate,), (tokens,) = first_rates(tries, [Setting(PAIR, None)])
    rollouts.start(np.random.default_rng(0))
    z = scheduler_inputs(tries, CHOSEN)
    wanted = module.predict(z.reshape(-1, z.shape[-1])).reshape(z.shape[:2]) > 0
    assert 0.1 < wanted.mean() < 0.9
    leaf = np.array([slow_schedule(row, DEPTH) for row in wanted])
    accepted, ms = tries.accepted.tolist(), (tries.draft_ms + tries.verify_ms).tolist()
    block = rollouts.make(np.arange(len(tries)), np.random.default_rng(0))
    y, weight = block.y.reshape(len(tries), -1), block.weight
    assert weight is not None
    np.testing.assert_array_equal(block.x, z.reshape(-1, z.shape[-1]))
    visited, rounds, all_tokens, all_ms = [], 0, 0, 0.0
    for first, part in parts(leaf, rollouts.texts.length.tolist()):
        steps = [min(accepted[first + i][n] + 1, len(part) - i) for i, n in enumerate(part)]
        visited += slow.visits(steps, FIRST_OFFSETS)
        at = 0
        while at < len(part):
            rounds, all_tokens = rounds + 1, all_tokens + steps[at]
            all_ms += ms[first + at][part[at]]
            at += steps[at]
    mine = 0.7 * rate + 0.3 * all_tokens / all_ms
    my_tokens = 0.7 * tokens + 0.3 * all_tokens / rounds
    assert rounds >= distill.FEWEST_ROUNDS
    assert (rollouts.rate[0], rollouts.tokens[0]) == pytest.approx((mine, my_tokens))
    for first, part in parts(leaf, rollouts.texts.length.tolist()):
        span = slice(first, first + len(part))
        gains = slow.gains(accepted[span], ms[span], part, mine, my_tokens)
        for i, row in enumerate(gains):
            values = dict(zip(slow.schedules(DEPTH), row, strict=True))
            calls = dict(zip(PREFIXES, wanted[first + i].tolist(), strict=True))
            expected = slow.continuation(DEPTH, values, calls)
            assert y[first + i].tolist() == pytest.approx(expected, abs=1e-9)
    shares = np.array(visited) + EXPLORED
    expected = np.repeat(shares / shares.mean(), len(PREFIXES))
    np.testing.assert_allclose(weight, expected)


def test_noise_is_on_the_prompt_s_length_alone_and_one_for_a_text(
    tries: Tries, tmp_path: Path
) -> None:
    """In what is fitted, not in what decides."""
    module = classifier(tries, conf_of(tmp_path, "distill.prompt_noise=0.5"))
    rollouts = Rollouts(tries, [Setting(PAIR, None)], 1.0, CHOSEN, module)
    rollouts.start(np.random.default_rng(0))
    z = scheduler_inputs(tries, CHOSEN)
    block = rollouts.make(np.arange(len(tries)), np.random.default_rng(1))
    moved = block.x.reshape(z.shape) - z
    assert not moved[..., 1:].any()
    first, length = rollouts.texts.first, rollouts.texts.length
    one = np.repeat(moved[first, 0, 0], length)
    np.testing.assert_allclose(moved[..., 0], np.broadcast_to(one[:, None], moved.shape[:2]))
    each = moved[first, 0, 0] / float(module.x_std[0])
    assert len(set(each.tolist())) == len(first) and 0.2 < each.std() < 0.9
    margins = module.predict(z.reshape(-1, z.shape[-1])).reshape(z.shape[:2])
    assert (rollouts.wanted == (margins > 0)).all()


def test_first_rates_are_those_of_the_best_fixed_schedule() -> None:
    tries = random_tries(np.random.default_rng(4), 2, [5, 6])
    (rate,), (tokens,) = first_rates(tries, [Setting("p", None)])
    found = []
    for leaf in range(4):
        rounds = [
            (int(a) + 1, float(d + v))
            for a, d, v in zip(
                tries.accepted[:, leaf], tries.draft_ms[:, leaf], tries.verify_ms[:, leaf],
                strict=True,
            )
        ]  # fmt: skip
        found.append((*slow.covered([(float(t), ms) for t, ms in rounds]), rounds))
    best, _, rounds = max(found)
    assert rate == pytest.approx(best)
    assert tokens == pytest.approx(len(rounds) / sum(1 / t for t, _ in rounds))


@pytest.mark.parametrize("profiles", [0, 3])
def test_slowness_is_the_replayed_time_over_the_best_fixed_schedule_s(
    tries: Tries, tmp_path: Path, profiles: int
) -> None:
    conf = conf_of(tmp_path, "hardware=range", f"hardware.profiles={profiles}")
    drawn = machine_settings(tries, conf.hardware, 0)
    module = classifier(tries, conf)
    share = 0.0 if profiles else 1.0
    trials = Trials(Rollouts(tries, drawn, share, CHOSEN, module))
    due = spent = 0.0
    for turn in range(distill.VALIDATION_DRAWS if profiles else 1):
        number = trials.rollouts.settings(np.random.default_rng(turn))
        found = outcomes_in(tries, drawn, number)
        leaf = follow(decisions(module, tries, CHOSEN, found), DEPTH)
        run = replay(texts_of(tries), found, leaf)
        first = texts_of(tries).first
        assert (number == np.repeat(number[first], texts_of(tries).length)).all()
        cost = run.with_cost(0.0).ms + DEPTH * found.decision_ms[first] * run.rounds
        spent += float((trials.first[number[first]] * cost).sum())
        due += float(run.tokens.sum())
    assert trials.slowness() == pytest.approx(spent / due)


# --- rollouts -------------------------------------------------------------------------------------


def replayed_rate(module: ClassifierRegressor, tries: Tries, at: Any) -> float:
    some = tries.take(at)
    leaf = follow(decisions(module, some, CHOSEN, outcomes(some)), DEPTH)
    return replay(texts_of(some), outcomes(some), leaf).rate("committed")


@pytest.mark.parametrize("loss", ["regression", "sign"])
def test_rollouts_find_the_planted_rule_from_a_bad_start(
    tries: Tries, tmp_path: Path, loss: str
) -> None:
    """From calling nearly always to nearly the rule, on prompts that were not fitted on."""
    more = ("distill.rollout_epochs=10", "distill.learning_rate=0.01", f"distill.loss={loss}")
    conf = conf_of(tmp_path, *more)
    module = classifier(tries, conf)
    with torch.no_grad():
        linear_layers(module)[-1].bias += 3.0
    held = validation_states(prompt_keys(tries), conf.distill, 0, "distill")
    before = replayed_rate(module, tries, held)
    ignored = np.array([name in ("target_ms", "bit_1") for name in NAMES])
    module.ignore(ignored)
    figures = improve(module, tries, CHOSEN, conf, a_stage(conf, tmp_path))
    after = replayed_rate(module, tries, held)
    assert figures["rollouts_kept"] and figures["texts_whole"]
    assert after > 1.05 * before
    speeds = figures["speed_before_rollouts"], figures["speed_after_rollouts"]
    assert speeds[1] / speeds[0] == pytest.approx(after / before, rel=0.02)
    some = tries.take(held)
    rule = follow(some.signals[..., SIGNALS.index(RULE_SIGNAL)] > THRESHOLD, DEPTH)
    best = replay(texts_of(some), outcomes(some), rule).rate("committed")
    assert after > 0.9 * best
    weight = linear_layers(module)[0].weight.detach().numpy()
    assert not weight[:, ignored].any() and weight[:, ~ignored].any(0).all()
    assert float(module.y_mean[0]) == 0.0


def test_worse_rollouts_leave_the_classifier_as_it_was(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = conf_of(tmp_path)
    module = classifier(tries, conf)
    z = scheduler_inputs(tries, CHOSEN).reshape(-1, len(NAMES))
    before = module.predict(z)

    def spoil(module: Any, *_: Any) -> dict[str, float]:
        assert module.trials is not None
        with torch.no_grad():
            for p in module.parameters():
                p.normal_()
        return {"epochs": 2, "best_val_loss": 1e9}

    monkeypatch.setattr(distill, "fit", spoil)
    figures = improve(module, tries, CHOSEN, conf, a_stage(conf, tmp_path))
    assert figures["rollouts_kept"] is False and module.trials is None
    assert figures["speed_after_rollouts"] == figures["speed_before_rollouts"]
    np.testing.assert_allclose(module.predict(z), before, rtol=1e-5, atol=1e-7)


def test_centring_changes_no_margin(tries: Tries, tmp_path: Path) -> None:
    module = classifier(tries, conf_of(tmp_path))
    module.y_mean.fill_(-1.26)
    module.y_std.fill_(2.97)
    with torch.no_grad():  # as many margins below 0 as above
        linear_layers(module)[-1].bias += 1.26 / 2.97
    z = scheduler_inputs(tries, CHOSEN).reshape(-1, len(NAMES))
    before, out = module.predict(z), module.net(module.standardise(z, "x")).detach()
    module.centre()
    after = module.predict(z)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    clear = np.abs(before) > 1e-5
    assert ((after > 0) == (before > 0))[clear].all() and (before > 0).any()
    assert float(module.y_mean[0]) == 0.0
    assert not torch.allclose(module.net(module.standardise(z, "x")), out)


# --- losses and weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["regression", "sign"])
def test_losses_by_hand(tries: Tries, tmp_path: Path, loss: str, weighted: bool) -> None:
    module = classifier(tries, conf_of(tmp_path, f"distill.loss={loss}"))
    module.y_mean.fill_(0.7)
    module.y_std.fill_(2.0)
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(11, len(NAMES))), dtype=torch.float32)
    y, weight = rng.normal(size=11), rng.uniform(0, 3, 11)
    out = module.net(x)[:, 0].detach().double().numpy()
    total = 0.0
    for label, net, w in zip(y, out, weight, strict=True):
        if loss == "regression":
            error = (net - (label - 0.7) / 2) ** 2
        else:
            margin = (2 * net + 0.7) / 2
            error = np.log1p(np.exp(-margin if label > 0 else margin)) * abs(label) / 2
        total += error * (w if weighted else 1)
    standard = module.standardise(y[:, None], "y")
    given = torch.tensor(weight, dtype=torch.float32) if weighted else None
    assert float(module.loss(x, standard, given)) == pytest.approx(total / 11, rel=1e-5)


def label_frame(prompts: int) -> pd.DataFrame:
    """Return labels that no input tells apart: four of +1 and one of −3 for each prompt."""
    rows = [
        {"task": "t", "prompt_id": f"p{p}", **dict.fromkeys(NAMES, 1.5), "y": y, "y_hindsight": y}
        for p in range(prompts)
        for y in (1.0, 1.0, 1.0, 1.0, -3.0)
    ]
    return pd.DataFrame(rows)


EXPECTED = {
    ("regression", "none"): 0.2,  # the mean
    ("regression", "size"): (4 * 1 - 3 * 3) / (4 + 3),  # the mean weighted by |y|
    ("sign", "none"): 1.6 * np.log(4 / 3),  # the log odds of the sizes, in deviations
    ("sign", "size"): 1.6 * np.log(4 / 9),  # of their squares
}


@pytest.mark.parametrize(("loss", "weight"), EXPECTED)
def test_what_cannot_be_told_apart_gets_the_optimum_of_the_loss(
    tmp_path: Path, loss: str, weight: str
) -> None:
    """The four choices disagree about the very same labels, as their formulas say."""
    conf = conf_of(
        tmp_path,
        f"distill.loss={loss}",
        f"distill.weight={weight}",
        "distill.learning_rate=0.02",
        "distill.weight_decay=0",
        "distill.max_epochs=60",
        "distill.patience=60",
        "distill.batch_size=200",
    )
    labels = label_frame(50)
    module, metrics = fit_labels(labels, NAMES, conf, a_stage(conf, tmp_path))
    margin = module.predict(labels[list(NAMES)].to_numpy(np.float64)[:1])[0, 0]
    assert margin == pytest.approx(EXPECTED[loss, weight], abs=0.05)
    assert metrics["call_share"] == float(margin > 0) and metrics["label_call_share"] == 0.8


def rule_frame(rng: np.random.Generator, rows: int) -> pd.DataFrame:
    """Return labels that follow the rule's signal; T_tgt and T_mid vary, their ratio too."""
    frame = pd.DataFrame(rng.normal(size=(rows, len(NAMES))), columns=list(NAMES))
    frame["bit_3"] = 0.0
    frame["y"] = np.where(frame[RULE_SIGNAL] > 0.3, 1.0, -1.0) + 0.1 * frame["target_ms"]
    frame["y_hindsight"] = frame["y"]
    frame["task"] = "t"
    frame["prompt_id"] = [f"p{i % 10}" for i in range(rows)]
    return frame


@pytest.mark.parametrize("scale_free", [True, False])
def test_only_the_ratio_of_the_times_counts_if_decisions_are_scale_free(
    tmp_path: Path, scale_free: bool
) -> None:
    conf = conf_of(tmp_path, f"distill.scale_free={str(scale_free).lower()}")
    frame = rule_frame(np.random.default_rng(0), 600)
    module, _ = fit_labels(frame, NAMES, conf, a_stage(conf, tmp_path))
    weight = linear_layers(module)[0].weight.detach().numpy()
    free = {name for i, name in enumerate(NAMES) if not weight[:, i].any()}
    assert free == {"bit_3"} | ({"target_ms", "mid_ms"} if scale_free else set())
    z = frame[list(NAMES)].to_numpy(np.float64)
    twice = z.copy()
    twice[:, [1, 2]] *= 2
    assert (module.predict(twice) == module.predict(z)).all() == scale_free


def test_label_noise_is_on_the_labels_to_fit_alone(tmp_path: Path) -> None:
    frame, fast = rule_frame(np.random.default_rng(0), 800), "distill.learning_rate=0.01"
    clean, _, noisy = (
        fit_labels(frame, NAMES, conf, a_stage(conf, tmp_path))
        for conf in (
            conf_of(tmp_path, fast, f"distill.label_noise={noise}") for noise in (0.0, 0.0, 5.0)
        )
    )
    again = _
    for ours, theirs in zip(clean[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert clean[1]["label_call_share"] == noisy[1]["label_call_share"]
    assert clean[1]["r2"] > 0.5 > noisy[1]["r2"]
    spread = float(noisy[0].y_std[0] / clean[0].y_std[0])
    assert spread == pytest.approx(np.sqrt(1 + 25), rel=0.1)


# --- several processes ----------------------------------------------------------------------------


def test_both_fits_can_be_sent_to_other_processes(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels and rollouts, as ddp_spawn sends them."""
    monkeypatch.setattr(training, "Trainer", Sending)
    monkeypatch.setattr(Sending, "sent", [])
    few = ("distill.max_epochs=1", "distill.rollout_epochs=1", "distill.weight=size")
    conf = conf_of(tmp_path, *few)
    frame = rule_frame(np.random.default_rng(0), 100)
    module, _ = fit_labels(frame, NAMES, conf, a_stage(conf, tmp_path))
    improve(module, tries, CHOSEN, conf, a_stage(conf, tmp_path))
    assert len(Sending.sent) == 2 and Sending.sent[1] > tries.signals.nbytes // 2


def test_two_processes_improve_one_classifier(tries: Tries, tmp_path: Path) -> None:
    two = ("trainer.devices=2", "trainer.strategy=ddp_fork", "distill.rollout_epochs=6")
    conf = conf_of(tmp_path, *two, "distill.learning_rate=0.01")
    module = classifier(tries, conf)
    with torch.no_grad():
        linear_layers(module)[-1].bias += 3.0
    figures = improve(module, tries, CHOSEN, conf, a_stage(conf, tmp_path))
    assert figures["rollout_epochs"] == 6 and figures["rollouts_kept"]
    trials = Trials(Rollouts(
        tries.take(validation_states(prompt_keys(tries), conf.distill, 0, "distill")),
        [Setting(PAIR, None)], 1.0, CHOSEN, module,
    ))  # fmt: skip
    assert 1 / trials.slowness() == pytest.approx(figures["speed_after_rollouts"], rel=1e-5)


def test_sampled_states_weigh_by_what_a_round_covers(tmp_path: Path) -> None:
    tries = random_tries(np.random.default_rng(1), DEPTH, [30, 40], sampled=True)
    module = classifier(replace(tries), conf_of(tmp_path))
    rollouts = Rollouts(tries, [Setting("p", None)], 1.0, CHOSEN, module)
    rollouts.start(np.random.default_rng(0))
    leaf = follow(rollouts.wanted, DEPTH)
    shares = np.array([1 / (tries.accepted[s, n] + 1) for s, n in enumerate(leaf)])
    block = rollouts.make(np.arange(5), np.random.default_rng(0))
    assert block.weight is not None
    np.testing.assert_allclose(block.weight[::7], (shares / shares.mean())[:5])
    trials, found = Trials(rollouts), outcomes(tries)
    spent = sum(float(found.ms[s, n]) * shares[s] for s, n in enumerate(leaf))
    assert trials.slowness() == pytest.approx(trials.first[0] * spent / len(tries))
