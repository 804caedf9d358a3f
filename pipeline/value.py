"""stage=value: the value network f_θ(z_k, a_k, τ_{k+1:D}) (design section 4, step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from sklearn.metrics import mean_absolute_error, r2_score
from torch import Tensor, nn

from pipeline.features import (
    OUTCOMES,
    check_numerator,
    input_names,
    load_trajectories,
    prompt_keys,
    read_selection,
    throughput,
    validation_rows,
    value_inputs,
)
from pipeline.inputs import damaged, read_json, read_tensors
from pipeline.report import stage_run
from pipeline.training import Regressor, fit, save_module
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray

HEADS = OUTCOMES
VALUE_FORMAT = 1


class ValueNet(nn.Module):
    """One trunk, and a linear head each for committed tokens, t_D and t_V.

    Parameters
    ----------
    inputs : int
        Columns of `pipeline.features.value_inputs`.
    hidden : sequence of int
        Widths of the trunk's layers.
    """

    def __init__(self, inputs: int, hidden: Sequence[int]):
        super().__init__()
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.SiLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({name: nn.Linear(sizes[-1], 1) for name in HEADS})

    def forward(self, x: Tensor) -> Tensor:
        """Return standardised heads ``[n, 3]`` of standardised inputs ``[n, inputs]``."""
        h = self.trunk(x)
        return torch.cat([self.heads[name](h) for name in HEADS], dim=1)


@dataclass(frozen=True)
class ValueModel:
    """A fitted value network and what it takes.

    Attributes
    ----------
    module : Regressor
        Around a `ValueNet`.
    depth : int
        D.
    signals : tuple of str
        The signals in its input.
    pairs : tuple of str
        The pairs it was fitted on.
    low, high : float64 array, shape ``[3]``
        Least and largest training value of each head; predictions are kept inside, since a time
        near 0 ms would make η̂ meaningless.
    """

    module: Regressor
    depth: int
    signals: tuple[str, ...]
    pairs: tuple[str, ...]
    low: FloatArray
    high: FloatArray

    def heads(self, x: FloatArray) -> FloatArray:
        """Return committed tokens, t_D (ms) and t_V (ms), shape ``[n, 3]``."""
        return np.clip(self.module.predict(x), self.low, self.high)

    def eta(self, x: FloatArray, numerator: str) -> FloatArray:
        """Return η̂ in tokens/s, shape ``[n]``."""
        return throughput(self.heads(x), numerator)


def build(inputs: int, hidden: Sequence[int], options: DictConfig | None, seed: int) -> Regressor:
    """Return a fresh value network, initialised by ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Regressor(ValueNet(inputs, hidden), inputs, len(HEADS), options)


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
        depth, signals = int(header["depth"]), tuple(header["selected_signals"])
        pairs = tuple(header["pairs"])
        inputs = len(input_names(depth, signals)) + depth
        module = build(inputs, [int(h) for h in header["hidden"]], None, 0)
        module.load_state_dict(tensors)
        stats = header["stats"]
        low, high = (np.array([stats[h][edge] for h in HEADS]) for edge in ("min", "max"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, "value", error) from error
    module.eval()
    return ValueModel(module, depth, signals, pairs, low, high)


def quality(
    model: ValueModel, x: FloatArray, y: FloatArray, numerator: str
) -> list[dict[str, Any]]:
    """Return R² and mean absolute error of the heads and of η̂ on rows ``x``, ``y [n, 3]``."""
    predicted = model.heads(x)
    truth = throughput(y, numerator)
    columns = [(name, y[:, i], predicted[:, i]) for i, name in enumerate(HEADS)]
    columns.append(("eta_tokens_per_s", truth, throughput(predicted, numerator)))
    return [
        {
            "output": name,
            "r2": float(r2_score(t, p)),
            "mae": float(mean_absolute_error(t, p)),
            "mean": float(t.mean()),
            "std": float(t.std()),
        }
        for name, t, p in columns
    ]


def run(conf: DictConfig) -> None:
    """Fit the value network; write ``value.safetensors`` and ``value.json`` to ``paths.value``."""
    numerator, options = check_numerator(conf), conf.value
    rows = load_trajectories(conf)
    signals = read_selection(conf)
    prompts = prompt_keys(rows.frame)
    held = validation_rows(prompts, options.validation_share, conf.seed, "value.validation_share")
    folder = Path(conf.paths.value)
    with stage_run(conf, "value", folder) as stage:
        rows.note(stage)
        stage.read(Path(conf.paths.selection) / "selection.json")
        x, y = value_inputs(rows, signals), rows.frame[list(HEADS)].to_numpy(np.float64)
        hidden = [int(h) for h in options.hidden]
        module = build(x.shape[1], hidden, options, conf.seed)
        fitted = fit(module, x, y, held, stage)
        low, high = y[~held].min(axis=0), y[~held].max(axis=0)
        model = ValueModel(module, rows.depth, signals, tuple(rows.folders), low, high)
        table = quality(model, x[held], y[held], numerator)
        stage.show(f"Validation, {held.sum():,} rows of unseen prompts (eta: {numerator})", table)
        names = (*input_names(rows.depth, signals), *(f"ahead_{j + 1}" for j in range(rows.depth)))
        write_value(folder, model, hidden, names, {"validation": table, **fitted})
        stage.wrote(folder / "value.safetensors", f"{count_parameters(module):,} parameters")
        stage.wrote(folder / "value.json")
        stage.metrics.update(fitted)
        stage.metrics.update({f"r2_{row['output']}": row["r2"] for row in table})
        stage.metrics.update(rows_train=int((~held).sum()), rows_validation=int(held.sum()))


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
    """Write the network and its header."""
    module = model.module
    save_module(folder / "value.safetensors", module)
    mean_std = (module.y_mean.tolist(), module.y_std.tolist())
    columns = zip(HEADS, *mean_std, model.low, model.high, strict=True)
    header = {
        "format": VALUE_FORMAT,
        "depth": model.depth,
        "selected_signals": list(model.signals),
        "pairs": list(model.pairs),
        "hidden": list(hidden),
        "heads": list(HEADS),
        "input_names": list(names),
        "parameters": count_parameters(module),
        "shapes": {name: list(value.shape) for name, value in module.state_dict().items()},
        "stats": {
            name: {"mean": mean, "std": std, "min": float(least), "max": float(largest)}
            for name, mean, std, least, largest in columns
        },
        "input_stats": {
            name: {"mean": mean, "std": std}
            for name, mean, std in zip(
                names, module.x_mean.tolist(), module.x_std.tolist(), strict=True
            )
        },
        "metrics": metrics,
    }
    write_json(folder / "value.json", header)
