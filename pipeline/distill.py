"""stage=distill: the classifier g_ψ, 17 → 64 → 32 → 1 (design section 4, step 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from sklearn.metrics import r2_score
from torch import nn

from pipeline.features import check_fitted, input_names, prompt_keys, validation_rows
from pipeline.inputs import damaged, read_json, read_tensors
from pipeline.label import load_labels
from pipeline.report import stage_run
from pipeline.training import Regressor, fit, save_module
from pipeline.value import count_parameters
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray

CLASSIFIER_FORMAT = 1
PAPER_PARAMETERS = 3265


@dataclass(frozen=True)
class Classifier:
    """A distilled classifier and what it takes.

    Attributes
    ----------
    module : Regressor
        Around a `Sequential` of linear layers and ReLU; its output is the margin in tokens/s.
    depth : int
        D.
    signals : tuple of str
        The signals in its input.
    pairs : tuple of str
        The pairs it was fitted on.
    metrics : dict
        Its validation figures.
    """

    module: Regressor
    depth: int
    signals: tuple[str, ...]
    pairs: tuple[str, ...]
    metrics: dict[str, Any]


def build(inputs: int, hidden: Sequence[int], options: DictConfig | None, seed: int) -> Regressor:
    """Return a fresh classifier ``inputs → hidden → 1``, initialised by ``seed``."""
    sizes = [inputs, *hidden, 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.ReLU()]
        return Regressor(nn.Sequential(*layers[:-1]), inputs, 1, options)


def linear_layers(module: Regressor) -> list[nn.Linear]:
    """Return the classifier's linear layers, first to last."""
    return [layer for layer in module.net.children() if isinstance(layer, nn.Linear)]


def load_classifier(folder: Path) -> Classifier:
    """Load what `run` wrote.

    Raises
    ------
    InputError
        If a file is missing, damaged, or does not belong to the other.
    """
    path = folder / "classifier.json"
    header = read_json(path, "distill")
    tensors = read_tensors(folder / "classifier.safetensors", "distill")
    try:
        depth, signals = int(header["depth"]), tuple(header["selected_signals"])
        pairs, metrics = tuple(header["pairs"]), dict(header["metrics"])
        inputs = len(input_names(depth, signals))
        module = build(inputs, [int(h) for h in header["hidden"]], None, 0)
        module.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, "distill", error) from error
    module.eval()
    return Classifier(module, depth, signals, pairs, metrics)


def sign_accuracy(margin: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Return the share of right decisions, and the same weighted by the size of y."""
    right = (margin > 0) == (y > 0)
    return float(right.mean()), float(np.average(right, weights=np.abs(y) + 1e-12))


def quality(margin: FloatArray, y: FloatArray, hindsight: FloatArray) -> dict[str, float]:
    """Return the validation figures of margins ``[n]`` against labels and hindsight ``[n]``."""
    plain, weighted = sign_accuracy(margin, y)
    hind_plain, hind_weighted = sign_accuracy(margin, hindsight)
    return {
        "r2": float(r2_score(y, margin)),
        "sign_accuracy": plain,
        "sign_accuracy_weighted": weighted,
        "hindsight_sign_accuracy": hind_plain,
        "hindsight_sign_accuracy_weighted": hind_weighted,
        "call_share": float((margin > 0).mean()),
        "label_call_share": float((y > 0).mean()),
    }


def check_parameters(parameters: int, depth: int, signals: int, hidden: Sequence[int]) -> None:
    """Raise if the paper's shape does not have the paper's 3,265 parameters."""
    paper = (depth, signals, list(hidden)) == (5, 6, [64, 32])
    if paper and parameters != PAPER_PARAMETERS:
        raise AssertionError(f"g has {parameters} parameters, not {PAPER_PARAMETERS}")


def run(conf: DictConfig) -> None:
    """Fit the classifier; write ``classifier.safetensors`` and ``.json`` to ``paths.distill``."""
    options, source = conf.distill, Path(conf.paths.labels)
    labels, depth, signals, numerator = load_labels(source)
    pairs = sorted(set(labels["pair"]))
    check_fitted(conf, pairs, source / "labels.parquet", "label")
    prompts = prompt_keys(labels)
    held = validation_rows(prompts, options.validation_share, conf.seed, "distill.validation_share")
    folder = Path(conf.paths.distill)
    with stage_run(conf, "distill", folder) as stage:
        stage.read(source / "labels.parquet", f"{len(labels):,} rows")
        names, hidden = input_names(depth, signals), [int(h) for h in options.hidden]
        x, y = labels[list(names)].to_numpy(np.float64), labels["y"].to_numpy(np.float64)
        module = build(len(names), hidden, options, conf.seed)
        parameters = count_parameters(module)
        check_parameters(parameters, depth, len(signals), hidden)
        metrics: dict[str, Any] = dict(fit(module, x, y[:, None], held, stage))
        hindsight = labels["y_hindsight"].to_numpy(np.float64)
        metrics |= quality(module.predict(x[held])[:, 0], y[held], hindsight[held])
        stage.show(
            f"Validation, {held.sum():,} labels of unseen prompts",
            [{"figure": name, "value": value} for name, value in metrics.items()],
        )
        save_module(folder / "classifier.safetensors", module)
        header = {
            "format": CLASSIFIER_FORMAT,
            "depth": depth,
            "selected_signals": list(signals),
            "pairs": pairs,
            "numerator": numerator,
            "hidden": hidden,
            "input_names": list(names),
            "parameters": parameters,
            "metrics": metrics,
        }
        write_json(folder / "classifier.json", header)
        stage.wrote(folder / "classifier.safetensors", f"{parameters:,} parameters")
        stage.wrote(folder / "classifier.json")
        stage.metrics.update(metrics, parameters=parameters, labels=len(labels))
