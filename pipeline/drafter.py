"""stage=drafter: make a mid drafter for the target: a depth-pruned student of it, or a head on it.

Three steps, each of which continues where a killed run stopped: the target generates answers to
the training prompts and its top-k distributions are kept (one file a batch); the draft vocabulary
is the set of tokens that carry most of its probability; the drafter is trained on the
Kullback-Leibler divergence to those distributions with embedding and output head frozen.
"""

from __future__ import annotations

import csv
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.head_training import Unrolled, build_head, divergence, trainable
from pipeline.inputs import digest
from pipeline.report import stage_run
from pipeline.sequences import (
    KEY_LENGTH,
    Sequences,
    batches,
    choose_vocabulary,
    generate,
    generations_key,
    outside_mass,
)
from pipeline.tasks import held_out_tasks
from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_text
from treegraft_core.head_layouts import save_head
from treegraft_core.hidden import HiddenStates
from treegraft_core.pair import eos_tokens, load_target
from treegraft_core.prompts import read_prompts
from treegraft_core.student import (
    DraftVocabulary,
    build_student,
    own_state,
    save_student,
    student_config,
)

log = logging.getLogger(__name__)

KINDS = ("student", "head")


class Objective(Protocol):
    """What a drafter is trained on and judged by."""

    data: Sequences

    def loss(self, model: Any, group: Sequence[int]) -> Tensor:
        """Return the loss on some sequences."""
        ...

    def agreement(self, model: Any, limit: int) -> dict[str, float]:
        """Return how well the drafter agrees with the target on the first ``limit`` sequences."""
        ...


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
        return divergence(*self.outputs(student, group))

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
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    train: Objective,
    held: Objective,
    folder: Path,
    conf: DictConfig,
    report: Callable[[dict[str, float], int], None],
) -> list[dict[str, float]]:
    """Train until ``conf.steps``; checkpoint and continue from ``folder/checkpoint.pt``."""
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
        model.load_state_dict(saved["student"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        first, history = int(saved["step"]), list(saved["history"])
        log.info("continuing at step %d", first)
    stream = batches(train.data, conf.tokens_per_batch, conf.max_length, conf.seed)
    for _ in range(first):
        next(stream)
    model.train()
    started = time.monotonic()
    bar = tqdm(range(first, conf.steps), initial=first, total=conf.steps, desc="train")
    running: list[float] = []
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, int(conf.schedule_steps), conf.learning_rate, conf.warmup
            )
        loss = train.loss(model, next(stream))
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
                **held.agreement(model, conf.held_out_prompts if last else conf.evaluate_limit),
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


def check_drafter(conf: DictConfig) -> None:
    """Say what is wrong with the recipe before anything is loaded."""
    if conf.kind not in KINDS:
        raise InputError(f"drafter.kind={conf.kind}: choose one of {', '.join(KINDS)}")
    if conf.kind == "head" and (int(conf.unroll) < 1 or not conf.layers):
        raise InputError(
            f"drafter.unroll={conf.unroll}, drafter.layers={list(conf.layers)}: a head is unrolled "
            "1 step at least and reads 1 layer at least"
        )
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


HEAD_CARD = """# {name}

A mid drafter for speculative decoding: one transformer layer on the hidden states of `{target}`
(the layout of EAGLE-3, arXiv 2503.01840), trained by this project's `stage=drafter drafter=head`.

- **What is here.** `head.safetensors` (bf16): the layer, the fusion of what the target's layers
  {layers} read, the norm, and the list of {vocabulary:,} tokens that its output head covers.
  Embedding and output head are the target's and are not stored. `recipe.yaml` is the configuration
  that made it, `train_log.csv` its training log.
- **Data.** {train_tokens:,} tokens that the target itself generated (temperatures {temperatures})
  on `{prompts}`; no benchmark prompt.
- **Loss.** KL(target ‖ head) over the target's top {top_k} tokens inside the draft vocabulary, at
  {unroll} unrolled steps, each on the outputs of the last, step j weighted by {decay}^j; embedding
  and output head frozen; {steps} steps of about {tokens_per_batch:,} tokens.
- **Held-out agreement** with the target's argmax on {held_tokens:,} tokens of greedy generations to
  {held_prompts} held-out prompts, on the target's hidden states: top-1 **{top1:.3f}**, top-10
  **{top10:.3f}**, KL {kl:.3f} nats; {later}. A greedy token outside the draft vocabulary counts as
  a miss.
- **Outside the vocabulary** a token gets log p = {floor:.3f} nats, the log of the probability mass
  that the target puts outside it on held-out generations.
- **Limits.** It only proposes; the target verifies every token, so it changes speed and never the
  output. It is weak on topics and languages that the training prompts lack.
- **Licence.** {licence}
"""


def run(conf: DictConfig) -> None:
    """Train the configured drafter of the target and write it with its recipe, log and card."""
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
            bool(conf.engine.trust_remote_code),
        )
        check_layers(target, recipe)
        vocab = int(target.get_output_embeddings().weight.shape[0])
        eos = set(eos_tokens(target, tokenizer))
        key = generations_key(recipe, prompts, str(conf.pair.target.path), target, tokenizer)
        data = Path(conf.paths.cache) / "drafter" / f"generations-{key}"
        held, train = generate(target, tokenizer, prompts, eos, data, recipe)
        tokens = choose_vocabulary(train, int(recipe.vocabulary), vocab, eos)
        floor = math.log(max(outside_mass(held, tokens, vocab), 1e-6))
        torch.manual_seed(int(recipe.seed))
        training = digest([OmegaConf.to_container(recipe, resolve=True), key], KEY_LENGTH)
        made = start(target, recipe, tokens, (train, held), vocab)
        history = fit(*made, work / f"training-{training}", recipe, stage.log)
        final = history[-1]
        figures = {name: v for name, v in final.items() if name.startswith(("top", "kl"))} | {
            "train_tokens": sum(len(t) for t in train.top_tokens),
            "held_tokens": int(final["tokens"]),
        }
        meta = {"target": str(conf.pair.target.path), "layers": list(recipe.layers), **figures}
        save = save_head if recipe.kind == "head" else save_student
        save(folder, made[0], DraftVocabulary(tokens, floor), meta)
        write_log(folder / "train_log.csv", history)
        write_text(folder / "recipe.yaml", OmegaConf.to_yaml(recipe, resolve=True))
        write_text(folder / "README.md", card(conf, figures, floor))
        stage.show("training", [{k: float(v) for k, v in row.items()} for row in history[-12:]])
        stage.metrics |= figures
        stage.wrote(folder)


