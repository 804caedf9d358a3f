"""The distilled scheduler on disk: our safetensors + JSON, and the paper runtime's literal."""

from __future__ import annotations

import ast
import json
import math
import pprint
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_text
from treegraft_core.signals import SIGNALS, context_names
from treegraft_core.tree import FloatArray

ARTIFACT_FORMAT = 1
MAX_DEPTH = 64
BAD_FILE = (
    OSError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    AttributeError,
)
"""What reading a damaged or hostile file may raise."""
LITERAL_NAME = "SCHEDULER_ARTIFACTS"


@dataclass(frozen=True)
class SchedulerArtifact:
    """The classifier g_ψ: 17 → 64 → 32 → 1 with ReLU at D = 5 and six signals.

    margin = y_std · net((x − x_mean) / max(x_std, 1e-12)) + y_mean, in the unit of
    what it was distilled from (``metadata["margin_unit"]``; the paper's is tokens/s).

    Attributes
    ----------
    depth : int
        D.
    selected_signals : tuple of str
        The signals that follow the 6 + D context features in the input, in order.
    weights, biases : tuple of float64 arrays
        Layers, weight ``[out, in]``.
    x_mean, x_std : float64 array
        Input standardisation.
    y_mean, y_std : float
        Output standardisation, in the unit of the margin.
    metadata : dict
        Provenance; strings, numbers, lists and dicts only.
    """

    depth: int
    selected_signals: tuple[str, ...]
    weights: tuple[FloatArray, ...]
    biases: tuple[FloatArray, ...]
    x_mean: FloatArray
    x_std: FloatArray
    y_mean: float
    y_std: float
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Numbers from numpy would not come out as plain literals.
        object.__setattr__(self, "depth", int(self.depth))
        object.__setattr__(self, "y_mean", float(self.y_mean))
        object.__setattr__(self, "y_std", float(self.y_std))
        if not 1 <= self.depth <= MAX_DEPTH:
            raise InputError(f"scheduler: depth={self.depth}, must be from 1 to {MAX_DEPTH}")
        unknown = [name for name in self.selected_signals if name not in SIGNALS]
        if unknown:
            raise InputError(f"selected_signals={unknown[0]}: not one of {', '.join(SIGNALS)}")
        n_inputs = len(context_names(self.depth)) + len(self.selected_signals)
        sizes = [n_inputs, *(len(b) for b in self.biases)]
        good = (
            self.x_mean.shape == self.x_std.shape == (n_inputs,)
            and len(self.weights) == len(self.biases) >= 1
            and sizes[-1] == 1
            and all(w.shape == (sizes[i + 1], sizes[i]) for i, w in enumerate(self.weights))
        )
        if not good:
            raise InputError(
                f"scheduler: layer shapes {[w.shape for w in self.weights]} do not take the "
                f"{n_inputs} inputs of depth {self.depth} and {len(self.selected_signals)} signals"
            )
        arrays = (*self.weights, *self.biases, self.x_mean, self.x_std)
        if not all(np.isfinite(a).all() for a in arrays) or not math.isfinite(
            self.y_mean + self.y_std
        ):
            raise InputError("scheduler: holds values that are not finite; distil it again")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return (*context_names(self.depth), *self.selected_signals)

    @property
    def n_parameters(self) -> int:
        """Weights and biases, counted: 3,265 at D = 5 with six signals."""
        return sum(w.size for w in self.weights) + sum(b.size for b in self.biases)

    def margins(self, x: FloatArray) -> FloatArray:
        """Return the margins of inputs ``[n, inputs]``, shape ``[n]``."""
        h = (x - self.x_mean) / np.maximum(self.x_std, 1e-12)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = np.maximum(h @ weight.T + bias, 0.0)
        out: FloatArray = (h @ self.weights[-1].T + self.biases[-1])[:, 0]
        return self.y_std * out + self.y_mean

    def margin(self, x: FloatArray) -> float:
        """Return the margin of one input ``[inputs]``."""
        return float(self.margins(x[None])[0])

    def save(self, folder: Path | str) -> None:
        """Write ``scheduler.safetensors`` and ``scheduler.json`` into ``folder``."""
        folder = Path(folder)
        tensors = {"x_mean": self.x_mean, "x_std": self.x_std}
        tensors["y_mean"] = np.array([self.y_mean])
        tensors["y_std"] = np.array([self.y_std])
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors[f"layers.{i}.weight"] = w
            tensors[f"layers.{i}.bias"] = b
        with atomic_path(folder / "scheduler.safetensors") as temporary:
            save_file(
                {k: torch.tensor(np.ascontiguousarray(v)) for k, v in tensors.items()}, temporary
            )
        header = {
            "format": ARTIFACT_FORMAT,
            "depth": self.depth,
            "selected_signals": list(self.selected_signals),
            "input_names": list(self.input_names),
            "parameters": self.n_parameters,
            "metadata": self.metadata,
        }
        write_text(folder / "scheduler.json", json.dumps(header, indent=2) + "\n")

    def literal(self) -> dict[str, Any]:
        """Return the paper runtime's ``SCHEDULER_ARTIFACTS`` as plain lists and numbers."""
        return {
            "metadata": {"depth": self.depth, "selected_signals": list(self.selected_signals)},
            "scheduler": {
                "layers": [
                    {"weight": w.tolist(), "bias": b.tolist()}
                    for w, b in zip(self.weights, self.biases, strict=True)
                ],
                "x_mean": self.x_mean.tolist(),
                "x_std": self.x_std.tolist(),
                "y_mean": self.y_mean,
                "y_std": self.y_std,
            },
        }

    def save_literal(self, path: Path | str) -> None:
        """Write the Python module that the paper's runtime loads: one literal, nothing else."""
        body = pprint.pformat(self.literal(), width=100, compact=True, sort_dicts=False)
        write_text(
            path,
            f'"""TreeGraft scheduler for the paper\'s runtime."""\n\n{LITERAL_NAME} = {body}\n',
        )


