"""Labels: objectives, sources and units against loops; settings; files in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import report
from pipeline.features import input_names, scheduler_inputs
from pipeline.hardware import Outcomes, outcomes
from pipeline.label import (
    RATE_ROUNDS,
    Labeller,
    best_ratio,
    covered,
    label_table,
    labeller,
    load_labels,
    run,
)
from pipeline.tries import Tries
from pipeline.value import ValueModel, ahead_names, write_value
from tests.pipeline.conftest import HIDDEN, random_value
from tests.pipeline.small import DEPTH, PAIR, config, texts
from tests.pipeline.test_replay import random_tries
from tests.reference import offline as slow
from treegraft_core import InputError

NAMES = slow.schedules(DEPTH)
Rounds = list[list[tuple[float, float]]]


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(report, "git_sha", lambda: "test")


def some_tries(seed: int = 0) -> Tries:
    return random_tries(np.random.default_rng(seed), DEPTH, [5, 4, 6, 3])


def made(tries: Tries, model: ValueModel | None, *overrides: str) -> Labeller:
    signals = random_value(DEPTH).signals
    return labeller(tries, signals, model, config(Path("none"), "label", *overrides))


def estimates(model: ValueModel, tries: Tries, found: Outcomes) -> Any:
    z = scheduler_inputs(tries, model.signals, found.target_ms, found.mid_ms)
    return model.outcomes(z)


@pytest.mark.parametrize("numerator", ["committed", "accepted"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("source", ["value", "logged"])
@pytest.mark.parametrize("objective", ["rate", "gain"])
def test_labels_are_the_best_futures_by_hand(
    objective: str, source: str, relative: bool, numerator: str
) -> None:
    """Estimated for y if the source is the value network; logged for hindsight, always."""
    tries, model = some_tries(), random_value(DEPTH)
    ours = made(
        tries,
        model,
        f"label.objective={objective}",
        f"label.source={source}",
        f"label.relative={str(relative).lower()}",
        f"value.numerator={numerator}",
        "hardware=logged",
    )
    at = np.arange(len(tries))
    _, z, columns = ours.block(at, np.random.default_rng(0))
    found = outcomes(tries)
    bonus = 1 if numerator == "committed" else 0
    seen = found.accepted + bonus, found.ms
    told = tuple(estimates(model, tries, found))
    told = (told[0] - (1 - bonus), told[1])
    logged: Rounds = [list(zip(*(v[s].tolist() for v in seen), strict=True)) for s in at]
    guesses: Rounds = [list(zip(*(v[s, 0].tolist() for v in told), strict=True)) for s in at]
    if source == "logged":
        rate, round_ms = slow.best_ratio(logged, logged, RATE_ROUNDS)
    else:  # λ goes by A + 1 of the network either way; only differences by 1 for all
        plain = [[(tokens + (1 - bonus), ms) for tokens, ms in row] for row in guesses]
        rate, round_ms = slow.best_ratio(logged, plain, RATE_ROUNDS)
    assert (ours.rate[0], ours.round_ms[0]) == pytest.approx((rate, round_ms))

    def worth(tokens: float, ms: float) -> float:
        each = 1e3 * tokens / ms if objective == "rate" else 1e3 * (tokens - rate * ms) / round_ms
        return each / (1e3 * rate) if relative else each

    for state in at:
        of_logged = [worth(*v) for v in logged[state]]
        hindsight = slow.advantages(DEPTH, lambda _, v=of_logged: dict(zip(NAMES, v, strict=True)))
        assert columns["y_hindsight"][state].tolist() == pytest.approx(hindsight)
        if source == "logged":
            assert columns["y"][state].tolist() == columns["y_hindsight"][state].tolist()
            continue

        def seen_from(prefix: str, state: int = state) -> dict[str, float]:
            pairs = zip(*(v[state, len(prefix)].tolist() for v in told), strict=True)
            return {n: worth(*v) for n, v in zip(NAMES, pairs, strict=True)}

        assert columns["y"][state].tolist() == pytest.approx(slow.advantages(DEPTH, seen_from))
    assert columns["rate"].tolist() == pytest.approx([1e3 * rate] * len(tries))
    np.testing.assert_array_equal(z, scheduler_inputs(tries, ours.signals))


# --- the long-run rate ----------------------------------------------------------------------------

rounds = st.tuples(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6), st.booleans())


@settings(max_examples=80, deadline=None)
@given(rounds)
def test_the_long_run_rate_is_that_of_the_loop_and_no_fixed_choice_beats_it(case: Any) -> None:
    seed, states, choices, accepted = case
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0 if accepted else 1, 6, (states, choices)).astype(float)
    ms = rng.uniform(1, 60, (states, choices))
    guess = tokens + rng.normal(size=tokens.shape), ms * rng.uniform(0.5, 2, ms.shape)
    for seen, spent in ((tokens, ms), guess):
        rate, round_ms = best_ratio(tokens, ms, seen, spent)
        counts, told = (
            [list(zip(*(v[s].tolist() for v in pair), strict=True)) for s in range(states)]
            for pair in ((tokens, ms), (seen, spent))
        )
        assert (rate, round_ms) == pytest.approx(slow.best_ratio(counts, told, RATE_ROUNDS))
        fixed = [covered(tokens[:, n], ms[:, n])[0] for n in range(choices)]
        assert rate >= max(fixed) * (1 - 1e-12)


def test_a_long_round_counts_for_the_positions_that_it_covers() -> None:
    """Half of a text goes four tokens a round, half one: the rate is that of decoding it."""
    tokens, ms = np.array([4.0] * 40 + [1.0] * 40), np.array([8.0] * 40 + [5.0] * 40)
    rate, round_ms = covered(tokens, ms)
    assert rate == pytest.approx(80 / (10 * 8 + 40 * 5))
    assert round_ms == pytest.approx((10 * 8 + 40 * 5) / 50)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_each_label_is_of_the_machine_that_it_names(share: float) -> None:
    tries = some_tries()
    machines = ("hardware=range", "hardware.profiles=4", f"hardware.logged_share={share}")
    options = ("label=hindsight", *machines, "label.settings_per_state=3")
    ours = made(tries, None, *options)
    table = label_table(ours, config(Path("none"), "label", *options))
    assert len(table) == 3 * len(tries) * 7
    assert set(table["setting"]) <= set(range(5)) and table["setting"].nunique() > 3
    assert (table["setting"] == 0).any() == (share > 0)
    rates = 1e3 * ours.rate[table["setting"]]
    np.testing.assert_allclose(table["rate"], rates)
    for n, mine in table.groupby("setting"):
        profile = ours.drawn[int(n)].profile
        found = outcomes(tries, profile)
        at = [tries.states["state_id"].tolist().index(s) for s in mine["state_id"]]
        np.testing.assert_array_equal(mine["target_ms"], found.target_ms[at])
        np.testing.assert_array_equal(mine["mid_ms"], found.mid_ms[at])
        first = mine[mine["step"] == 1].iloc[0]
        state = tries.states["state_id"].tolist().index(first["state_id"])
        rate, round_ms = ours.rate[int(n)], ours.round_ms[int(n)]
        gains = (found.accepted[state] + 1 - rate * found.ms[state]) / (rate * round_ms)
        expected = gains[4:].max() - gains[:4].max()
        assert first["y"] == pytest.approx(expected)


def test_hindsight_needs_no_value_network_and_bad_choices_are_named() -> None:
    tries = some_tries()
    table = label_table(made(tries, None, "label=hindsight"), config(Path("x"), "label"))
    assert (table["y"] == table["y_hindsight"]).all() and table["y"].std() > 0
    for key, value in (("objective", "speed"), ("source", "dreams")):
        with pytest.raises(InputError, match=rf"label\.{key}={value}: choose one of"):
            made(tries, None, f"label.{key}={value}")


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tries]:
    folder = tmp_path_factory.mktemp("label")
    tries = texts(folder, 6, 5)
    model = random_value(DEPTH)
    of_pair = ValueModel(model.modules, DEPTH, model.signals, (PAIR,), model.low, model.high)
    names = [*input_names(DEPTH, model.signals), *ahead_names(DEPTH)]
    write_value(folder / "value" / PAIR, of_pair, HIDDEN, names, {})
    return folder, tries


def test_the_file_is_the_same_in_blocks_of_any_size(data: tuple[Path, Tries]) -> None:
    """Row groups as many as blocks, so that memory does not grow with the states."""
    folder, tries = data
    path, frames = folder / "labels" / PAIR / "labels.parquet", []
    for size in (7, 1000):
        run(config(folder, "label", f"label.block_states={size}"))
        assert pq.ParquetFile(path).num_row_groups == -(-len(tries) // size)
        frame, header = load_labels(path.parent)
        frames.append(frame.astype({n: str for n in ("pair", "task", "prompt_id", "state_id")}))
    assert frames[0].shape[0] == len(tries) * 7
    numbers = frames[0].select_dtypes("number").columns
    np.testing.assert_allclose(frames[0][numbers], frames[1][numbers], rtol=1e-5, atol=1e-6)
    texts_ = [n for n in frames[0] if n not in numbers]
    assert (frames[0][texts_].astype(str) == frames[1][texts_].astype(str)).all().all()
    assert frames[0]["prefix"].astype(str).tolist()[:7] == slow.prefixes(DEPTH)
    assert header["unit"] == "share of the long-run rate"


def test_labels_in_memory_are_those_on_disk(data: tuple[Path, Tries]) -> None:
    folder, tries = data
    machines = ("hardware=range", "hardware.profiles=3", "label=hindsight", "label.block_states=9")
    conf = config(folder, "label", *machines)
    run(conf)
    disk, _ = load_labels(folder / "labels" / PAIR)
    memory = label_table(labeller(tries, random_value(DEPTH).signals, None, conf), conf)
    assert disk.columns.tolist() == memory.columns.tolist()
    for name in disk.columns:
        ours, theirs = disk[name], memory[name]
        if ours.dtype.kind == "f":
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        else:
            assert ours.astype(str).tolist() == theirs.astype(str).tolist()


def test_a_damaged_label_file_is_one_line(data: tuple[Path, Tries], tmp_path: Path) -> None:
    folder, _ = data
    run(config(folder, "label"))
    table = pq.read_table(folder / "labels" / PAIR / "labels.parquet")
    y = table.column_names.index("y")
    bad = {
        "finite": table.set_column(y, "y", [np.full(len(table), np.nan)]),
        "lacks": table.drop_columns(["rate"]),
        "metadata": table.replace_schema_metadata({}),
        "no rows": table.slice(0, 0),
    }
    for message, damaged in bad.items():
        pq.write_table(damaged, tmp_path / "labels.parquet")
        with pytest.raises(InputError, match=rf"damaged \(.*{message}.*stage=label again"):
            load_labels(tmp_path)
