"""stage=distill: the classifier g_ψ, 17 → 64 → 32 → 1 (design section 4, step 5).

First g is fitted to the labels, as in the paper. Their maximum over futures supposes a schedule
that is fixed beforehand, from what is seen now; but g decides again at every step. So g is then
fitted to what its own decisions bring: at every prefix, the logged outcome of calling the mid
drafter and going on as g would, less that of not calling it (`Rollouts`). All of it is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from sklearn.metrics import r2_score
from torch import Tensor, nn

from pipeline.episodes import rounds_of, turn_settings, worth
from pipeline.features import (
    check_fitted,
    input_names,
    load_tries,
    prompt_keys,
    scheduler_inputs,
    validation_states,
)
from pipeline.hardware import Outcomes, Setting, outcomes_in, settings
from pipeline.inputs import damaged, read_json, read_tensors
from pipeline.label import load_labels
from pipeline.replay import follow, texts_of
from pipeline.report import Stage, stage_run
from pipeline.training import Block, Blocks, Regressor, fit, save_module
from pipeline.tries import Tries
from pipeline.value import count_parameters
from treegraft_core import InputError
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray, IntArray

CLASSIFIER_FORMAT = 2
PAPER_PARAMETERS = 3265
LOSSES, WEIGHTS = ("regression", "sign"), ("none", "size")
LABEL_BLOCK = 131_072
RATE_STATES, DECISION_BLOCK = 1024, 4096
MEMORY, FEWEST_ROUNDS = 0.7, 50
VALIDATION_DRAWS = 4
SCALES = ("target_ms", "mid_ms")
PROMPT = 0
"""Column of log(1 + prompt tokens) in z*."""


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
    unit : str
        Of its margin.
    """

    module: ClassifierRegressor
    depth: int
    signals: tuple[str, ...]
    pairs: tuple[str, ...]
    metrics: dict[str, Any]
    unit: str = "tokens/s"


