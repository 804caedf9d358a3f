"""Training of a head (EAGLE-3) on the target's own generations.

A head's input at a token is the target's hidden states at the token before, in a draft its own
output there. So that it learns from what it will read, training unrolls a few steps, each on the
outputs of the last ("training-time test", arXiv 2503.01840): row t of step j reads token t + j and
the output of row t of step j − 1, and sees the entries of step 0 up to t and those of its own row
of the steps 1 … j, which are what a draft of j tokens from t sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.sequences import Sequences
from treegraft_core.errors import InputError
from treegraft_core.head import HeadConfig, TrainedHead
from treegraft_core.hidden import HiddenStates
from treegraft_core.student import layer_list


def build_head(target: PreTrainedModel, recipe: DictConfig, vocabulary: Tensor) -> TrainedHead:
    """Return a new head beside a target; embedding and output head are the target's.

    Float32, on the target's device. The layer starts as the target's last one on the last of the
    hidden states that it reads, as far as the shapes are the same, so that its output is at first
    about what the target's head reads. Other weights are drawn as the target's are: normal, with
    the standard deviation of its config.
    """
    text = target.config.get_text_config()
    size = int(text.hidden_size)
    width = int(recipe.head_dim)
    if size % width or size // width % int(recipe.kv_heads):
        raise InputError(
            f"drafter.head_dim={width}, drafter.kv_heads={recipe.kv_heads}: the target's width is "
            f"{size}; give a divisor of it, and a divisor of {size}/head_dim"
        )
    config = HeadConfig(
        hidden_size=size,
        intermediate_size=int(recipe.intermediate),
        target_hidden_size=size,
        heads=size // width,
        kv_heads=int(recipe.kv_heads),
        head_dim=width,
        layers=tuple(int(i) for i in recipe.layers),
        vocabulary=len(vocabulary),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-5)),
        rope={"rope_theta": float(recipe.rope_theta)},
        max_positions=int(text.max_position_embeddings),
    )
    HiddenStates(target, config.layers)
    head = TrainedHead(config, target.get_input_embeddings())
    deviation = float(getattr(text, "initializer_range", 0.02))
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=deviation)
    start_from(head, target)
    share_output_head(head, target, vocabulary)
    return head.to(target.device)


@torch.no_grad()
def start_from(head: TrainedHead, target: PreTrainedModel) -> None:
    """Give a new head the weights of the target's last layer that have a place in it."""
    name, _ = layer_list(target)
    last = f"{name}.{len(target.get_submodule(name)) - 1}"  # type: ignore[arg-type]
    source = {k: v.float() for k, v in target.state_dict().items() if k.startswith(last)}
    size = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] = torch.eye(size)
    own = head.midlayer.state_dict()
    for key, weight in own.items():
        # The norm of a layer's input is that of the features here; a projection reads them second.
        given = "input_layernorm.weight" if key == "hidden_norm.weight" else key
        theirs = source.get(f"{last}.{given}")
        if theirs is None or key == "input_layernorm.weight":
            continue
        if theirs.shape == weight.shape:
            weight.copy_(theirs)
        elif theirs.ndim == 2 and (len(theirs), 2 * theirs.shape[1]) == tuple(weight.shape):
            weight[:, size:] = theirs
    norm = target.state_dict().get(f"{name.rpartition('.')[0]}.norm.weight")
    if norm is not None and norm.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm)


def share_output_head(head: TrainedHead, target: PreTrainedModel, vocabulary: Tensor) -> None:
    """Give a head the target's output rows of its vocabulary, frozen."""
    weight = target.get_output_embeddings().weight
    rows = weight.detach()[vocabulary.to(weight.device)].to(head.dtype).clone()
    head.lm_head.weight = nn.Parameter(rows, requires_grad=False)


@dataclass
class Batch:
    """Sequences side by side, and their answers' rows.

    Attributes
    ----------
    tokens : Tensor, int64, shape ``[B, S]``
        Prompt + answer, filled up with 0.
    states : Tensor, shape ``[B, S, k · H]``
        The target's hidden states.
    start : Tensor, int64, shape ``[B]``
        Position of the first token of which a row predicts the next: the prompt's last.
    rows : Tensor, int64, shape ``[B]``
        Rows of each sequence: tokens whose successor is in the answer.
    """

    tokens: Tensor
    states: Tensor
    start: Tensor
    rows: Tensor


