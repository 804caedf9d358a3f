"""Hidden states of a model's layers, kept beside its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treegraft_core.errors import InputError
from treegraft_core.student import layer_list


class HiddenStates:
    """What chosen layers of a model read, for every token of a cache.

    Layer i reads what layer i − 1 has written, layer 0 the embeddings: the numbering of
    ``output_hidden_states``. The values are taken by hooks that exist during a pass only.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with a plain list of layers.
    layers : sequence of int
        Which layers' inputs, in the order in which they are put side by side.

    Attributes
    ----------
    size : int
        Numbers of each token.

    Raises
    ------
    InputError
        If the model has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        _, modules = layer_list(model)
        wrong = [i for i in layers if not 0 <= i < len(modules)]
        if wrong:
            raise InputError(
                f"pair.mid: reads layer {wrong[0]} of the target, which has {len(modules)}; use a "
                "drafter made for this target"
            )
        self.layers = tuple(layers)
        self._modules = [modules[i] for i in layers]
        width = int(model.config.get_text_config().hidden_size)
        self.size = width * len(self.layers)
        self._buffer = torch.zeros(0, self.size, dtype=model.dtype, device=model.device)

    @contextmanager
    def watching(self, start: int) -> Iterator[None]:
        """Note what the layers read in a pass whose first token gets place ``start``."""
        seen: dict[int, Tensor] = {}

        def note(place: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            states: Tensor = args[0] if args else named["hidden_states"]
            seen[place] = states[0]

        handles = [
            module.register_forward_pre_hook(
                lambda _, args, named, place=place: note(place, args, named), with_kwargs=True
            )
            for place, module in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        device = self._buffer.device
        self._write(start, torch.cat([seen[i].to(device) for i in range(len(self.layers))], -1))

    def _write(self, start: int, states: Tensor) -> None:
        end = start + len(states)
        if end > len(self._buffer):
            room = max(end, 2 * len(self._buffer), 512)
            buffer = self._buffer.new_zeros(room, self.size)
            buffer[:start] = self._buffer[:start]
            self._buffer = buffer
        self._buffer[start:end] = states

    def at(self, places: Tensor) -> Tensor:
        """Return the states of the tokens at ``places``, shape ``[places, size]``."""
        return self._buffer[places]

    def keep(self, prefix: int, places: Sequence[int]) -> None:
        """Move the states of ``places`` behind the first ``prefix``."""
        if len(places):
            index = torch.tensor(places, device=self._buffer.device)
            self._buffer[prefix : prefix + len(places)] = self._buffer[index]

    def shrink(self, length: int) -> None:
        """Give back the room beyond ``length`` tokens."""
        self._buffer = self._buffer[:length].clone()
