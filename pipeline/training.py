"""Fitting the two small networks: batches made block by block, early stopping, by Lightning."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from tqdm import tqdm

from pipeline.report import Stage
from treegraft_core import InputError
from treegraft_core.files import atomic_path
from treegraft_core.tree import FloatArray, IntArray

CHUNK = 65_536


def column_stats(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each column; a column that never varies has 1."""
    mean, std = values.mean(axis=0), values.std(axis=0)
    constant = values.max(axis=0) == values.min(axis=0)
    return np.where(constant, values[0], mean), np.where(constant, 1.0, std)


@dataclass(frozen=True)
class Block:
    """Rows of some states, in memory.

    Attributes
    ----------
    x : float64 array, shape ``[n, inputs]``
        Raw inputs.
    y : float64 array, shape ``[n, outputs]``
        Raw targets.
    weight : float64 array, shape ``[n]``, or None
        Of each row in the loss; None: all alike.
    """

    x: FloatArray
    y: FloatArray
    weight: FloatArray | None = None


class Blocks(IterableDataset[tuple[Tensor, ...]]):
    """Mini-batches of rows that are made block by block, so that memory does not grow with rows.

    States are shuffled, cut into blocks, and the rows of a block shuffled. Between several
    processes (Lightning's distributed strategies) the states are shared out.

    Parameters
    ----------
    make : callable
        Takes the numbers of some states and a generator; returns their `Block`.
    states : int64 array
        The numbers of the states.
    module : Regressor
        Standardises.
    size, block : int
        Rows a batch, states a block.
    seed : int or None
        Of the shuffling and of ``make``; None keeps the order, and the same draws every epoch.
    start : callable, optional
        Called at the beginning of every epoch, with a generator.
    """

    def __init__(
        self,
        make: Callable[[IntArray, np.random.Generator], Block],
        states: IntArray,
        module: Regressor,
        size: int,
        block: int,
        seed: int | None,
        start: Callable[[np.random.Generator], None] | None = None,
    ):
        self.start = start
        self.make, self.states, self.module = make, states, module
        self.size, self.block = size, block
        self.rng = None if seed is None else np.random.default_rng(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield ``(x, y)`` or ``(x, y, weight)`` batches of one epoch, standardised."""
        rng = np.random.default_rng(0) if self.rng is None else self.rng
        if self.start is not None:
            self.start(rng)
        states = self.states if self.rng is None else rng.permutation(self.states)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world = torch.distributed.get_world_size()
            if self.rng is not None:  # as many for each, or one would wait for ever
                states = states[: len(states) // world * world]
            states = states[torch.distributed.get_rank() :: world]
        for at in range(0, len(states), self.block):
            made = self.make(np.sort(states[at : at + self.block]), rng)
            columns = [self.module.standardise(made.x, "x"), self.module.standardise(made.y, "y")]
            if made.weight is not None:
                columns.append(torch.from_numpy(made.weight).to(columns[0].dtype))
            n = len(made.x)
            order = torch.arange(n) if self.rng is None else torch.from_numpy(rng.permutation(n))
            for rows in order.split(self.size):
                yield tuple(column[rows] for column in columns)


class Regressor(LightningModule):
    """A network between a standardised input and a standardised output, fitted by MSE.

    The statistics are float64 buffers of the module, so that they are saved with it.

    Parameters
    ----------
    net : Module
        ``[n, inputs]`` → ``[n, outputs]``.
    inputs, outputs : int
        Columns.
    options : DictConfig, optional
        Config group with ``learning_rate``, ``weight_decay`` and ``max_epochs``; needed to fit.
    """

    def __init__(
        self, net: nn.Module, inputs: int, outputs: int, options: DictConfig | None = None
    ):
        super().__init__()
        self.net, self.options = net, options
        for name, size in (("x", inputs), ("y", outputs)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_std", torch.ones(size, dtype=torch.float64))

    def set_stats(self, x: FloatArray, y: FloatArray, inputs: bool = True) -> None:
        """Take the statistics of rows ``x [n, inputs]`` (if ``inputs``) and ``y [n, outputs]``."""
        for name, values in (("x", x), ("y", y)) if inputs else (("y", y),):
            mean, std = column_stats(values)
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(mean))
            getattr(self, f"{name}_std").copy_(torch.from_numpy(std))

    @torch.no_grad()
    def ignore_constant(self, x: FloatArray) -> None:
        """Give no weight to inputs that are the same in all training rows ``x [n, inputs]``.

        Nothing is learned about them: with the weights of the start, another T_tgt, as of a latency
        profile measured again, would change the output by chance.
        """
        first = next(layer for layer in self.net.modules() if isinstance(layer, nn.Linear))
        first.weight[:, torch.from_numpy(x.max(axis=0) == x.min(axis=0))] = 0.0

    def standardise(self, values: FloatArray, name: str) -> Tensor:
        """Return ``(values − mean) / std`` of ``name`` ("x" or "y") in the weights' dtype."""
        mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
        return ((torch.tensor(values, device=mean.device) - mean) / std).to(
            next(self.parameters()).dtype
        )

    @torch.no_grad()
    def predict(self, x: FloatArray) -> FloatArray:
        """Return outputs in their own units, float64 ``[n, outputs]``, of raw inputs."""
        parts = [self.net(part) for part in self.standardise(x, "x").split(CHUNK)]
        out: FloatArray = (torch.cat(parts).double() * self.y_std + self.y_mean).cpu().numpy()
        return out

    def training_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
        """Return the loss of a batch."""
        return self._logged_loss(batch, "train_loss")

    def validation_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
        """Return the loss of a batch."""
        return self._logged_loss(batch, "val_loss")

    def _logged_loss(self, batch: tuple[Tensor, ...], name: str) -> Tensor:
        loss = self.loss(*batch)
        self.log(name, loss, on_step=False, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)
        return loss

    def loss(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean squared error of standardised targets ``[n, outputs]``."""
        error = (self.net(x) - y).square()
        return error.mean() if weight is None else (error * weight[:, None]).mean()

    def on_train_epoch_start(self) -> None:
        """Log how many epochs there are, which comes back from any process."""
        self.log("epochs", float(self.current_epoch + 1), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with a cosine decay over ``max_epochs``."""
        assert self.options is not None
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.options.learning_rate,
            weight_decay=self.options.weight_decay,
        )
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs or 1)
        return [optimizer], [decay]


