"""Fitting the two small networks: in-memory batches, standardised MSE, early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from numpy.typing import NDArray
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from pipeline.report import Stage
from treegraft_core import InputError
from treegraft_core.files import atomic_path
from treegraft_core.tree import FloatArray

CHUNK = 65_536


def column_stats(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each column; a column that never varies has 1."""
    mean, std = values.mean(axis=0), values.std(axis=0)
    constant = values.max(axis=0) == values.min(axis=0)
    return np.where(constant, values[0], mean), np.where(constant, 1.0, std)


class Batches:
    """Mini-batches of tensors that are in memory; reshuffled each time it is iterated.

    Parameters
    ----------
    x, y : Tensor
        Standardised inputs ``[n, inputs]`` and targets ``[n, outputs]``.
    size : int
        Rows a batch.
    seed : int or None
        Seed of the shuffling; None keeps the order.
    """

    def __init__(self, x: Tensor, y: Tensor, size: int, seed: int | None):
        self.x, self.y, self.size = x, y, size
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of batches."""
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(x, y)`` batches of one epoch."""
        n = len(self.x)
        order = torch.arange(n)
        if self.generator is not None:
            order = torch.randperm(n, generator=self.generator)
        for rows in order.split(self.size):
            yield self.x[rows], self.y[rows]


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

    def set_stats(self, x: FloatArray, y: FloatArray) -> None:
        """Take the statistics of the training rows ``x [n, inputs]`` and ``y [n, outputs]``."""
        for name, values in (("x", x), ("y", y)):
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
        return ((torch.tensor(values) - mean) / std).to(next(self.parameters()).dtype)

    @torch.no_grad()
    def predict(self, x: FloatArray) -> FloatArray:
        """Return outputs in their own units, float64 ``[n, outputs]``, of raw inputs."""
        parts = [self.net(part) for part in self.standardise(x, "x").split(CHUNK)]
        out: FloatArray = (torch.cat(parts).double() * self.y_std + self.y_mean).numpy()
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the mean squared error of a batch."""
        return self._loss(batch, "train_loss")

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the mean squared error of a batch."""
        return self._loss(batch, "val_loss")

    def _loss(self, batch: tuple[Tensor, Tensor], name: str) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log(name, loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a cosine decay over ``max_epochs``."""
        assert self.options is not None
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.options.learning_rate,
            weight_decay=self.options.weight_decay,
        )
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.options.max_epochs)
        return [optimizer], [decay]


class EpochReport(Callback):
    """One progress bar over the epochs, and the losses of each to the tracker."""

    def __init__(self, stage: Stage, max_epochs: int):
        self.stage = stage
        self.bar = tqdm(total=max_epochs, desc=stage.name, unit="epoch", mininterval=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance the bar and log."""
        values = {k: float(trainer.callback_metrics[k]) for k in ("train_loss", "val_loss")}
        self.bar.set_postfix({k: f"{v:.4f}" for k, v in values.items()}, refresh=False)
        self.bar.update()
        self.stage.log(
            {f"{self.stage.name}/{k}": v for k, v in values.items()}, trainer.current_epoch
        )


def fit(
    module: Regressor,
    x: FloatArray,
    y: FloatArray,
    held: NDArray[np.bool_],
    stage: Stage,
) -> dict[str, float]:
    """Fit ``module`` and leave the weights of its best validation epoch in it.

    Parameters
    ----------
    module : Regressor
        Its ``options`` also give ``batch_size`` and ``patience``.
    x, y : float64 array
        Raw inputs ``[n, inputs]`` and targets ``[n, outputs]``.
    held : bool array, shape ``[n]``
        The validation rows.
    stage : Stage
        The running stage; Lightning works in a temporary folder below ``paths.cache``.

    Returns
    -------
    dict
        Epochs run, and the best epoch's standardised validation loss.
    """
    options, seed = module.options, int(stage.conf.seed)
    assert options is not None
    module.set_stats(x[~held], y[~held])
    module.ignore_constant(x[~held])
    z, t, held_rows = module.standardise(x, "x"), module.standardise(y, "y"), torch.tensor(held)
    train = Batches(z[~held_rows], t[~held_rows], int(options.batch_size), seed)
    valid = Batches(z[held_rows], t[held_rows], CHUNK, None)
    cache = Path(stage.conf.paths.cache)
    cache.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with TemporaryDirectory(dir=cache, prefix=f"lightning-{stage.name}-") as folder:
        best = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=True)
        progress = EpochReport(stage, options.max_epochs)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=options.max_epochs,
            default_root_dir=folder,
            logger=False,
            callbacks=[EarlyStopping("val_loss", patience=options.patience), best, progress],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, train, valid)
        progress.bar.close()
        loss = float("nan") if best.best_model_score is None else float(best.best_model_score)
        if not math.isfinite(loss):
            raise InputError(
                f"{stage.name}.learning_rate={options.learning_rate}: training diverged; lower it"
            )
        module.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    module.eval()
    return {"epochs": trainer.current_epoch, "best_val_loss": loss}


def save_module(path: Path, module: Regressor) -> None:
    """Write weights and statistics as safetensors, atomically."""
    tensors = {name: value.contiguous() for name, value in module.state_dict().items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