class ClassifierRegressor(Regressor):
    """The classifier between a standardised input and the margin.

    Parameters
    ----------
    net : Sequential
        Linear layers and ReLU.
    inputs : int
        Columns of z*.
    options : DictConfig, optional
        The ``distill`` group; needed to fit.
    """

    net: nn.Sequential
    used: Tensor

    def __init__(self, net: nn.Sequential, inputs: int, options: DictConfig | None = None):
        super().__init__(net, inputs, 1, options)
        self.sign = options is not None and str(options.loss) == "sign"
        self.trials: Trials | None = None
        self.register_buffer("used", torch.ones(inputs), persistent=False)

    @torch.no_grad()
    def ignore(self, columns: NDArray[np.bool_]) -> None:
        """Give no weight, now or later, to inputs ``[inputs]``."""
        self.used[torch.from_numpy(columns)] = 0.0
        linear_layers(self)[0].weight.mul_(self.used)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the weights of ignored inputs at zero."""
        gradient = linear_layers(self)[0].weight.grad
        if gradient is not None:
            gradient.mul_(self.used)

    def prompt_noise(self) -> float:
        """Return the standard deviation of the noise on log(1 + prompt tokens) while fitting."""
        share = 0.0 if self.options is None else float(self.options.prompt_noise)
        return share * float(self.x_std[PROMPT])

    @torch.no_grad()
    def centre(self) -> None:
        """Let the net's output be 0 where the margin is 0; no decision changes."""
        last = linear_layers(self)[-1]
        last.bias.add_((self.y_mean / self.y_std).to(last.bias.dtype))
        self.y_mean.zero_()

    def margin(self, x: Tensor) -> Tensor:
        """Return margins in the labels' unit, ``[n]``, of standardised inputs."""
        out: Tensor = self.net(x)[:, 0] * self.y_std.float() + self.y_mean.float()
        return out

    def loss(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of standardised labels ``[n, 1]``."""
        if not self.sign:
            return super().loss(x, y, weight)
        label = y[:, 0] + (self.y_mean / self.y_std).float()
        margin = self.margin(x) / self.y_std.float()
        error = nn.functional.binary_cross_entropy_with_logits(
            margin, (label > 0).to(margin.dtype), reduction="none"
        )
        size = label.abs() if weight is None else label.abs() * weight
        return (error * size).mean()

    def validation_step(self, batch: Any, at: int) -> Tensor:
        """Return the loss; in rollouts, the time of validation prompts, replayed."""
        if self.trials is None:
            return super().validation_step(batch, at)
        loss = torch.tensor(self.trials.slowness(), device=self.device)
        self.log("val_loss", loss, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return loss


def continuation_advantage(gain: FloatArray, wanted: NDArray[np.bool_]) -> FloatArray:
    """Return what a mid call is worth at every prefix if decisions go on as wanted.

    Parameters
    ----------
    gain : float64 array, shape ``[S, 2^D]``
        What each schedule is worth.
    wanted : bool array, shape ``[S, 2^D − 1]``
        The decision at every prefix.

    Returns
    -------
    float64 array, shape ``[S, 2^D − 1]``
    """
    depth = gain.shape[1].bit_length() - 1
    columns: list[FloatArray] = []
    value = gain
    for k in reversed(range(depth)):
        small, mid = value[:, 0::2], value[:, 1::2]
        columns.append(mid - small)
        value = np.where(wanted[:, (1 << k) - 1 : (1 << (k + 1)) - 1], mid, small)
    return np.concatenate(columns[::-1], axis=1)


class Rollouts:
    """Labels from the logged outcomes of the classifier's own decisions (`pipeline.episodes`).

    Parameters
    ----------
    tries : Tries
        The states.
    drawn : list of Setting
        Pairs and machines.
    logged_share : float
        Share of the turns with their times as logged.
    signals : tuple of str
        The signals in z*.
    module : ClassifierRegressor
        Decides.
    """

    def __init__(
        self,
        tries: Tries,
        drawn: Sequence[Setting],
        logged_share: float,
        signals: Sequence[str],
        module: ClassifierRegressor,
    ):
        self.tries, self.drawn, self.logged_share = tries, drawn, logged_share
        self.signals, self.module = signals, module
        self.texts = texts_of(tries)
        self.rate, self.tokens = first_rates(tries, drawn)
        self.shift = np.zeros(len(tries))

    def settings(self, rng: np.random.Generator) -> IntArray:
        """Return a setting for each state, one for all states of a turn that is whole."""
        return turn_settings(self.tries, self.texts, self.drawn, self.logged_share, rng)

    def start(self, rng: np.random.Generator) -> None:
        """Draw settings for an epoch, and label every state by what the classifier does now."""
        number = self.settings(rng)
        noise = rng.normal(size=len(self.texts.first))
        self.shift = self.module.prompt_noise() * np.repeat(noise, self.texts.length)
        self.found = outcomes_in(self.tries, self.drawn, number)
        self.wanted = decisions(self.module, self.tries, self.signals, self.found)
        leaf = follow(self.wanted, self.tries.depth)
        self._settle(number, leaf)
        self.worth = worth(
            self.texts, self.found, leaf, self.rate[number], self.tokens[number], self.tries.depth
        )

    def make(self, at: IntArray, _: np.random.Generator) -> Block:
        """Return one row for each prefix of the states ``at``."""
        z = inputs_of(self.tries, at, self.signals, self.found)
        z[..., PROMPT] += self.shift[at, None]
        y = continuation_advantage(self.worth.gain[at], self.wanted[at])
        weight = np.repeat(self.worth.weight[at], z.shape[1])
        return Block(z.reshape(-1, z.shape[-1]), y.reshape(-1, 1), weight)

    def _settle(self, number: IntArray, leaf: IntArray) -> None:
        """Move the rate of every setting towards that of the classifier's decisions."""
        seen, steps, spent = rounds_of(self.texts, self.found, leaf, self.tries.depth)
        sums = [
            np.bincount(number, seen * values, len(self.drawn))
            for values in (np.ones(len(leaf)), steps, spent)
        ]
        known = sums[0] >= FEWEST_ROUNDS
        rounds, tokens, ms = (values[known] for values in sums)
        for mine, found in ((self.rate, tokens / ms), (self.tokens, tokens / rounds)):
            mine[known] = MEMORY * mine[known] + (1 - MEMORY) * found


def first_rates(tries: Tries, drawn: Sequence[Setting]) -> tuple[FloatArray, FloatArray]:
    """Return tokens/ms and tokens a round of the best fixed schedule in every setting."""
    pairs = tries.states["pair"].to_numpy()
    rates, tokens = np.zeros(len(drawn)), np.zeros(len(drawn))
    few = {}
    for pair in tries.pairs:
        ours = np.flatnonzero(pairs == pair)
        few[pair] = tries.take(ours[:: -(-len(ours) // RATE_STATES)])
    for i, setting in enumerate(drawn):
        some = few[setting.pair]
        found = outcomes_in(some, [setting], np.zeros(len(some), np.int64))
        every = found.tokens("committed")
        # A round stands for the positions that it covers.
        spent = (found.ms + tries.depth * found.decision_ms[:, None]) / every
        best = spent.mean(0).argmin()
        rates[i], tokens[i] = 1.0 / spent[:, best].mean(), 1.0 / (1.0 / every[:, best]).mean()
    return rates, tokens


def inputs_of(tries: Tries, at: IntArray, signals: Sequence[str], found: Outcomes) -> FloatArray:
    """Return z* of the states ``at`` on the hardware of ``found``, ``[n, 2^D − 1, …]``."""
    return scheduler_inputs(tries.take(at), signals, found.target_ms[at], found.mid_ms[at])


def decisions(
    module: ClassifierRegressor, tries: Tries, signals: Sequence[str], found: Outcomes
) -> NDArray[np.bool_]:
    """Return where the classifier calls the mid drafter, ``[S, 2^D − 1]``."""
    wanted = np.zeros(tries.signals.shape[:2], bool)
    for low in range(0, len(tries), DECISION_BLOCK):
        at = np.arange(low, min(low + DECISION_BLOCK, len(tries)))
        z = inputs_of(tries, at, signals, found)
        margins = module.predict(z.reshape(-1, z.shape[-1]))[:, 0]
        wanted[at] = margins.reshape(z.shape[:2]) > 0
    return wanted


class Trials:
    """Validation prompts, replayed: how long the classifier's decisions take.

    Parameters
    ----------
    rollouts : Rollouts
        Of the validation states.
    """

    def __init__(self, rollouts: Rollouts):
        self.rollouts = rollouts
        self.first = rollouts.rate.copy()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the one batch that a validation epoch of Lightning needs."""
        yield torch.zeros(1)

    def slowness(self) -> float:
        """Return time over that at the best fixed schedule's rate, on machines drawn once."""
        mine, spent, due = self.rollouts, 0.0, 0.0
        draws = VALIDATION_DRAWS if len(mine.drawn) > len(mine.tries.pairs) else 1
        for turn in range(draws):
            number = mine.settings(np.random.default_rng(turn))
            found = outcomes_in(mine.tries, mine.drawn, number)
            wanted = decisions(mine.module, mine.tries, mine.signals, found)
            leaf = follow(wanted, mine.tries.depth)
            seen, steps, ms = rounds_of(mine.texts, found, leaf, mine.tries.depth)
            spent += float((seen * self.first[number] * ms).sum())
            due += float((seen * steps).sum())
        return spent / due


def build(
    inputs: int, hidden: Sequence[int], options: DictConfig | None, seed: int
) -> ClassifierRegressor:
    """Return a fresh classifier ``inputs → hidden → 1``, initialised by ``seed``."""
    sizes = [inputs, *hidden, 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.ReLU()]
        return ClassifierRegressor(nn.Sequential(*layers[:-1]), inputs, options)


def linear_layers(module: ClassifierRegressor) -> list[nn.Linear]:
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
        unit = str(header["unit"])
        inputs = len(input_names(depth, signals))
        module = build(inputs, [int(h) for h in header["hidden"]], None, 0)
        module.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, "distill", error) from error
    module.eval()
    return Classifier(module, depth, signals, pairs, metrics, unit)


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


def check_options(options: DictConfig) -> None:
    """Raise if a choice does not exist."""
    for name, allowed in (("loss", LOSSES), ("weight", WEIGHTS)):
        if str(options[name]) not in allowed:
            raise InputError(f"distill.{name}={options[name]}: choose one of {', '.join(allowed)}")


@dataclass(frozen=True)
class LabelRows:
    """Labels in memory.

    Attributes
    ----------
    x : float32 array, shape ``[n, inputs]``
        z*.
    y : float64 array, shape ``[n, 1]``
        The labels.
    noise : float
        Standard deviation of the noise on log(1 + prompt tokens).
    scale : float or None
        Mean |y|, by which rows count by their size; None: all alike.
    """

    x: NDArray[np.float32]
    y: FloatArray
    noise: float
    scale: float | None

    def make(self, at: IntArray, rng: np.random.Generator) -> Block:
        """Return the labels ``at``."""
        x = self.x[at].astype(np.float64)
        x[:, PROMPT] += self.noise * rng.normal(size=len(at))
        weight = None if self.scale is None else np.abs(self.y[at, 0]) / self.scale
        return Block(x, self.y[at], weight)


def fit_labels(
    labels: pd.DataFrame, names: Sequence[str], conf: DictConfig, stage: Stage
) -> tuple[ClassifierRegressor, dict[str, Any]]:
    """Fit a classifier to labels, as the paper does; return it and its figures.

    Parameters
    ----------
    labels : DataFrame
        As `load_labels` returns them.
    names : sequence of str
        The columns of z*.
    conf, stage
        The configuration and the running stage.
    """
    options = conf.distill
    held = validation_states(label_prompts(labels), options, int(conf.seed), "distill")
    train, valid = np.flatnonzero(~held), np.flatnonzero(held)
    module = build(len(names), [int(h) for h in options.hidden], options, int(conf.seed))
    x = labels[list(names)].to_numpy(np.float32)
    y = labels[["y"]].to_numpy(np.float64, copy=True)
    rng = np.random.default_rng([int(conf.seed), 1])
    y[train] += float(options.label_noise) * y[train].std() * rng.normal(size=(len(train), 1))
    few = np.sort(rng.permutation(train)[: 8 * LABEL_BLOCK])
    module.set_stats(x[few].astype(np.float64), y[few])
    if module.sign:
        module.y_mean.zero_()
    constant = x[few].max(axis=0) == x[few].min(axis=0)
    dropped = [bool(options.scale_free) and name in SCALES for name in names]
    module.ignore(constant | np.array(dropped))
    scale = float(np.abs(y[few, 0]).mean()) if str(options.weight) == "size" else None
    rows = LabelRows(x, y, module.prompt_noise(), scale)
    size = int(options.batch_size)
    metrics: dict[str, Any] = dict(
        fit(
            module,
            Blocks(rows.make, train, module, size, LABEL_BLOCK, int(conf.seed)),
            Blocks(rows.make, valid, module, LABEL_BLOCK, LABEL_BLOCK, None),
            options.max_epochs,
            options.patience,
            stage,
        )
    )
    hindsight = labels["y_hindsight"].to_numpy(np.float64)[held]
    metrics |= quality(module.predict(x[held].astype(np.float64))[:, 0], y[held, 0], hindsight)
    return module, metrics


def label_prompts(labels: pd.DataFrame) -> NDArray[Any]:
    """Return a number for the prompt of each label, one for all pairs, shape ``[n]``."""
    task, prompt = (labels[name].astype("category").cat for name in ("task", "prompt_id"))
    found: NDArray[Any] = task.codes.to_numpy(np.int64) * len(prompt.categories)
    return found + prompt.codes.to_numpy(np.int64)


def improve(
    module: ClassifierRegressor,
    tries: Tries,
    signals: Sequence[str],
    conf: DictConfig,
    stage: Stage,
) -> dict[str, Any]:
    """Go on fitting ``module`` to rollouts of its own decisions; return the figures.

    The last weights stay, unless validation prompts take longer with them than before. Speeds are
    relative to the best fixed schedule's.
    """
    options, seed = conf.distill, int(conf.seed)
    held = validation_states(prompt_keys(tries), options, seed, "distill")
    drawn, share = settings(tries, conf.hardware, seed), float(conf.hardware.logged_share)
    train, valid = (Rollouts(tries.take(at), drawn, share, signals, module) for at in (~held, held))
    module.centre()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rng = np.random.default_rng([seed, 2])
    train.start(rng)
    few = train.make(np.sort(rng.permutation(len(train.tries))[:RATE_STATES]), rng)
    module.set_stats(few.x, few.y, inputs=False)
    module.y_mean.zero_()
    module.trials = Trials(valid)
    start = module.trials.slowness()
    block = int(options.block_states)
    batches = Blocks(
        train.make,
        np.arange(len(train.tries)),
        module,
        int(options.batch_size),
        block,
        seed,
        train.start,
    )
    figures = fit(module, batches, module.trials, int(options.rollout_epochs), None, stage)
    module.trials = None
    kept = figures["best_val_loss"] <= start
    if not kept:
        module.load_state_dict(before)
    return {
        "rollout_epochs": figures["epochs"],
        "texts_whole": train.texts.whole,
        "speed_before_rollouts": 1.0 / start,
        "speed_after_rollouts": 1.0 / min(start, figures["best_val_loss"]),
        "rollouts_kept": kept,
    }


def run(conf: DictConfig) -> None:
    """Fit the classifier; write ``classifier.safetensors`` and ``.json`` to ``paths.distill``."""
    check_options(conf.distill)
    source = Path(conf.paths.labels)
    labels, header = load_labels(source)
    depth, signals = int(header["depth"]), tuple(header["selected_signals"])
    pairs = sorted(header["pairs"])
    check_fitted(conf, pairs, source / "labels.parquet", "label")
    tries = load_tries(conf) if conf.distill.rollout_epochs else None
    folder = Path(conf.paths.distill)
    with stage_run(conf, "distill", folder) as stage:
        stage.read(source / "labels.parquet", f"{len(labels):,} rows")
        names, hidden = input_names(depth, signals), [int(h) for h in conf.distill.hidden]
        module, metrics = fit_labels(labels, names, conf, stage)
        stage.show(
            f"Validation, labels of unseen prompts ({header['unit']})",
            [{"figure": name, "value": value} for name, value in metrics.items()],
        )
        count = len(labels)
        del labels
        if tries is not None:
            metrics |= improve(module, tries, signals, conf, stage)
        parameters = count_parameters(module)
        check_parameters(parameters, depth, len(signals), hidden)
        save_module(folder / "classifier.safetensors", module)
        write_json(
            folder / "classifier.json",
            {
                "format": CLASSIFIER_FORMAT,
                "depth": depth,
                "selected_signals": list(signals),
                "pairs": pairs,
                "numerator": header["numerator"],
                "unit": "mean rounds" if metrics.get("rollouts_kept") else header["unit"],
                "hidden": hidden,
                "input_names": list(names),
                "parameters": parameters,
                "metrics": metrics,
            },
        )
        stage.wrote(folder / "classifier.safetensors", f"{parameters:,} parameters")
        stage.wrote(folder / "classifier.json")
        stage.metrics.update(metrics, parameters=parameters, labels=count)
