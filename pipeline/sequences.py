"""Data that a drafter is trained on: what the target itself generates.

The target answers the training prompts, and its top-k distribution at every token of an answer is
kept, one file a batch, so that a killed run continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.inputs import digest
from pipeline.texts import fingerprint, similar_length
from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path
from treegraft_core.models import cache_argument
from treegraft_core.prompts import chat_ids

KEY_LENGTH = 12
LENGTH_SLACK = 16


@dataclass(frozen=True)
class Job:
    """One answer to generate.

    ``ids`` is the templated prompt, ``temperature`` 0 is greedy, ``chat`` the conversation so far
    and ``rest`` the user turns that follow the answer.
    """

    ids: tuple[int, ...]
    temperature: float
    chat: tuple[tuple[str, str], ...] = ()
    rest: tuple[str, ...] = ()


@dataclass
class Sequences:
    """Generated sequences with the target's top-k distribution at every generated token.

    ``tokens[i]`` is prompt + answer, ``prompt_length[i]`` the tokens of the prompt,
    ``top_tokens[i]`` and ``top_log_p[i]`` have shape ``[answer tokens, k]`` (nats).
    """

    tokens: list[Tensor]
    prompt_length: list[int]
    top_tokens: list[Tensor]
    top_log_p: list[Tensor]


@torch.inference_mode()
def generate_batch(
    target: PreTrainedModel,
    jobs: Sequence[Job],
    eos: set[int],
    max_new_tokens: int,
    top_k: int,
    seed: int,
) -> Sequences:
    """Generate answers to ``jobs`` in one left-padded batch; finished rows leave the batch."""
    device = target.device
    generator = torch.Generator().manual_seed(seed)
    width = max(len(job.ids) for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    mask = torch.zeros(len(jobs), width, dtype=torch.long)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.ids) :] = torch.tensor(job.ids)
        mask[row, width - len(job.ids) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=target.config)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    answers: list[list[int]] = [[] for _ in jobs]
    top_tokens: list[list[Tensor]] = [[] for _ in jobs]
    top_log_p: list[list[Tensor]] = [[] for _ in jobs]
    alive = list(range(len(jobs)))
    for _ in range(max_new_tokens):
        logits = target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            logits_to_keep=1,
            **{cache_argument(target): cache},
        ).logits[:, -1]
        log_p = logits.float().log_softmax(-1).cpu()
        values, indices = log_p.topk(top_k, dim=-1)
        temperature = torch.tensor([jobs[i].temperature for i in alive])
        sampled = torch.multinomial(
            (values / temperature.clamp_min(1e-4)[:, None]).softmax(-1), 1, generator=generator
        )[:, 0]
        pick = torch.where(temperature > 0, sampled, torch.zeros_like(sampled))
        chosen = indices.gather(1, pick[:, None])[:, 0]
        keep = []
        for row, i in enumerate(alive):
            token = int(chosen[row])
            answers[i].append(token)
            top_tokens[i].append(indices[row].to(torch.int32))
            top_log_p[i].append(values[row].to(torch.float16))
            if token not in eos:
                keep.append(row)
        if not keep:
            break
        if len(keep) < len(alive):
            rows = torch.tensor(keep, device=device)
            cache.batch_select_indices(rows)
            mask, position, chosen = mask[rows], position[rows], chosen[torch.tensor(keep)]
            alive = [alive[row] for row in keep]
        ids = chosen[:, None].to(device)
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        position = position[:, -1:] + 1
    return Sequences(
        tokens=[
            torch.tensor([*job.ids, *a], dtype=torch.int32)
            for job, a in zip(jobs, answers, strict=True)
        ],
        prompt_length=[len(job.ids) for job in jobs],
        top_tokens=[torch.stack(t) for t in top_tokens],
        top_log_p=[torch.stack(t) for t in top_log_p],
    )


def save_sequences(path: Path, data: Sequences) -> None:
    """Write one generated batch as safetensors."""
    tensors = {
        "tokens": torch.cat(data.tokens),
        "length": torch.tensor([len(t) for t in data.tokens]),
        "prompt_length": torch.tensor(data.prompt_length),
        "top_tokens": torch.cat(data.top_tokens),
        "top_log_p": torch.cat(data.top_log_p),
    }
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


def load_sequences(paths: Sequence[Path]) -> Sequences:
    """Read batches written by :func:`save_sequences`."""
    data = Sequences([], [], [], [])
    for path in paths:
        part = load_file(path)
        length, prompt = part["length"].tolist(), part["prompt_length"].tolist()
        data.tokens += part["tokens"].split(length)
        data.prompt_length += prompt
        answer = [n - p for n, p in zip(length, prompt, strict=True)]
        data.top_tokens += part["top_tokens"].split(answer)
        data.top_log_p += part["top_log_p"].split(answer)
    return data


def first_job(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> Job:
    """Return the job of a prompt's first turn."""
    return next_job(tokenizer, Job((), 0.0, (), tuple(turns)), None)


def next_job(tokenizer: PreTrainedTokenizerBase, job: Job, answer: str | None) -> Job:
    """Return the job of the next user turn; ``answer`` is the reply to the last, None at first."""
    chat = job.chat if answer is None else (*job.chat, ("assistant", answer))
    chat = (*chat, ("user", job.rest[0]))
    ids = chat_ids(tokenizer, [{"role": role, "content": text} for role, text in chat])
    return replace(job, ids=tuple(ids), chat=chat, rest=job.rest[1:])


