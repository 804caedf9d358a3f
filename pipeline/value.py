"""stage=value: the value network f_θ(z_k, a_k, τ_{k+1:D}) (design section 4, step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from sklearn.metrics import mean_absolute_error, r2_score
from torch import Tensor, nn

from pipeline.features import (
    OUTCOMES,
    advantage,
    check_numerator,
    input_names,
    load_tries,
    note,
    prompt_keys,
    read_selection,
    scheduler_inputs,
    schedules_ahead,
    validation_states,
)
from pipeline.hardware import Outcomes, Setting, assign, outcomes_in, settings
from pipeline.inputs import damaged, read_json, read_tensors
from pipeline.plots import plot_calibration
from pipeline.report import Stage, stage_run
from pipeline.training import Block, Blocks, Regressor, fit, save_module
from pipeline.tries import Tries, prefixes_of
from treegraft_core import InputError
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray, IntArray

HEADS = OUTCOMES
COMMITTED = ("regression", "distribution")
VALUE_FORMAT = 2
STATISTICS_STATES = 4096


class ValueNet(nn.Module):
    """One trunk, and a linear head each for committed tokens, t_D and t_V.

    Parameters
    ----------
    inputs : int
        Columns of `value_rows`.
    hidden : sequence of int
        Widths of the trunk's layers.
    classes : int
        0: the first head is the number of committed tokens; else the logits of A = 0 … classes − 1.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int = 0):
        super().__init__()
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.SiLU()]
        self.trunk = nn.Sequential(*layers)
        outputs = {name: 1 for name in HEADS} | {HEADS[0]: classes or 1}
        self.heads = nn.ModuleDict({name: nn.Linear(sizes[-1], n) for name, n in outputs.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return the heads side by side ``[n, outputs]`` of standardised inputs ``[n, inputs]``."""
        h = self.trunk(x)
        return torch.cat([self.heads[name](h) for name in HEADS], dim=1)


class ValueRegressor(Regressor):
    """A `ValueNet` between standardised inputs and outputs.

    Its targets are committed tokens, t_D / T_mid and t_V / T_tgt: in these units of time, they
    depend on the machine only through what its parts cost beside each other.
    """

    net: ValueNet

    def __init__(self, net: ValueNet, inputs: int, options: DictConfig | None, classes: int):
        super().__init__(net, inputs, len(HEADS), options)
        self.classes = classes

    def loss(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean squared error, or with classes the cross-entropy for A's head."""
        if not self.classes:
            return super().loss(x, y, weight)
        out = self.net(x)
        accepted = y[:, 0] * self.y_std[0] + self.y_mean[0] - 1
        label = accepted.round().long().clamp(0, self.classes - 1)
        times = (out[:, self.classes :] - y[:, 1:]).square().mean()
        return (nn.functional.cross_entropy(out[:, : self.classes], label) + 2 * times) / 3

    @torch.no_grad()
    def predict(self, x: FloatArray) -> FloatArray:
        """Return committed tokens, t_D / T_mid and t_V / T_tgt, float64 ``[n, 3]``."""
        if not self.classes:
            return super().predict(x)
        out = torch.cat([self.net(part) for part in self.standardise(x, "x").split(65_536)])
        shares = out[:, : self.classes].softmax(1).double()
        committed = shares @ torch.arange(
            1.0, self.classes + 1, dtype=torch.float64, device=shares.device
        )
        times = out[:, self.classes :].double() * self.y_std[1:] + self.y_mean[1:]
        found: FloatArray = torch.cat([committed[:, None], times], 1).cpu().numpy()
        return found

    @torch.no_grad()
    def distribution(self, x: FloatArray) -> FloatArray:
        """Return the probabilities of A = 0 … classes − 1, float64 ``[n, classes]``."""
        logits = self.net(self.standardise(x, "x"))[:, : self.classes]
        found: FloatArray = logits.softmax(1).double().cpu().numpy()
        return found


@dataclass(frozen=True)
class ValueModel:
    """Fitted value networks and what they take.

    Attributes
    ----------
    modules : tuple of ValueRegressor
        An ensemble; the mean of its predictions counts.
    depth : int
        D.
    signals : tuple of str
        The signals in its input.
    pairs : tuple of str
        The pairs it was fitted on.
    low, high : float64 array, shape ``[3]``
        Least and largest training target of each head; predictions are kept inside, since a time
        near 0 ms would make η̂ meaningless.
    """

    modules: tuple[ValueRegressor, ...]
    depth: int
    signals: tuple[str, ...]
    pairs: tuple[str, ...]
    low: FloatArray
    high: FloatArray

    def heads(self, x: FloatArray) -> FloatArray:
        """Return committed tokens, t_D (ms) and t_V (ms) of inputs ``[n, inputs]``: ``[n, 3]``."""
        scaled = np.mean([m.predict(x) for m in self.modules], axis=0)
        names = input_names(self.depth, self.signals)
        units = x[:, [names.index("mid_ms"), names.index("target_ms")]]
        out = np.clip(scaled, self.low, self.high)
        out[:, 1:] *= units
        return out

    def outcomes(self, z: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return predicted committed tokens and t (ms) of all that may follow every prefix.

        Parameters
        ----------
        z : float64 array, shape ``[S, 2^D − 1, 6 + D + signals]``
            The scheduler's input at every prefix of S states.

        Returns
        -------
        float64 arrays, shape ``[S, D, 2^D]``
            At step k (row k − 1) of every schedule, seen from its prefix before that step.
        """
        heads = self.heads(value_rows(z, self.depth)).reshape(len(z), self.depth, -1, len(HEADS))
        return heads[..., 0], heads[..., 1] + heads[..., 2]


def value_rows(z: FloatArray, depth: int) -> FloatArray:
    """Return the value network's input at every step of every schedule.

    z* before the step, then action and future: ``[S · D · 2^D, 6 + 2 D + signals]``, ordered by
    state, step and schedule.
    """
    ahead = schedules_ahead(depth)
    rows = z[:, prefixes_of(depth).T]  # [S, D, 2^D, …]
    shape = (*rows.shape[:3], depth)
    rows = np.concatenate([rows, np.broadcast_to(ahead, shape)], axis=-1)
    return rows.reshape(-1, rows.shape[-1])


def value_targets(found: Outcomes, depth: int) -> FloatArray:
    """Return committed tokens, t_D / T_mid and t_V / T_tgt, ``[S · D · 2^D, 3]``."""
    each = np.stack(
        [
            found.accepted + 1.0,
            found.draft_ms / found.mid_ms[:, None],
            found.verify_ms / found.target_ms[:, None],
        ],
        axis=-1,
    )
    return np.repeat(each[:, None], depth, axis=1).reshape(-1, len(HEADS))


def build(
    inputs: int, hidden: Sequence[int], options: DictConfig | None, seed: int, classes: int = 0
) -> ValueRegressor:
    """Return a fresh value network, initialised by ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ValueRegressor(ValueNet(inputs, hidden, classes), inputs, options, classes)


def load_value(folder: Path) -> ValueModel:
    """Load what `run` wrote.

    Raises
    ------
    InputError
        If a file is missing, damaged, or does not belong to the other.
    """
    path = folder / "value.json"
    header = read_json(path, "value")
    tensors = read_tensors(folder / "value.safetensors", "value")
    try:
        if header["format"] != VALUE_FORMAT:
            raise ValueError(f"format {header['format']}, this version reads {VALUE_FORMAT}")
        depth, signals = int(header["depth"]), tuple(header["selected_signals"])
        pairs, hidden = tuple(header["pairs"]), [int(h) for h in header["hidden"]]
        inputs = len(input_names(depth, signals)) + depth
        modules = []
        for i in range(int(header["ensemble"])):
            module = build(inputs, hidden, None, 0, int(header["classes"]))
            mine = f"{i}."
            module.load_state_dict(
                {k.removeprefix(mine): v for k, v in tensors.items() if k.startswith(mine)}
            )
            modules.append(module.eval())
        if not modules:
            raise ValueError("no network")
        stats = header["stats"]
        low, high = (np.array([stats[h][edge] for h in HEADS]) for edge in ("min", "max"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, "value", error) from error
    return ValueModel(tuple(modules), depth, signals, pairs, low, high)


@dataclass(frozen=True)
class ValueData:
    """What the value network is fitted on: states, their settings, who validates.

    Attributes
    ----------
    tries : Tries
        The states.
    signals : tuple of str
        The signals in the input.
    drawn : list of Setting
        The pairs and machines to fit on.
    logged_share : float
        Share of the states with their times as logged.
    held : bool array, shape ``[S]``
        The states of validation prompts.
    """

    tries: Tries
    signals: tuple[str, ...]
    drawn: list[Setting]
    logged_share: float
    held: NDArray[np.bool_]

    def make(self, at: IntArray, rng: np.random.Generator) -> Block:
        """Return the rows of the states ``at``, each in a setting of its own."""
        x, y, _ = self.rows(at, rng)
        return Block(x, y)

    def rows(
        self, at: IntArray, rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray, Outcomes]:
        """Return inputs, targets and outcomes of the states ``at``."""
        mine = self.tries.take(at)
        number = assign(mine, self.drawn, self.logged_share, rng)
        found = outcomes_in(mine, self.drawn, number)
        z = scheduler_inputs(mine, self.signals, found.target_ms, found.mid_ms)
        return value_rows(z, mine.depth), value_targets(found, mine.depth), found


def fit_value(data: ValueData, conf: DictConfig, stage: Stage) -> tuple[ValueModel, dict[str, Any]]:
    """Fit the ensemble; return it and how each member's fit went."""
    options = conf.value
    if str(options.committed) not in COMMITTED:
        raise InputError(f"value.committed={options.committed}: choose one of {COMMITTED}")
    train, valid = np.flatnonzero(~data.held), np.flatnonzero(data.held)
    rng = np.random.default_rng(conf.seed)
    few = np.sort(rng.permutation(train)[:STATISTICS_STATES])
    x, y, _ = data.rows(few, rng)
    classes = 0
    if str(options.committed) == "distribution":
        classes = int(data.tries.accepted.max()) + 1
    modules, fitted = [], []
    for member in range(int(options.ensemble)):
        seed = int(conf.seed) + 1000 * member
        module = build(x.shape[1], [int(h) for h in options.hidden], options, seed, classes)
        module.set_stats(x, y)
        module.ignore_constant(x)
        size, block = int(options.batch_size), int(options.block_states)
        fitted.append(
            fit(
                module,
                Blocks(data.make, train, module, size, block, seed),
                Blocks(data.make, valid, module, size, block, None),
                options.max_epochs,
                options.patience,
                stage,
            )
        )
        modules.append(module)
    model = ValueModel(
        tuple(modules), data.tries.depth, data.signals, data.tries.pairs, y.min(0), y.max(0)
    )
    metrics = {name: float(np.mean([f[name] for f in fitted])) for name in fitted[0]}
    return model, metrics


def quality(
    model: ValueModel, x: FloatArray, found: Outcomes, numerator: str
) -> list[dict[str, Any]]:
    """Return R² and error of the heads, of η̂, and of the differences of η̂ that labels are.

    Parameters
    ----------
    model : ValueModel
        The fitted networks.
    x : float64 array, shape ``[S · D · 2^D, inputs]``
        `value_rows` of held-out states.
    found : Outcomes
        What happened there.
    numerator : {"committed", "accepted"}
        Of η.
    """
    depth = model.depth
    predicted = model.heads(x)
    units = np.stack([np.ones(len(found.mid_ms)), found.mid_ms, found.target_ms], axis=-1)
    truth = value_targets(found, depth) * np.repeat(units, depth << depth, axis=0)
    bonus = 0.0 if numerator == "committed" else 1.0
    true_eta, eta = (1e3 * (v[:, 0] - bonus) / (v[:, 1] + v[:, 2]) for v in (truth, predicted))
    columns: list[tuple[str, FloatArray, FloatArray]] = [
        (name, truth[:, i], predicted[:, i]) for i, name in enumerate(HEADS)
    ]
    columns.append(("eta_tokens_per_s", true_eta, eta))
    cubes = (v.reshape(-1, depth, 1 << depth) for v in (true_eta, eta))
    true_difference, difference = (advantage(v).ravel() for v in cubes)
    columns.append(("difference_of_eta", true_difference, difference))
    return [
        {
            "output": name,
            "r2": float(r2_score(t, p)),
            "mae": float(mean_absolute_error(t, p)),
            "mean": float(t.mean()),
            "std": float(t.std()),
            "predicted_mean": float(p.mean()),
            "predicted_std": float(p.std()),
        }
        for name, t, p in columns
    ]


def calibration(predicted: FloatArray, truth: FloatArray, bins: int = 20) -> FloatArray:
    """Return mean prediction and mean truth of equally many rows each, shape ``[bins, 2]``."""
    order = np.argsort(predicted, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return np.array([[predicted[part].mean(), truth[part].mean()] for part in parts])


def run(conf: DictConfig) -> None:
    """Fit the value network; write ``value.safetensors`` and ``value.json`` to ``paths.value``."""
    numerator, options = check_numerator(conf), conf.value
    tries = load_tries(conf)
    signals = read_selection(conf)
    held = validation_states(prompt_keys(tries), options, conf.seed, "value")
    folder = Path(conf.paths.value)
    with stage_run(conf, "value", folder) as stage:
        note(tries, conf, stage)
        stage.read(Path(conf.paths.selection) / "selection.json")
        drawn = settings(tries, conf.hardware, int(conf.seed))
        data = ValueData(tries, signals, drawn, float(conf.hardware.logged_share), held)
        model, fitted = fit_value(data, conf, stage)
        rng = np.random.default_rng(conf.seed)
        some = np.sort(rng.permutation(np.flatnonzero(held))[:STATISTICS_STATES])
        x, _, found = data.rows(some, rng)
        table = quality(model, x, found, numerator)
        stage.show(f"Validation, {held.sum():,} states of unseen prompts (eta: {numerator})", table)
        names = (*input_names(tries.depth, signals), *ahead_names(tries.depth))
        write_value(folder, model, options.hidden, names, {"validation": table, **fitted})
        picture = folder / "calibration.png"
        draw_calibration(picture, model, x, found)
        stage.picture("calibration", picture)
        parameters = sum(count_parameters(m) for m in model.modules)
        stage.wrote(folder / "value.safetensors", f"{parameters:,} parameters")
        stage.wrote(folder / "value.json")
        stage.metrics.update(fitted)
        stage.metrics.update({f"r2_{row['output']}": row["r2"] for row in table})
        stage.metrics.update(states_train=int((~held).sum()), states_validation=int(held.sum()))
        stage.metrics["settings"] = len(drawn)


def draw_calibration(path: Path, model: ValueModel, x: FloatArray, found: Outcomes) -> None:
    """Draw mean truth over mean prediction of A, t_D, t_V and η."""
    depth = model.depth
    predicted = model.heads(x)
    units = np.stack([np.ones(len(found.mid_ms)), found.mid_ms, found.target_ms], axis=-1)
    truth = value_targets(found, depth) * np.repeat(units, depth << depth, axis=0)
    curves = {name: calibration(predicted[:, i], truth[:, i]) for i, name in enumerate(HEADS)}
    eta, true_eta = (1e3 * v[:, 0] / (v[:, 1] + v[:, 2]) for v in (predicted, truth))
    curves["η, tokens/s"] = calibration(eta, true_eta)
    shares = None
    if model.modules[0].classes:
        shares = (
            np.mean([m.distribution(x) for m in model.modules], axis=0).mean(0),
            np.bincount(found.accepted.ravel(), minlength=model.modules[0].classes)
            / found.accepted.size,
        )
    plot_calibration(path, curves, shares)


def ahead_names(depth: int) -> tuple[str, ...]:
    """Return the names of `schedules_ahead`."""
    return tuple(f"ahead_{j + 1}" for j in range(depth))


def count_parameters(module: nn.Module) -> int:
    """Return the number of weights and biases."""
    return sum(p.numel() for p in module.parameters())


def write_value(
    folder: Path,
    model: ValueModel,
    hidden: Sequence[int],
    names: Sequence[str],
    metrics: dict[str, Any],
) -> None:
    """Write the networks and their header."""
    first = model.modules[0]
    save_module(folder / "value.safetensors", nn.ModuleList(model.modules))
    mean_std = (first.y_mean.tolist(), first.y_std.tolist())
    columns = zip(HEADS, *mean_std, model.low, model.high, strict=True)
    header = {
        "format": VALUE_FORMAT,
        "depth": model.depth,
        "selected_signals": list(model.signals),
        "pairs": list(model.pairs),
        "hidden": [int(h) for h in hidden],
        "ensemble": len(model.modules),
        "classes": first.classes,
        "heads": list(HEADS),
        "units": ["tokens", "T_mid", "T_tgt"],
        "input_names": list(names),
        "parameters": sum(count_parameters(m) for m in model.modules),
        "stats": {
            name: {"mean": mean, "std": std, "min": float(least), "max": float(largest)}
            for name, mean, std, least, largest in columns
        },
        "input_stats": {
            name: {"mean": mean, "std": std}
            for name, mean, std in zip(
                names, first.x_mean.tolist(), first.x_std.tolist(), strict=True
            )
        },
        "metrics": metrics,
    }
    write_json(folder / "value.json", header)