class Unrolled:
    """The loss of a head: KL to the target at each unrolled step, later steps for less.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen; its hidden states are computed when a batch needs them.
    data : Sequences
        Its generations.
    vocabulary : Tensor
        The draft vocabulary.
    vocab : int
        Rows of the target's head.
    recipe : DictConfig
        ``unroll``, ``decay``, ``max_length``, ``states_gb``.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        data: Sequences,
        vocabulary: Tensor,
        vocab: int,
        recipe: DictConfig,
    ):
        self.target, self.data, self.recipe = target, data, recipe
        self.index = torch.full((vocab,), -1, dtype=torch.long)
        self.index[vocabulary] = torch.arange(len(vocabulary))
        self._kept: dict[int, Tensor] = {}
        self._room = int(float(recipe.states_gb) * 2**30)

    def states(self, group: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
        """Return the target's hidden states of some sequences, bfloat16, shape ``[S, k · H]``.

        They are kept while there is room, since every epoch reads them again.
        """
        found: list[Tensor] = []
        for i in group:
            states = self._kept.get(i)
            if states is None:
                states = self._read(self.data.tokens[i][: int(self.recipe.max_length)], layers)
                if self._room >= 2 * states.numel():
                    self._room -= 2 * states.numel()
                    self._kept[i] = states
            found.append(states)
        return found

    @torch.no_grad()
    def _read(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        kept = HiddenStates(self.target, layers)
        body = self.target.get_decoder()
        with torch.inference_mode(), kept.watching(0):
            body(input_ids=tokens.long()[None].to(self.target.device), use_cache=False)
        places = torch.arange(len(tokens), device=self.target.device)
        with torch.inference_mode():
            return kept.at(places).to(torch.bfloat16).clone().cpu()

    def batch(self, group: Sequence[int], layers: Sequence[int]) -> Batch:
        """Return some sequences side by side, on the target's device."""
        limit = int(self.recipe.max_length)
        tokens = [self.data.tokens[i][:limit].long() for i in group]
        device = self.target.device
        pad = nn.utils.rnn.pad_sequence
        states = [s.float() for s in self.states(group, layers)]
        start = torch.tensor([self.data.prompt_length[i] - 1 for i in group])
        rows = (torch.tensor([len(t) for t in tokens]) - 1 - start).clamp_min(0)
        return Batch(
            pad(tokens, batch_first=True).to(device),
            pad(states, batch_first=True).to(device),
            start.to(device),
            rows.to(device),
        )

    def steps(self, head: TrainedHead, group: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return what the head predicts at each unrolled step.

        Returns
        -------
        list of (Tensor, Tensor, Tensor)
            For each step draft indices ``[n, k]`` (−1: outside the vocabulary) and log p of the
            target, and the head's log-probabilities ``[n, vocabulary]``.
        """
        batch = self.batch(group, head.hidden_layers)
        outputs = unroll(head, batch, int(self.recipe.unroll))
        found = []
        for step, output in enumerate(outputs):
            tokens, log_p = [], []
            take = torch.zeros(output.shape[:2], dtype=torch.bool)
            for row, (i, n) in enumerate(zip(group, batch.rows.tolist(), strict=True)):
                take[row, : max(0, n - step)] = True
                tokens.append(self.data.top_tokens[i][step : max(step, n)])
                log_p.append(self.data.top_log_p[i][step : max(step, n)])
            logits = head.logits(output[take.to(output.device)])
            index = self.index[torch.cat(tokens).long()].to(output.device)
            theirs = torch.cat(log_p).float().to(output.device)
            found.append((index, theirs, logits.float().log_softmax(-1)))
        return found

    def loss(self, head: TrainedHead, group: Sequence[int]) -> Tensor:
        """Mean KL in nats a token and step, step j weighted by ``decay`` to the power j."""
        losses = [divergence(*step) for step in self.steps(head, group)]
        weights = [float(self.recipe.decay) ** j for j in range(len(losses))]
        total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
        return total / sum(weights)  # type: ignore[return-value]

    @torch.no_grad()
    def agreement(self, head: TrainedHead, limit: int) -> dict[str, float]:
        """Share of positions whose target argmax is the head's top 1, or in its top 10.

        ``top1`` and ``top10`` are of step 1, which reads the target's hidden states, ``top1_2``,
        ``top10_2``, … of the steps after it, which read the head's own outputs.
        """
        sums = np.zeros((int(self.recipe.unroll), 4))
        for first in range(0, min(limit, len(self.data.tokens)), 8):
            group = list(range(first, min(first + 8, len(self.data.tokens), limit)))
            for step, (index, log_p, ours) in enumerate(self.steps(head, group)):
                if len(index):
                    hit = ours.topk(10, dim=-1).indices == index[:, :1]
                    kl = float(divergence(index, log_p, ours)) * len(index)
                    sums[step] += [len(index), float(hit[:, 0].sum()), float(hit.sum()), kl]
        rates = sums[:, 1:] / np.maximum(sums[:, :1], 1)
        found = {"top1": rates[0, 0], "top10": rates[0, 1], "kl": rates[0, 2]}
        found["tokens"] = sums[0, 0]
        for step, rate in enumerate(rates[1:], start=2):
            found |= {f"top1_{step}": rate[0], f"top10_{step}": rate[1]}
        return {name: float(value) for name, value in found.items()}


def divergence(index: Tensor, log_p: Tensor, ours: Tensor) -> Tensor:
    """Mean KL(target ‖ ours), nats, over the target's top tokens inside the draft vocabulary.

    Parameters
    ----------
    index : Tensor, shape ``[n, k]``
        The target's top tokens, by place in the draft vocabulary; −1 outside.
    log_p : Tensor, shape ``[n, k]``
        The target's log-probabilities.
    ours : Tensor, shape ``[n, vocabulary]``
        The drafter's.
    """
    inside = index >= 0
    use = inside.any(-1)
    index, inside = index[use], inside[use]
    if not len(index):
        return ours.sum() * 0.0
    log_p = log_p[use].masked_fill(~inside, -math.inf).log_softmax(-1)
    difference = log_p.masked_fill(~inside, 0.0) - ours[use].gather(1, index.clamp_min(0))
    return (log_p.exp() * difference).sum(-1).mean()


def unroll(head: TrainedHead, batch: Batch, steps: int) -> list[Tensor]:
    """Return the layer's output at every row of every step, each ``[B, R, H]``.

    Rows beyond a sequence's own, and rows whose token at a step lies beyond it, are rubbish.
    """
    layer, (b, s) = head.midlayer, batch.tokens.shape
    device = batch.tokens.device
    most = int(batch.rows.max())
    # Step 0: keys and values of every token but the first, from the target's hidden states.
    embeddings = head.embed(batch.tokens)
    features = functional.pad(head.fc(batch.states[:, :-1]), (0, 0, 1, 0))
    x, past = layer.enter(embeddings, features)
    place = torch.arange(s, device=device)
    keys, values = layer.keys(x, *head.turns(place.expand(b, s)))
    at = (batch.start[:, None] + torch.arange(most, device=device)).clamp(max=s - 1)  # [B, R]
    seen = (place <= at[..., None]) & (place > 0)  # [B, R, S]
    seen |= (place == 0) & (at[..., None] == 0)
    x, past = _rows(x, at), _rows(past, at)
    queries = layer.queries(x, *head.turns(at))
    own: list[tuple[Tensor, Tensor]] = []
    outputs = [layer.leave(_attend(queries, keys, values, seen, own), past)]
    for step in range(1, steps):
        now = (at + step).clamp(max=s - 1)
        x, past = layer.enter(_rows(embeddings, now), outputs[-1])
        turns = head.turns(at + step)
        own.append(layer.keys(x, *turns))
        queries = layer.queries(x, *turns)
        outputs.append(layer.leave(_attend(queries, keys, values, seen, own), past))
    return outputs


def _rows(values: Tensor, at: Tensor) -> Tensor:
    return values.gather(1, at[..., None].expand(*at.shape, values.shape[-1]))


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    # Softmax over the text's keys that are seen and the entries of the row's own draft.
    groups = queries.shape[-2] // keys.shape[-2]
    scale = queries.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(groups, -2) for t in (keys, values))
    scores = torch.einsum("brhd,bshd->bhrs", queries, keys)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    pairs = [(k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)) for k, v in own]
    drafts = [(queries * k).sum(-1).transpose(1, 2)[..., None] for k, _ in pairs]
    weights = (torch.cat([scores, *drafts], -1) * scale).softmax(-1)
    length = keys.shape[1]
    found = torch.einsum("bhrs,bshd->brhd", weights[..., :length], values)
    for j, (_, v) in enumerate(pairs):
        found = found + weights[..., length + j].transpose(1, 2)[..., None] * v
    return found


def trainable(head: TrainedHead) -> dict[str, Any]:
    """Return the weights that are trained and stored: all but embedding and output head."""
    return {name: p for name, p in head.named_parameters() if not name.startswith("lm_head.")}