def check_layers(target: PreTrainedModel, recipe: DictConfig) -> None:
    """Say before anything is generated if the target lacks a layer of the recipe."""
    if recipe.kind == "head":
        HiddenStates(target, list(recipe.layers))
    else:
        student_config(target, list(recipe.layers))


def start(
    target: PreTrainedModel,
    recipe: DictConfig,
    vocabulary: Tensor,
    data: tuple[Sequences, Sequences],
    vocab: int,
) -> tuple[Any, dict[str, nn.Parameter], Objective, Objective]:
    """Return a new drafter, its weights that are trained, and its objectives.

    ``data`` are the sequences to train on and the held-out ones, in which order the objectives are.
    """
    if recipe.kind == "head":
        head = build_head(target, recipe, vocabulary)
        ours, theirs = (Unrolled(target, part, vocabulary, vocab, recipe) for part in data)
        return head, trainable(head), ours, theirs
    student = build_student(target, list(recipe.layers), vocabulary)
    named = own_state(student)
    length = int(recipe.max_length)
    mine, held = (Distillation(part, vocabulary, vocab, length) for part in data)
    parameters = {name: p for name, p in student.named_parameters() if name in named}
    return student, parameters, mine, held


def card(conf: DictConfig, figures: dict[str, Any], floor: float) -> str:
    """Return the model card."""
    recipe = conf.drafter
    embedded = str(conf.pair.target.path).startswith("embedded:")
    head = recipe.kind == "head"
    own: dict[str, Any] = {"n_layers": len(recipe.layers)}
    if head:
        own = {"unroll": recipe.unroll, "decay": recipe.decay, "later": later_steps(figures)}
    return (HEAD_CARD if head else CARD).format(
        name=recipe.name,
        target="SmolLM2-135M-Instruct" if embedded else conf.pair.target.path,
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
        **own,
    )


def later_steps(figures: Mapping[str, float]) -> str:
    """Say how a head agrees with the target in drafts, on its own outputs."""
    steps = [n for n in range(2, 100) if f"top1_{n}" in figures]
    each = [f"{figures[f'top1_{n}']:.3f} and {figures[f'top10_{n}']:.3f}" for n in steps]
    names = [f"step {n}" for n in steps]
    return (
        "in drafts, on its own outputs, top-1 and top-10 are "
        + ", ".join(f"{value} at {name}" for name, value in zip(names, each, strict=True))
        if steps
        else "it was not unrolled"
    )
