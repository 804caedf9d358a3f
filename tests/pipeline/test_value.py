"""The value network: heads, units, distribution, ensemble, files; one process or two."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from pipeline import report, training
from pipeline.features import input_names, prompt_keys, scheduler_inputs, validation_states
from pipeline.hardware import outcomes, settings
from pipeline.training import Block
from pipeline.tries import Tries
from pipeline.value import (
    HEADS,
    VALUE_FORMAT,
    ValueData,
    ValueModel,
    ahead_names,
    build,
    calibration,
    fit_value,
    load_value,
    quality,
    run,
    value_rows,
    value_targets,
    write_value,
)
from tests.pipeline.conftest import random_value
from tests.pipeline.small import (
    CHOSEN,
    DEPTH,
    PAIR,
    Sending,
    a_stage,
    config,
    texts,
    write_selection,
)
from tests.pipeline.test_replay import random_tries
from tests.reference import offline as slow
from treegraft_core import InputError
from treegraft_core.tree import FloatArray, IntArray


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(report, "git_sha", lambda: "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("value")


@pytest.fixture(scope="module")
def tries(folder: Path) -> Tries:
    return texts(folder, 10, 6)


def data_of(tries: Tries, conf: DictConfig) -> ValueData:
    held = validation_states(prompt_keys(tries), conf.value, 0, "value")
    drawn = settings(tries, conf.hardware, 0)
    return ValueData(tries, CHOSEN, drawn, float(conf.hardware.logged_share), held)


def random_model(classes: int, members: int = 1, seed: int = 0) -> ValueModel:
    """Return networks with random weights and statistics, which rarely reach the limits."""
    rng = np.random.default_rng(seed)
    inputs = len(input_names(DEPTH, CHOSEN)) + DEPTH
    modules = []
    for member in range(members):
        module = build(inputs, [8, 8], None, seed + member, classes).eval()
        module.x_mean.copy_(torch.tensor(rng.normal(size=inputs)))
        module.x_std.copy_(torch.tensor(rng.uniform(5, 20, size=inputs)))
        module.y_mean.copy_(torch.tensor([2.5, 3.0, 1.5]))
        module.y_std.copy_(torch.tensor([2.0, 2.0, 1.0]))
        modules.append(module)
    low, high = np.array([1.0, 2.5, 1.2]), np.array([5.0, 6.0, 2.5])
    return ValueModel(tuple(modules), DEPTH, CHOSEN, (PAIR,), low, high)


def some_inputs(tries: Tries) -> FloatArray:
    found = outcomes(tries)
    return value_rows(scheduler_inputs(tries, CHOSEN, found.target_ms, found.mid_ms), DEPTH)


def write(path: Path, model: ValueModel) -> None:
    names = (*input_names(DEPTH, CHOSEN), *ahead_names(DEPTH))
    write_value(path, model, [8, 8], names, {})


# --- what it predicts -----------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 5])
@pytest.mark.parametrize("members", [1, 3])
def test_heads_are_those_of_the_files_by_hand(tmp_path: Path, classes: int, members: int) -> None:
    """The mean of the ensemble, kept inside the limits, in ms."""
    model = random_model(classes, members)
    tries = random_tries(np.random.default_rng(0), DEPTH, [2, 3])
    write(tmp_path, model)
    tensors = {k: v.double().numpy() for k, v in load_file(tmp_path / "value.safetensors").items()}
    stats = json.loads((tmp_path / "value.json").read_text())["stats"]
    wide = {name: {"min": -1e9, "max": 1e9} for name in HEADS}
    x = some_inputs(tries)[::7]
    heads, inside = model.heads(x), 0
    for row, ours in zip(x, heads, strict=True):
        mid_ms, target_ms = row[2], row[1]
        of = [slow.value_heads(tensors, wide, row.tolist(), 1, 1, m) for m in range(members)]
        mean = [float(np.mean([each[i] for each in of])) for i in range(3)]
        for i, (name, unit) in enumerate(zip(HEADS, (1.0, mid_ms, target_ms), strict=True)):
            kept = min(max(mean[i], stats[name]["min"]), stats[name]["max"])
            inside += kept == mean[i]
            assert ours[i] == pytest.approx(unit * kept, rel=1e-5)
    assert inside > len(x)


def test_times_are_in_units_of_the_machine() -> None:
    """Where a network reads no T_mid and T_tgt, its times grow as they do."""
    model = random_model(0)
    names = input_names(DEPTH, CHOSEN)
    columns = [names.index(n) for n in ("target_ms", "mid_ms", "log_target_mid_ratio")]
    with torch.no_grad():
        model.modules[0].net.trunk[0].weight[:, columns] = 0.0
    tries = random_tries(np.random.default_rng(0), DEPTH, [4])
    slow_mid, fast = np.full(4, 30.0), np.full(4, 10.0)
    first, second, third = (
        model.heads(value_rows(scheduler_inputs(tries, CHOSEN, target, mid), DEPTH))
        for target, mid in ((fast, fast), (fast, slow_mid), (slow_mid, fast))
    )
    np.testing.assert_allclose(second, first * [1, 3, 1], rtol=1e-9)
    np.testing.assert_allclose(third, first * [1, 1, 3], rtol=1e-9)
    tokens, ms = model.outcomes(scheduler_inputs(tries, CHOSEN, fast, slow_mid))
    assert tokens.shape == ms.shape == (4, DEPTH, 1 << DEPTH)
    np.testing.assert_array_equal(tokens.ravel(), second[:, 0])
    np.testing.assert_allclose(ms.ravel(), second[:, 1] + second[:, 2])


def test_targets_are_tokens_and_shares_of_t_mid_and_t_tgt() -> None:
    tries = random_tries(np.random.default_rng(1), 2, [3])
    found = replace(outcomes(tries), mid_ms=np.array([2.0, 4.0, 8.0]))
    y = value_targets(found, 2).reshape(3, 2, 4, 3)
    for state in range(3):
        for leaf in range(4):
            expected = [
                tries.accepted[state, leaf] + 1,
                tries.draft_ms[state, leaf] / found.mid_ms[state],
                tries.verify_ms[state, leaf] / tries.states["target_ms"].iloc[state],
            ]
            assert y[state, 0, leaf].tolist() == y[state, 1, leaf].tolist() == expected


def test_the_distribution_sums_to_one_and_the_head_is_its_mean() -> None:
    model = random_model(6)
    module = model.modules[0]
    x = some_inputs(random_tries(np.random.default_rng(0), DEPTH, [4]))
    shares = module.distribution(x)
    assert shares.shape == (len(x), 6) and (shares > 0).all()
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    mean = sum((a + 1) * shares[:, a] for a in range(6))
    np.testing.assert_allclose(module.predict(x)[:, 0], mean, atol=1e-5)
    logits = module.net(module.standardise(x, "x"))[:, :6].double()
    assert shares[3].tolist() == pytest.approx(slow.softmax(logits[3].tolist()), abs=1e-6)


def test_the_loss_with_classes_is_cross_entropy_beside_squared_times() -> None:
    module = random_model(4).modules[0]
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(9, len(module.x_mean))), dtype=torch.float32)
    y = np.stack([rng.integers(1, 7, 9), rng.uniform(1, 5, 9), rng.uniform(1, 2, 9)], axis=1)
    standard = module.standardise(y, "y")
    out = module.net(x).detach().double().numpy()
    logs = [-np.log(slow.softmax(out[i, :4])[min(int(y[i, 0]) - 1, 3)]) for i in range(9)]
    squares = (out[:, 4:] - (y[:, 1:] - [3.0, 1.5]) / [2.0, 1.0]) ** 2
    expected = (np.mean(logs) + 2 * squares.mean()) / 3
    assert float(module.loss(x, standard)) == pytest.approx(expected, rel=1e-5)


def test_calibration_is_that_of_equal_parts_in_order() -> None:
    rng = np.random.default_rng(0)
    predicted, truth = rng.normal(size=101), rng.normal(size=101)
    pairs = sorted(zip(predicted.tolist(), truth.tolist(), strict=True))
    sizes = [26, 25, 25, 25]
    expected, at = [], 0
    for size in sizes:
        part = pairs[at : at + size]
        expected.append([sum(p for p, _ in part) / size, sum(t for _, t in part) / size])
        at += size
    np.testing.assert_allclose(calibration(predicted, truth, 4), expected)
    assert calibration(predicted[:3], truth[:3], 20).shape == (3, 2)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 5])
def test_what_is_written_is_read_back(tmp_path: Path, classes: int) -> None:
    model = random_model(classes, 2)
    write(tmp_path, model)
    again = load_value(tmp_path)
    x = some_inputs(random_tries(np.random.default_rng(0), DEPTH, [3]))
    np.testing.assert_array_equal(again.heads(x), model.heads(x))
    assert (again.depth, again.signals, again.pairs) == (DEPTH, CHOSEN, (PAIR,))
    assert len(again.modules) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"format": VALUE_FORMAT + 1},
        {"ensemble": 3},
        {"ensemble": 0},
        {"classes": 4},
        {"hidden": [8]},
        {"selected_signals": list(CHOSEN[:1])},
        {"stats": {}},
    ],
)
def test_files_of_another_format_or_shape_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    write(tmp_path, random_model(0, 2))
    path = tmp_path / "value.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=r"value\.json: damaged .*stage=value again") as error:
        load_value(tmp_path)
    assert "\n" not in str(error.value)


def test_a_header_without_a_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, random_model(0))
    path = tmp_path / "value.json"
    header = json.loads(path.read_text())
    del header["format"]
    path.write_text(json.dumps(header))
    with pytest.raises(InputError, match="damaged"):
        load_value(tmp_path)


# --- fitting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", ["regression", "distribution"])
def test_many_machines_are_fitted_by_one_network(
    folder: Path, tries: Tries, tmp_path: Path, committed: str
) -> None:
    """T_tgt / T_mid from 1.5 to 40; both times and tokens are told on unseen prompts."""
    machines = ("hardware=range", "hardware.profiles=6", f"value.committed={committed}")
    losses = {}
    for epochs in (1, 10):
        conf = config(folder, "value", *machines, f"value.max_epochs={epochs}")
        data = data_of(tries, conf)
        model, fitted = fit_value(data, conf, a_stage(conf, tmp_path))
        losses[epochs] = fitted["best_val_loss"]
        assert fitted["epochs"] <= epochs
    assert len(data.drawn) == 7
    assert losses[10] < 0.7 * losses[1]
    x, _, found = data.rows(np.flatnonzero(data.held), np.random.default_rng(0))
    assert np.ptp(np.log(found.target_ms / found.mid_ms)) > 1.5
    r2 = {row["output"]: row["r2"] for row in quality(model, x, found, "committed")}
    assert r2["committed"] > 0.3 and r2["t_draft_ms"] > 0.9 and r2["t_verify_ms"] > 0.95
    shares = model.modules[0].classes
    assert shares == (0 if committed == "regression" else int(tries.accepted.max()) + 1)


def test_members_of_an_ensemble_differ(folder: Path, tries: Tries, tmp_path: Path) -> None:
    conf = config(folder, "value", "value.ensemble=2", "value.max_epochs=1")
    model, _ = fit_value(data_of(tries, conf), conf, a_stage(conf, tmp_path))
    x = some_inputs(tries)[:50]
    one, two = (m.predict(x) for m in model.modules)
    assert not np.allclose(one, two)
    both = np.clip((one + two) / 2, model.low, model.high)
    np.testing.assert_allclose(model.heads(x)[:, 0], both[:, 0])


def test_the_stage_writes_what_it_fitted(folder: Path, tries: Tries) -> None:
    write_selection(folder, PAIR, [PAIR])
    run(config(folder, "value", "value.committed=distribution", "value.max_epochs=2"))
    model = load_value(folder / "value" / PAIR)
    assert model.signals == CHOSEN and model.modules[0].classes == DEPTH + 1
    found = json.loads((folder / "value" / PAIR / "metrics.json").read_text())
    assert found["states_train"] + found["states_validation"] == len(tries)
    assert (folder / "value" / PAIR / "calibration.png").stat().st_size > 10_000


# --- several processes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Witness(ValueData):
    """Leaves a file for every block of states, by process."""

    folder: Path

    def make(self, at: IntArray, rng: np.random.Generator) -> Block:
        if not self.held[at].any():
            number = len(list(self.folder.glob(f"{os.getpid()}-*")))
            name = f"{os.getpid()}-{number:03d}-{'-'.join(map(str, at.tolist()))}"
            (self.folder / name).touch()
        return super().make(at, rng)


def test_two_processes_fit_one_network_by_config(
    folder: Path, tries: Tries, tmp_path: Path
) -> None:
    """Lightning's own strategy: each process trains on its share; the first keeps the weights."""
    two = ("trainer.devices=2", "trainer.strategy=ddp_fork", "trainer.accelerator=cpu")
    few = ("value.max_epochs=3", "value.block_states=9", "value.learning_rate=0.01")
    conf = config(folder, "value", *two, *few)
    data = Witness(**vars(data_of(tries, conf)), folder=tmp_path)
    before = build(len(some_inputs(tries)[0]), conf.value.hidden, conf.value, 0).state_dict()
    model, fitted = fit_value(data, conf, a_stage(conf, tmp_path / "stage"))
    assert np.isfinite(fitted["best_val_loss"]) and fitted["epochs"] == 3
    train = np.flatnonzero(~data.held)
    share = len(train) // 2
    first_epoch: dict[str, list[int]] = {}
    for path in sorted(tmp_path.glob("*-*")):
        process, number, *states = path.name.split("-")
        if int(number) < -(-share // 9):
            first_epoch.setdefault(process, []).extend(map(int, states))
    assert len(first_epoch) == 2 and str(os.getpid()) not in first_epoch
    one, other = first_epoch.values()
    assert len(set(one)) == len(set(other)) == share
    assert not set(one) & set(other) and set(one) | set(other) <= set(train.tolist())
    after = model.modules[0].state_dict()
    assert any((after[k] != before[k]).any() for k in before if k.startswith("net."))
    x, _, found = data.rows(np.flatnonzero(data.held), np.random.default_rng(0))
    r2 = {row["output"]: row["r2"] for row in quality(model, x, found, "committed")}
    assert r2["t_draft_ms"] > 0.3


def test_what_is_fitted_can_be_sent_to_other_processes(
    folder: Path, tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ddp_spawn does: trainer with its callbacks, network and batches, in one piece."""
    monkeypatch.setattr(training, "Trainer", Sending)
    monkeypatch.setattr(Sending, "sent", [])
    conf = config(folder, "value", "value.max_epochs=1")
    fit_value(data_of(tries, conf), conf, a_stage(conf, tmp_path))
    assert len(Sending.sent) == 1 and Sending.sent[0] > tries.signals.nbytes


def test_random_value_of_the_fixtures_has_the_same_units() -> None:
    """`random_value`, which other tests use, keeps its times inside its limits of T_mid, T_tgt."""
    model = random_value(DEPTH)
    tries = random_tries(np.random.default_rng(0), DEPTH, [3])
    found = outcomes(tries)
    z = scheduler_inputs(tries, model.signals, found.target_ms, found.mid_ms)
    heads = model.heads(value_rows(z, DEPTH)).reshape(3, -1, 3)
    units = np.stack([np.ones(3), found.mid_ms, found.target_ms], axis=1)[:, None]
    assert (heads >= model.low * units - 1e-9).all() and (heads <= model.high * units + 1e-9).all()
