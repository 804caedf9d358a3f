"""Decoding by ``transformers``' own ``generate``: plainly, with an assistant, by prompt lookup."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from treegraft_core import Pair, Round, Sampling
from treegraft_core.packed import head_size


class ScatteredHead(nn.Module):
    """A head whose columns are for ``tokens``, as logits over the target's vocabulary.

    Assisted generation compares columns by token id, so the columns must be the target's; the
    others get −∞, and columns beyond ``tokens``, which pad a vocabulary, are cut. That is one fill
    and one copy of a row, about 20 µs beside a pass of some ms.
    """

    tokens: Tensor

    def __init__(self, head: nn.Module, tokens: Tensor, size: int):
        super().__init__()
        self.head, self.size = head, size
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., size]``."""
        few = self.head(hidden)[..., : len(self.tokens)]
        full = few.new_full((*few.shape[:-1], self.size), -torch.inf)
        full[..., self.tokens] = few
        return full


def assistant_of(pair: Pair) -> PreTrainedModel:
    """Return the mid drafter as an assistant for ``generate``; it shares all weights.

    Its own generation defaults are not used, and its columns are the target's.
    """
    assistant = copy.copy(pair.mid)
    assistant._modules = dict(pair.mid._modules)
    assistant.generation_config = GenerationConfig(
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    size, own = pair.target_vocab, head_size(pair.mid)
    tokens = torch.arange(min(own, size))
    if pair.vocabulary is not None:
        tokens = pair.vocabulary.tokens
    if len(tokens) < size or own > size:
        head = ScatteredHead(pair.mid.get_output_embeddings(), tokens.to(pair.device), size)
        assistant.set_output_embeddings(head)
    # Equal sizes in the configs are what generate() knows one tokenizer by; loading checks it.
    assistant.config = copy.deepcopy(pair.mid.config)
    assistant.config.get_text_config().vocab_size = pair.target.config.get_text_config().vocab_size
    return assistant


class Arrivals(BaseStreamer):
    """Notes when tokens of an answer arrive, and how many."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then tokens as they are decoded."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Note the end of the answer."""
        self.times.append(time.perf_counter())


@dataclass
class Output:
    """New tokens, and the time of those after the first that arrived.

    Attributes
    ----------
    tokens : list of int
        New tokens, the end-of-sequence token included.
    counted : int
        Tokens decoded within ``ms``: all but those that came with the reading of the prompt.
    ms : float
        Time from the first arrival to the end.
    rounds : list of Round
        Of this project's decoders.
    """

    tokens: list[int] = field(default_factory=list)
    counted: int = 0
    ms: float = 0.0
    rounds: list[Round] = field(default_factory=list)


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return what ``generate`` takes for ``sampling``."""
    arguments: dict[str, Any] = {
        "do_sample": not sampling.greedy,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if not sampling.greedy:
        arguments |= {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
        }
    return arguments


def generate(
    pair: Pair, ids: Sequence[int], n_tokens: int, sampling: Sampling, **named: Any
) -> Output:
    """Run ``generate`` of the pair's target on one prompt."""
    arrivals = Arrivals()
    eos = list(pair.eos_token_ids)
    # A token that may be in the text would be taken for padding by the assistant.
    pad = eos[0] if eos else pair.target_vocab
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        read = torch.tensor([list(ids)], device=pair.device)
        out = pair.target.generate(
            read,
            attention_mask=torch.ones_like(read),
            max_new_tokens=n_tokens,
            eos_token_id=eos or None,
            pad_token_id=pad,
            streamer=arrivals,
            **sampling_arguments(sampling),
            **named,
        )
    tokens = out[0, len(ids) :].tolist()
    # The first thing to arrive is the prompt.
    first = arrivals.counts[1]
    ms = 1e3 * (arrivals.times[-1] - arrivals.times[1])
    return Output(tokens, max(0, len(tokens) - first), ms)