def load_scheduler(path: Path | str) -> SchedulerArtifact:
    """Load a scheduler: a folder written by ``stage=export`` or a ``.py`` literal.

    Nothing in the file is executed.

    Raises
    ------
    InputError
        If the file is missing, damaged or not a scheduler.
    """
    path = Path(path)
    if path.suffix == ".py":
        return _load_literal(path)
    try:
        header = json.loads((path / "scheduler.json").read_text(encoding="utf-8"))
        if header["format"] != ARTIFACT_FORMAT:
            raise ValueError(f"format {header['format']}, this version reads {ARTIFACT_FORMAT}")
        with safe_open(path / "scheduler.safetensors", framework="pt") as reader:
            t = {name: reader.get_tensor(name).double().numpy() for name in list(reader.keys())}
        n_layers = sum(name.endswith(".weight") for name in t)
        return SchedulerArtifact(
            depth=int(header["depth"]),
            selected_signals=tuple(header["selected_signals"]),
            weights=tuple(t[f"layers.{i}.weight"] for i in range(n_layers)),
            biases=tuple(t[f"layers.{i}.bias"] for i in range(n_layers)),
            x_mean=t["x_mean"],
            x_std=t["x_std"],
            y_mean=float(t["y_mean"][0]),
            y_std=float(t["y_std"][0]),
            metadata=dict(header.get("metadata", {})),
        )
    except InputError:
        raise
    except (*BAD_FILE, SafetensorError) as error:
        raise InputError(
            f"scheduler={path}: not a complete scheduler folder ({error}); run stage=export"
        ) from error


def _load_literal(path: Path) -> SchedulerArtifact:
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
        value = next(
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == LITERAL_NAME for t in node.targets)
        )
        layers = value["scheduler"]["layers"]
        return SchedulerArtifact(
            depth=int(value["metadata"]["depth"]),
            selected_signals=tuple(value["metadata"]["selected_signals"]),
            weights=tuple(np.array(layer["weight"], np.float64) for layer in layers),
            biases=tuple(np.array(layer["bias"], np.float64) for layer in layers),
            x_mean=np.array(value["scheduler"]["x_mean"], np.float64),
            x_std=np.array(value["scheduler"]["x_std"], np.float64),
            y_mean=_number(value["scheduler"]["y_mean"]),
            y_std=_number(value["scheduler"]["y_std"]),
        )
    except InputError:
        raise
    except (*BAD_FILE, SyntaxError, StopIteration) as error:
        raise InputError(
            f"scheduler={path}: holds no literal {LITERAL_NAME} ({error}); run stage=export"
        ) from error


def _number(value: float | Sequence[float]) -> float:
    return float(np.asarray(value, np.float64).reshape(()))
