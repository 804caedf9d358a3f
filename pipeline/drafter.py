"""stage=drafter: distil a depth-pruned student of the target into a mid drafter.

Three steps, each of which continues where a killed run stopped: the target generates answers to
the training prompts and its top-k distributions are kept (one file a batch); the draft vocabulary
is the set of tokens that carry most of its probability; the student is trained on the
Kullback-Leibler divergence to those distributions with embedding and head frozen.
"""

from __future__ import annotations

import csv
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.inputs import digest
from pipeline.report import stage_run
from pipeline.tasks import held_out_tasks
from pipeline.texts import fingerprint, similar_length
from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_text
from treegraft_core.models import cache_argument
from treegraft_core.pair import eos_tokens, load_target
from treegraft_core.prompts import chat_ids, read_prompts
from treegraft_core.student import (
    DraftVocabulary,
    build_student,
    own_state,
    save_student,
    student_config,
)

log = logging.getLogger(__name__)

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


class Distillation:
    """The student's loss: KL(target || student) over the draft vocabulary at generated tokens."""

    def __init__(self, data: Sequences, vocabulary: Tensor, vocab: int, max_length: int):
        self.data = data
        self.max_length = max_length
        self.index = torch.full((vocab,), -1, dtype=torch.long)
        self.index[vocabulary] = torch.arange(len(vocabulary))

    def _pack(self, group: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # ids: [B, S]; where: [B, S] predicting positions; tokens, log_p: [n, k]
        cut = [self.data.tokens[i][: self.max_length] for i in group]
        width = max(len(t) for t in cut)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        where = torch.zeros(len(group), width, dtype=torch.bool)
        tokens, log_p = [], []
        for row, (i, t) in enumerate(zip(group, cut, strict=True)):
            ids[row, : len(t)] = t
            start = self.data.prompt_length[i] - 1
            n = max(0, len(t) - 1 - start)
            where[row, start : start + n] = True
            tokens.append(self.data.top_tokens[i][:n])
            log_p.append(self.data.top_log_p[i][:n])
        return ids, where, torch.cat(tokens).long(), torch.cat(log_p).float()

    def outputs(self, student: PreTrainedModel, group: Sequence[int]) -> tuple[Tensor, ...]:
        """Return draft indices ``[n, k]`` (−1 outside), target log p ``[n, k]``, student log p."""
        ids, where, tokens, log_p = self._pack(group)
        device = student.device
        logits = student(input_ids=ids.to(device), use_cache=False).logits[where.to(device)]
        return self.index[tokens].to(device), log_p.to(device), logits.float().log_softmax(-1)

    def loss(self, student: PreTrainedModel, group: Sequence[int]) -> Tensor:
        """Mean KL in nats a token, over the target's top-k tokens inside the draft vocabulary."""
        index, log_p, student_log_p = self.outputs(student, group)
        inside = index >= 0
        use = inside.any(-1)
        index, log_p, inside = index[use], log_p[use], inside[use]
        log_p = log_p.masked_fill(~inside, -math.inf).log_softmax(-1)
        p = log_p.exp()
        difference = log_p.masked_fill(~inside, 0.0) - student_log_p[use].gather(
            1, index.clamp_min(0)
        )
        return (p * difference).sum(-1).mean()

    @torch.no_grad()
    def agreement(self, student: PreTrainedModel, limit: int) -> dict[str, float]:
        """Share of positions whose target argmax is the student's top 1, or in its top 10."""
        student.eval()
        counts = np.zeros(3)
        total_kl = 0.0
        for start in range(0, min(limit, len(self.data.tokens)), 8):
            group = list(range(start, min(start + 8, len(self.data.tokens), limit)))
            index, _, student_log_p = self.outputs(student, group)
            first = index[:, :1]
            top = student_log_p.topk(10, dim=-1).indices
            hit = top == first
            counts += [len(first), float(hit[:, 0].sum()), float(hit.any(-1).sum())]
            total_kl += float(self.loss(student, group)) * len(first)
        student.train()
        return {
            "top1": float(counts[1] / counts[0]),
            "top10": float(counts[2] / counts[0]),
            "kl": float(total_kl / counts[0]),
            "tokens": float(counts[0]),
        }


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then cosine to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def fit(
    student: PreTrainedModel,
    train: Distillation,
    held: Distillation,
    folder: Path,
    conf: DictConfig,
    report: Callable[[dict[str, float], int], None],
) -> list[dict[str, float]]:
    """Train until ``conf.steps``; checkpoint and continue from ``folder/checkpoint.pt``."""
    named = own_state(student)
    parameters = {n: p for n, p in student.named_parameters() if n in named}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1]},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=conf.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=conf.weight_decay,
    )
    checkpoint = folder / "checkpoint.pt"
    history: list[dict[str, float]] = []
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        student.load_state_dict(saved["student"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        first, history = int(saved["step"]), list(saved["history"])
        log.info("continuing at step %d", first)
    stream = batches(train.data, conf.tokens_per_batch, conf.max_length, conf.seed)
    for _ in range(first):
        next(stream)
    student.train()
    started = time.monotonic()
    bar = tqdm(range(first, conf.steps), initial=first, total=conf.steps, desc="train")
    running: list[float] = []
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, conf.steps, conf.learning_rate, conf.warmup)
        loss = train.loss(student, next(stream))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        running.append(float(loss.detach()))
        bar.set_postfix(kl=f"{np.mean(running[-20:]):.3f}")
        last = step + 1 == conf.steps
        if last or (step + 1) % conf.evaluate_every == 0:
            row = {
                "step": step + 1,
                "train_kl": float(np.mean(running)),
                "seconds": time.monotonic() - started,
                **held.agreement(student, conf.held_out_prompts if last else conf.evaluate_limit),
            }
            history.append(row)
            running = []
            report({f"drafter/{k}": float(v) for k, v in row.items()}, step + 1)
            bar.write(
                f"step {row['step']:5.0f}  train KL {row['train_kl']:.3f}  held-out KL "
                f"{row['kl']:.3f}  top-1 {row['top1']:.3f}  top-10 {row['top10']:.3f}"
            )
            with atomic_path(checkpoint) as temporary:
                torch.save(
                    {
                        "student": {n: p.detach() for n, p in parameters.items()},
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                        "history": history,
                    },
                    temporary,
                )
    return history


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


def check_drafter(conf: DictConfig) -> None:
    """Say what is wrong with the recipe before anything is loaded."""
    for name in ("steps", "tokens", "batch", "vocabulary", "held_out_prompts", "evaluate_every"):
        if int(conf[name]) < 1:
            raise InputError(f"drafter.{name}={conf[name]}: must be at least 1")
    if not conf.temperatures or any(t < 0 for t in conf.temperatures):
        raise InputError(
            f"drafter.temperatures={list(conf.temperatures)}: give one or more, each 0 or higher"
        )


def read_train_prompts(conf: DictConfig) -> list[tuple[str, ...]]:
    """Return the turns of the drafter's prompts.

    Raises
    ------
    InputError
        If the file cannot be read, or it or a category in it is a held-out task's.
    """
    path = Path(conf.drafter.prompts)
    prompts = read_prompts(path)
    held_out = {path.stem, *(p.category for p in prompts)} & set(held_out_tasks(conf))
    if held_out:
        raise InputError(
            f"drafter.prompts={path}: prompts of {min(held_out)}, which nothing is fitted on; give "
            "other prompts, or take it out of held_out_tasks"
        )
    return [p.turns for p in prompts]


def write_log(path: Path, history: Sequence[dict[str, float]]) -> None:
    """Write the training log as CSV."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows({k: round(v, 5) for k, v in row.items()} for row in history)


CARD = """# {name}

A mid drafter for speculative decoding: a {n_layers}-layer depth-pruned student of `{target}`,
distilled by this project's `stage=drafter`.

- **What is here.** `student.safetensors` (bf16): {n_layers} transformer layers and the final norm,
  started from the target's layers {layers}, and the list of {vocabulary:,} tokens that its head
  covers. Embedding and head are the target's and are not stored. `recipe.yaml` is the
  configuration that made it, `train_log.csv` its training log.
- **Data.** {train_tokens:,} tokens that the target itself generated (temperatures {temperatures})
  on `{prompts}`; no benchmark prompt.
- **Loss.** KL(target ‖ student) over the target's top {top_k} tokens inside the draft vocabulary,
  embedding and head frozen; {steps} steps of about {tokens_per_batch:,} tokens.
- **Held-out agreement** with the target's argmax on {held_tokens:,} tokens of greedy generations to
  {held_prompts} held-out prompts: top-1 **{top1:.3f}**, top-10 **{top10:.3f}**, KL {kl:.3f} nats.
  A greedy token outside the draft vocabulary counts as a miss.
- **Outside the vocabulary** a token gets log p = {floor:.3f} nats, the log of the probability mass
  that the target puts outside it on held-out generations.
- **Limits.** It only proposes; the target verifies every token, so it changes speed and never the
  output. It is weak on topics and languages that the training prompts lack.
- **Licence.** {licence}
"""


def run(conf: DictConfig) -> None:
    """Distil a student of the configured target and write it with its recipe, log and card."""
    recipe = conf.drafter
    check_drafter(recipe)
    prompts = read_train_prompts(conf)
    folder, work = Path(recipe.folder), Path(recipe.work)
    with stage_run(conf, "drafter", work) as stage:
        stage.read(recipe.prompts, f"{len(prompts)} prompts")
        if conf.engine.threads:
            torch.set_num_threads(int(conf.engine.threads))
        target, tokenizer = load_target(
            str(conf.pair.target.path),
            str(conf.engine.device),
            "float32",
            Path(conf.paths.cache) / "models",
        )
        student_config(target, list(recipe.layers))
        vocab = int(target.get_output_embeddings().weight.shape[0])
        eos = set(eos_tokens(target, tokenizer))
        key = generations_key(recipe, prompts, str(conf.pair.target.path), target, tokenizer)
        data = Path(conf.paths.cache) / "drafter" / f"generations-{key}"
        held, train = generate(target, tokenizer, prompts, eos, data, recipe)
        tokens = choose_vocabulary(train, int(recipe.vocabulary), vocab, eos)
        floor = math.log(max(outside_mass(held, tokens, vocab), 1e-6))
        torch.manual_seed(int(recipe.seed))
        student = build_student(target, list(recipe.layers), tokens)
        length = int(recipe.max_length)
        training = digest([OmegaConf.to_container(recipe, resolve=True), key], KEY_LENGTH)
        history = fit(
            student,
            Distillation(train, tokens, vocab, length),
            Distillation(held, tokens, vocab, length),
            work / f"training-{training}",
            recipe,
            stage.log,
        )
        final = history[-1]
        figures = {
            "top1": final["top1"],
            "top10": final["top10"],
            "kl": final["kl"],
            "train_tokens": sum(len(t) for t in train.top_tokens),
            "held_tokens": int(final["tokens"]),
        }
        save_student(
            folder,
            student,
            DraftVocabulary(tokens, floor),
            {"target": str(conf.pair.target.path), "layers": list(recipe.layers), **figures},
        )
        write_log(folder / "train_log.csv", history)
        write_text(folder / "recipe.yaml", OmegaConf.to_yaml(recipe, resolve=True))
        write_text(folder / "README.md", card(conf, figures, floor))
        stage.show("training", [{k: float(v) for k, v in row.items()} for row in history[-12:]])
        stage.metrics |= figures
        stage.wrote(folder)


def card(conf: DictConfig, figures: dict[str, Any], floor: float) -> str:
    """Return the model card."""
    recipe = conf.drafter
    embedded = str(conf.pair.target.path).startswith("embedded:")
    return CARD.format(
        name=recipe.name,
        target="SmolLM2-135M-Instruct" if embedded else conf.pair.target.path,
        n_layers=len(recipe.layers),
        layers=", ".join(map(str, recipe.layers)),
        vocabulary=int(recipe.vocabulary),
        temperatures=", ".join(map(str, recipe.temperatures)),
        prompts=recipe.prompts,
        top_k=recipe.top_k,
        steps=recipe.steps,
        tokens_per_batch=recipe.tokens_per_batch,
        held_prompts=recipe.held_out_prompts,
        floor=floor,
        licence="Apache-2.0, as its target's." if embedded else "As its target's.",
        **figures,
    )
