"""A scheduler from trajectories in one go, in memory: value network, labels, classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from pipeline.distill import Classifier, check_options, fit_labels, improve
from pipeline.export import to_artifact
from pipeline.features import input_names, prompt_keys, validation_states
from pipeline.hardware import settings
from pipeline.inputs import digest
from pipeline.label import label_table, labeller
from pipeline.report import Stage
from pipeline.tries import Tries
from pipeline.value import ValueData, ValueModel, ahead_names, fit_value, load_value, write_value
from treegraft_core import SchedulerArtifact

VALUE_KEYS = ("value", "hardware", "trainer", "seed", "drafting", "held_out_tasks")


def plain(conf: DictConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return groups of the configuration as plain data."""
    return {
        key: OmegaConf.to_container(conf[key], resolve=True)
        if OmegaConf.is_config(conf[key])
        else conf[key]
        for key in keys
    }


def some_states(tries: Tries, most: int) -> Tries:
    """Return about ``most`` states of each pair: whole prompts, spread over the tasks; 0: all."""
    if not most:
        return tries
    keys, taken = prompt_keys(tries), np.zeros(len(tries), bool)
    for pair in tries.pairs:
        ours = (tries.states["pair"] == pair).to_numpy()
        prompts = np.unique(keys[ours])  # by task
        part = -(-int(ours.sum()) // most)
        taken |= ours & np.isin(keys, prompts[::part])
    return tries.take(taken)


def value_of(
    tries: Tries, signals: tuple[str, ...], conf: DictConfig, stage: Stage, cache: Path
) -> ValueModel:
    """Return a value network fitted as configured, or the same one fitted before."""
    states = digest(tries.states[["pair", "state_id"]].to_numpy().tolist())
    name = digest([plain(conf, VALUE_KEYS), signals, states])
    folder = cache / f"value-{name}"
    if (folder / "value.json").is_file():
        return load_value(folder)
    held = validation_states(prompt_keys(tries), conf.value, int(conf.seed), "value")
    drawn = settings(tries, conf.hardware, int(conf.seed))
    data = ValueData(tries, signals, drawn, float(conf.hardware.logged_share), held)
    model, fitted = fit_value(data, conf, stage)
    names = (*input_names(tries.depth, signals), *ahead_names(tries.depth))
    write_value(folder, model, conf.value.hidden, names, fitted)
    return model


def fit_scheduler(
    tries: Tries, signals: tuple[str, ...], conf: DictConfig, stage: Stage, cache: Path
) -> tuple[SchedulerArtifact, ValueModel | None, dict[str, Any]]:
    """Fit a scheduler as the stages value, label and distill do.

    Parameters
    ----------
    tries : Tries
        What to fit on.
    signals : tuple of str
        The signals in z*.
    conf, stage
        The configuration and the running stage.
    cache : Path
        Where value networks are kept, by what they were fitted on and how.

    Returns
    -------
    artifact : SchedulerArtifact
    model : ValueModel or None
        The value network, if the labels come from one.
    metrics : dict
        Of the distillation.
    """
    check_options(conf.distill)
    model = None
    if str(conf.label.source) == "value":
        model = value_of(tries, signals, conf, stage, cache)
    labels = label_table(labeller(tries, signals, model, conf), conf)
    names = input_names(tries.depth, signals)
    module, metrics = fit_labels(labels, names, conf, stage)
    if conf.distill.rollout_epochs:
        metrics |= improve(module, tries, signals, conf, stage)
    fitted = Classifier(module, tries.depth, signals, tries.pairs, metrics)
    return to_artifact(fitted, {"pairs": list(tries.pairs)}), model, metrics
