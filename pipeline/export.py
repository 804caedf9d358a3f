"""stage=export: the scheduler for our decoder and for the paper's (design section 4, step 6)."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open

from pipeline import report
from pipeline.distill import Classifier, linear_layers, load_classifier
from pipeline.engine import drafting_config, drafting_rules
from pipeline.features import check_fitted, input_names, read_selection, trajectory_folder
from pipeline.inputs import read_json
from pipeline.label import load_labels
from pipeline.manifest import read_manifest
from pipeline.report import stage_run
from pipeline.store import LocalStore
from treegraft_core import InputError, SchedulerArtifact, load_scheduler
from treegraft_core.artifact import LITERAL_NAME
from treegraft_core.trained import WIDTHS, Drafters, Trained
from treegraft_core.tree import FloatArray

LITERAL_FILE = "treegraft_scheduler.py"
FILES = ("scheduler.safetensors", "scheduler.json", "README.md", LITERAL_FILE)
STATES = 1000
PLAIN_STATES = 50
TOLERANCE = 1e-5


def drafters_of(conf: DictConfig, pairs: Sequence[str]) -> tuple[Drafters, ...]:
    """Return the drafters that the trajectories of the pairs were collected with.

    The manifests of their datasets say so. If one does not, nothing is returned, with a note.
    """
    found = []
    for pair in pairs:
        header = read_manifest(LocalStore(trajectory_folder(conf, pair))).header
        config = {} if header is None else header["config"]
        if "models.mid_family" not in config:
            print(
                f"note: the trajectories of {pair} do not say which drafters they are of; whoever "
                "loads the scheduler is warned that they are not checked"
            )
            return ()
        # A drafter's rule is its name, then its settings in braces.
        small = str(config.get("drafting.small", "ngram")).partition(" {")[0]
        mid, identity = str(config["models.mid_family"]), str(config.get("models.mid", ""))
        found.append(Drafters(small, mid, pair, identity))
    return tuple(found)


def costs_of(labels: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the least and the most T_tgt and T_mid (ms), and of their ratio, over all labels."""
    target_ms = labels["target_ms"].to_numpy(np.float64)
    mid_ms = labels["mid_ms"].to_numpy(np.float64)
    costs = {"target_ms": target_ms, "mid_ms": mid_ms, "ratio": target_ms / mid_ms}
    return {name: (float(each.min()), float(each.max())) for name, each in costs.items()}


def trained_on(conf: DictConfig, classifier: Classifier, labels: pd.DataFrame) -> Trained:
    """Return what the classifier was trained on."""
    config = drafting_config(conf)
    return Trained(
        widths={name: int(getattr(config, name)) for name in WIDTHS},
        drafters=drafters_of(conf, classifier.pairs),
        costs=costs_of(labels),
        metrics=classifier.metrics,
    )


def to_artifact(
    classifier: Classifier, metadata: dict[str, Any], trained: Trained | None = None
) -> SchedulerArtifact:
    """Return the classifier as the core's artifact, in float64; ``trained`` is what it was on."""
    module = classifier.module
    layers = linear_layers(module)
    return SchedulerArtifact(
        depth=classifier.depth,
        selected_signals=classifier.signals,
        weights=tuple(layer.weight.detach().double().numpy() for layer in layers),
        biases=tuple(layer.bias.detach().double().numpy() for layer in layers),
        x_mean=module.x_mean.numpy(),
        x_std=module.x_std.numpy(),
        y_mean=float(module.y_mean[0]),
        y_std=float(module.y_std[0]),
        metadata=metadata,
        trained=trained or Trained(),
    )


def plain_margin(artifact: dict[str, Any], x: Sequence[float]) -> float:
    """Return the margin of one input by plain Python arithmetic on the literal's numbers."""
    net = artifact["scheduler"]
    moments = zip(x, net["x_mean"], net["x_std"], strict=True)
    h = [(v - mean) / max(std, 1e-12) for v, mean, std in moments]
    for i, layer in enumerate(net["layers"]):
        rows = zip(layer["weight"], layer["bias"], strict=True)
        h = [sum(w * v for w, v in zip(row, h, strict=True)) + b for row, b in rows]
        if i < len(net["layers"]) - 1:
            h = [max(v, 0.0) for v in h]
    return float(net["y_std"] * h[0] + net["y_mean"])