class EpochReport(Callback):
    """One progress bar over the epochs, and the losses of each to the tracker.

    Sent to another process it stays behind: there is no bar and no tracker there.
    """

    def __init__(self, stage: Stage, max_epochs: int):
        self.stage: Stage | None = stage
        self.bar = tqdm(total=max_epochs, desc=stage.name, unit="epoch", mininterval=1)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent: nothing."""
        return {"stage": None, "bar": None}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance the bar and log."""
        if self.stage is None or not trainer.is_global_zero:
            return
        values = {k: float(trainer.callback_metrics[k]) for k in ("train_loss", "val_loss")}
        self.bar.set_postfix({k: f"{v:.4f}" for k, v in values.items()}, refresh=False)
        self.bar.update()
        self.stage.log(
            {f"{self.stage.name}/{k}": v for k, v in values.items()}, trainer.current_epoch
        )


def fit(
    module: Regressor,
    train: Any,
    valid: Any,
    max_epochs: int,
    patience: int | None,
    stage: Stage,
) -> dict[str, float]:
    """Fit ``module`` and leave the weights of its best validation epoch in it, or the last ones.

    Parameters
    ----------
    module : Regressor
        With its statistics.
    train, valid : iterable
        Batches of an epoch.
    max_epochs : int
        Most epochs.
    patience : int or None
        How many may pass without a better validation loss; None: all run, and the last weights
        stay, which suits a validation loss that is noisier than the steps of the last epochs.
    stage : Stage
        The running stage; its ``trainer`` group goes to Lightning, which works in a temporary
        folder below ``paths.cache``.

    Returns
    -------
    dict
        Epochs run, and the validation loss of the weights that stay.
    """
    cache = Path(stage.conf.paths.cache)
    cache.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with TemporaryDirectory(dir=cache, prefix=f"lightning-{stage.name}-") as folder:
        last = patience is None
        best = ModelCheckpoint(
            folder,
            filename="{val_loss:.12e}",  # a path comes back from any process, its score does not
            monitor=None if last else "val_loss",
            save_weights_only=True,
        )
        stop = [] if patience is None else [EarlyStopping("val_loss", patience=patience)]
        progress = EpochReport(stage, max_epochs)
        trainer = Trainer(
            accelerator=stage.conf.trainer.accelerator,
            devices=stage.conf.trainer.devices,
            num_nodes=stage.conf.trainer.num_nodes,
            strategy=stage.conf.trainer.strategy,
            max_epochs=max_epochs,
            default_root_dir=folder,
            logger=False,
            callbacks=[*stop, best, progress],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        trainer.fit(module, train, valid)
        progress.bar.close()
        name = Path(best.best_model_path).stem
        loss = float(name.partition("val_loss=")[2].partition("-v")[0] or "nan")
        if not math.isfinite(loss):
            assert module.options is not None
            raise InputError(
                f"{stage.name}.learning_rate={module.options.learning_rate}: training diverged; "
                "lower it"
            )
        module.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
        trainer.strategy.barrier()  # every process has read it
    module.eval()
    return {"epochs": int(trainer.callback_metrics["epochs"]), "best_val_loss": loss}


def save_module(path: Path, module: nn.Module) -> None:
    """Write weights and statistics as safetensors, atomically."""
    tensors = {name: value.contiguous() for name, value in module.state_dict().items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