def plan_jobs(
    jobs: Sequence[Job], temperatures: Sequence[float], batch: int, tokens: int, seed: int
) -> list[list[Job]]:
    """Shuffle prompt x temperature into batches of similar prompt length.

    Every prompt appears once before any appears again, so that stopping at a token budget leaves
    the most varied data.
    """
    rng = np.random.default_rng(seed)
    plan: list[list[Job]] = []
    for turn in range(len(temperatures)):
        round_ = [
            replace(job, temperature=temperatures[(n + turn) % len(temperatures)])
            for n, job in enumerate(jobs)
        ]
        chunks = similar_length(round_, lambda job: job.ids, batch, LENGTH_SLACK, tokens)
        plan += [chunks[i] for i in rng.permutation(len(chunks))]
    return plan


def generate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[str]],
    eos: set[int],
    folder: Path,
    conf: DictConfig,
) -> tuple[Sequences, Sequences]:
    """Generate (or read back) held-out and training sequences; one file a batch.

    The second turn of a prompt is generated after its first answer, as soon as a batch of such
    turns has come together.
    """
    order = np.random.default_rng(conf.seed).permutation(len(prompts))
    jobs = [first_job(tokenizer, prompts[i]) for i in order]
    jobs = [job for job in jobs if len(job.ids) <= conf.max_prompt_tokens]
    held, rest = jobs[: conf.held_out_prompts], jobs[conf.held_out_prompts :]
    queue = [
        ("held", batch)
        for batch in plan_jobs(held, [0.0], conf.batch, conf.batch_tokens, conf.seed)
    ]
    queue += [
        ("train", batch)
        for batch in plan_jobs(
            rest, list(conf.temperatures), conf.batch, conf.batch_tokens, conf.seed
        )
    ]
    paths: dict[str, list[Path]] = {"held": [], "train": []}
    waiting: dict[str, list[Job]] = {"held": [], "train": []}
    tokens = number = 0
    with tqdm(total=conf.tokens, unit="tok", desc="generate") as bar:
        while queue and tokens < conf.tokens:
            kind, batch = queue.pop(0)
            path = folder / f"{kind}-{number:05d}.safetensors"
            if not path.exists():
                save_sequences(
                    path,
                    generate_batch(
                        target, batch, eos, conf.max_new_tokens, conf.top_k, conf.seed + number
                    ),
                )
            number += 1
            paths[kind].append(path)
            data = load_sequences([path])
            if kind == "train":
                new = sum(len(t) for t in data.top_tokens)
                tokens += new
                bar.update(new)
            for job, ids in zip(batch, data.tokens, strict=True):
                if job.rest:
                    answer = tokenizer.decode(ids[len(job.ids) :], skip_special_tokens=True)
                    follow_up = next_job(tokenizer, job, answer)
                    if len(follow_up.ids) <= conf.max_prompt_tokens:
                        waiting[kind].append(follow_up)
            if len(waiting[kind]) >= conf.batch or (
                waiting[kind] and not any(k == kind for k, _ in queue)
            ):
                queue.insert(0, (kind, waiting[kind][: conf.batch]))
                waiting[kind] = waiting[kind][conf.batch :]
    if not paths["train"] or not paths["held"]:
        raise InputError(
            f"drafter.tokens={conf.tokens}, drafter.held_out_prompts={conf.held_out_prompts}: "
            f"{len(prompts)} prompts leave nothing to train or to test on; raise them"
        )
    return load_sequences(paths["held"]), load_sequences(paths["train"])


def choose_vocabulary(data: Sequences, size: int, vocab: int, always: set[int]) -> Tensor:
    """Return the ``size`` tokens with the most target probability, ascending; ``always`` kept."""
    mass = torch.zeros(vocab, dtype=torch.float64)
    for tokens, log_p in zip(data.top_tokens, data.top_log_p, strict=True):
        mass.index_add_(0, tokens.flatten().long(), log_p.flatten().double().exp())
    mass[sorted(always)] = math.inf
    return mass.topk(min(size, vocab)).indices.sort().values


def outside_mass(data: Sequences, vocabulary: Tensor, vocab: int) -> float:
    """Mean probability that the target puts outside ``vocabulary`` (top-k tail counted inside)."""
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[vocabulary] = True
    tokens = torch.cat(data.top_tokens).long()
    p = torch.cat(data.top_log_p).float().exp()
    return float((p * ~inside[tokens]).sum(-1).mean())


def batches(
    data: Sequences, tokens_per_batch: int, max_length: int, seed: int
) -> Iterator[list[int]]:
    """Yield index lists of similar length for ever, reshuffled every epoch; deterministic."""
    length = np.minimum([len(t) for t in data.tokens], max_length)
    epoch = 0
    while True:
        rng = np.random.default_rng([seed, epoch])
        order = np.argsort(length + rng.uniform(0, 24, len(length)))
        group: list[int] = []
        groups: list[list[int]] = []
        for i in order:
            if group and (len(group) + 1) * length[i] > tokens_per_batch:
                groups.append(group)
                group = []
            group.append(int(i))
        groups.append(group)
        for g in rng.permutation(len(groups)):
            yield groups[g]
        epoch += 1


def generations_key(
    conf: DictConfig,
    prompts: Sequence[Sequence[str]],
    path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Digest of what decides the generated data: students that agree in it share the data."""
    names = (
        "temperatures",
        "max_new_tokens",
        "max_prompt_tokens",
        "batch",
        "batch_tokens",
        "top_k",
        "held_out_prompts",
        "seed",
    )
    recipe = {n: OmegaConf.to_container(conf)[n] for n in names}  # type: ignore[index,call-overload]
    source = [path, fingerprint(target), tokenizer.chat_template]
    return digest([recipe, [list(p) for p in prompts], source], KEY_LENGTH)