def read_literal(path: Path) -> dict[str, Any]:
    """Return the literal of a scheduler module, without executing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LITERAL_NAME:
            value: dict[str, Any] = ast.literal_eval(node.value)
            return value
    raise RuntimeError(f"{path}: no {LITERAL_NAME}")


def count_tensors(path: Path) -> int:
    """Return the weights and biases that a safetensors file holds."""
    with safe_open(path, framework="np") as reader:
        names = [name for name in list(reader.keys()) if name.startswith("layers.")]
        return int(sum(reader.get_tensor(name).size for name in names))


def compare(folder: Path, x: FloatArray, margin: FloatArray) -> list[dict[str, Any]]:
    """Compare the files in ``folder`` with the torch model's margins.

    Parameters
    ----------
    folder : Path
        Holds `FILES`.
    x : float64 array, shape ``[n, inputs]``
        Labelled states.
    margin : float64 array, shape ``[n]``
        The torch model's margins there.
    """
    literal = read_literal(folder / LITERAL_FILE)
    layers = literal["scheduler"]["layers"]
    n_literal = sum(np.size(v) for layer in layers for v in layer.values())
    n_tensors = count_tensors(folder / "scheduler.safetensors")
    few = np.linspace(0, len(x) - 1, min(PLAIN_STATES, len(x))).astype(int)
    plain = np.array([plain_margin(literal, x[i].tolist()) for i in few])
    formats = [
        ("scheduler.safetensors", n_tensors, load_scheduler(folder).margins(x), margin),
        (LITERAL_FILE, n_literal, load_scheduler(folder / LITERAL_FILE).margins(x), margin),
        (f"{LITERAL_FILE}, plain Python", n_literal, plain, margin[few]),
    ]
    return [
        {
            "format": name,
            "parameters": int(parameters),
            "states": len(truth),
            "max_difference": float(np.abs(found - truth).max()),
            "same_decisions": bool(((found > 0) == (truth > 0)).all()),
        }
        for name, parameters, found, truth in formats
    ]


def write_checked(
    artifact: SchedulerArtifact, folder: Path, name: str, x: FloatArray, margin: FloatArray
) -> list[dict[str, Any]]:
    """Write the files beside their place, compare them, and only then move them there."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".export-") as place:
        draft = Path(place)
        artifact.save_pretrained(draft, repo_id=name)
        artifact.save_literal(draft / LITERAL_FILE)
        table = compare(draft, x, margin)
        worst = max(row["max_difference"] for row in table)
        if not worst < TOLERANCE:
            raise RuntimeError(f"an exported margin is {worst} off, above {TOLERANCE}")
        for file in FILES:
            os.replace(draft / file, folder / file)
    return table


def hardware_of(conf: DictConfig) -> dict[str, Any]:
    """Return the machines that the scheduler was fitted for: a name, and ranges if it had any."""
    found: Any = OmegaConf.to_container(conf.hardware, resolve=True)
    return found if conf.hardware.profiles else {"name": str(conf.hardware.name)}


def run(conf: DictConfig) -> None:
    """Write the scheduler, in both formats, to ``paths.scheduler`` and read both back."""
    classifier = load_classifier(Path(conf.paths.distill))
    labels, header = load_labels(Path(conf.paths.labels))
    depth, signals = int(header["depth"]), tuple(header["selected_signals"])
    check_fitted(conf, classifier.pairs, Path(conf.paths.distill) / "classifier.json", "distill")
    check_fitted(conf, sorted(header["pairs"]), Path(conf.paths.labels), "label")
    if (depth, signals) != (classifier.depth, classifier.signals):
        raise InputError(
            f"{conf.paths.distill}: distilled from other labels than those in "
            f"{conf.paths.labels}; run python -m pipeline.run stage=distill again"
        )
    if read_selection(conf) != signals:
        raise InputError(
            f"{conf.paths.selection}: other signals than the classifier's; run "
            "python -m pipeline.run stage=value, stage=label and stage=distill again"
        )
    selection = read_json(Path(conf.paths.selection) / "selection.json", "select")
    folder = Path(conf.paths.scheduler)
    with stage_run(conf, "export", folder) as stage:
        for path in (conf.paths.distill, conf.paths.labels, conf.paths.selection):
            stage.read(path)
        metadata = {
            "drafting": drafting_rules(drafting_config(conf)),
            "fit": str(conf.fit.name),
            "pairs": list(classifier.pairs),
            "tasks": sorted(set(labels["task"])),
            "selection": selection,
            "numerator": header["numerator"],
            "margin_unit": classifier.unit,
            "hardware": hardware_of(conf),
            "git_sha": report.git_sha(),
        }
        artifact = to_artifact(classifier, metadata, trained_on(conf, classifier, labels))
        count = min(STATES, len(labels))
        picked = np.random.default_rng(conf.seed).choice(len(labels), count, replace=False)
        x = labels[list(input_names(depth, signals))].to_numpy(np.float64)[np.sort(picked)]
        margin = classifier.module.double().predict(x)[:, 0]
        table = write_checked(artifact, folder, str(conf.fit.name), x, margin)
        stage.show("Margins of the exported files against the torch model", table)
        for file in FILES:
            stage.wrote(folder / file)
        stage.metrics["parameters"] = table[0]["parameters"]
        stage.metrics["max_difference"] = max(row["max_difference"] for row in table)
