"""The target's own greedy output on prompts, with its log-probabilities: where states lie."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from pipeline.inputs import digest
from pipeline.tasks import TaskPrompt
from treegraft_core import Context, DraftingConfig, InputError, Pair
from treegraft_core.files import atomic_path
from treegraft_core.models import CachedModel
from treegraft_core.prompts import chat_ids
from treegraft_core.verify import token_log_p

SAMPLED_WEIGHTS = 4096
LENGTH_SLACK = 64

Job = TypeVar("Job")


@dataclass
class Text:
    """One turn: prompt and the target's greedy continuation, which goes on past its end.

    Attributes
    ----------
    task, prompt_id : str
        Where it comes from.
    turn : int
        0 for the first user turn.
    tokens : list of int
        Prompt, answer, and enough greedy tokens after it that every draft path from a state of
        the answer has a known continuation.
    prompt_tokens, answer_tokens : int
        Their numbers; the answer ends with EOS or at the limit.
    log_p : list of float
        The target's log-probability of each token from its top-W table, nats; 0 for the first.
    """

    task: str
    prompt_id: str
    turn: int
    tokens: list[int]
    prompt_tokens: int
    answer_tokens: int
    log_p: list[float]

    def context(self, max_ngram: int) -> Context:
        """Return the text as a context that states read a prefix of."""
        return Context(self.tokens, self.log_p, max_ngram)

    def roots(self) -> range:
        """Positions of the tokens that can be the root of a round."""
        return range(self.prompt_tokens, self.prompt_tokens + self.answer_tokens - 1)


def reach(config: DraftingConfig) -> int:
    """Return the greatest depth of a draft path, plus one for the bonus token."""
    return config.deepest + 1


@torch.inference_mode()
def _continue(pair: Pair, prompts: Sequence[Sequence[int]], n_new: int) -> list[list[int]]:
    width = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, p in enumerate(prompts):
        ids[row, width - len(p) :] = torch.tensor(p)
        mask[row, width - len(p) :] = 1
    out = pair.target.generate(
        input_ids=ids.to(pair.device),
        attention_mask=mask.to(pair.device),
        generation_config=GenerationConfig(
            max_new_tokens=n_new,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=pair.target_vocab,  # no such token: it is cut at EOS afterwards
            pad_token_id=0,
        ),
    )
    return out[:, width:].tolist()


def greedy_texts(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    max_new_tokens: int,
    batch: int,
    config: DraftingConfig,
    cache: Path | None = None,
) -> tuple[list[Text], int]:
    """Decode all turns greedily in batches and read their log-probabilities.

    The continuation comes from batched decoding and is then read once more in one pass a text.
    Where the two differ (a tie within rounding) the text is cut before the difference. A turn that
    does not fit the context with room for an answer is left out, with those that follow it
    (`left_out`); a note names it.

    Returns
    -------
    texts : list of Text
        In the order of the prompts; a two-turn prompt gives two.
    cut : int
        Texts cut at a tie.

    Raises
    ------
    InputError
        If no prompt of a task fits.
    """
    if max_new_tokens < 2:
        raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 2")
    key = _digest(pair, prompts, max_new_tokens, config)
    file = cache / f"texts-{key}.safetensors" if cache else None
    if file is not None and file.is_file():
        texts, cut = _load(file)
    else:
        texts, cut = _decode(pair, prompts, max_new_tokens, batch, config)
        if file is not None:
            _save(file, texts, cut)
    room = pair.max_context - max_new_tokens - reach(config) - 1
    for p, turn in left_out(prompts, texts).items():
        print(
            f"note: {_where(p, turn)}: left out; it is longer than the {room} tokens that the "
            f"context of {pair.max_context} leaves beside an answer"
        )
    return texts, cut


def left_out(prompts: Sequence[TaskPrompt], texts: Sequence[Text]) -> dict[TaskPrompt, int]:
    """Return the prompts that are not wholly among ``texts``, each with its first missing turn."""
    turns = Counter((t.task, t.prompt_id) for t in texts)
    known = {p: turns[p.task, p.prompt.question_id] for p in prompts}
    return {p: n for p, n in known.items() if n < len(p.prompt.turns)}


def _where(p: TaskPrompt, turn: int) -> str:
    return f"task={p.task}, question_id={p.prompt.question_id}, turn {turn + 1}"


def _decode(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    max_new_tokens: int,
    batch: int,
    config: DraftingConfig,
) -> tuple[list[Text], int]:
    extra = reach(config)
    room = pair.max_context - max_new_tokens - extra - 1
    chats: dict[int, list[dict[str, str]]] = {i: [] for i in range(len(prompts))}
    found: list[tuple[int, int, Text]] = []
    cut = 0
    for turn in range(max(len(p.prompt.turns) for p in prompts)):
        jobs = _jobs(pair, prompts, chats, turn, room)
        chunks = similar_length(jobs, lambda job: job[1], batch, LENGTH_SLACK)
        for chunk in tqdm(chunks, desc=f"decode turn {turn + 1}", unit="batch"):
            answers = _continue(pair, [ids for _, ids in chunk], max_new_tokens + extra)
            for (i, ids), answer in zip(chunk, answers, strict=True):
                n = _answer_length(answer, pair.eos_token_ids, max_new_tokens)
                p = prompts[i]
                tokens, log_p, whole = _score(pair, ids + answer, len(ids), config.width)
                cut += not whole
                known = len(tokens) - len(ids) - extra
                content = [t for t in answer[:n] if t not in pair.eos_token_ids]
                text = pair.tokenizer.decode(content, skip_special_tokens=True)
                chats[i].append({"role": "assistant", "content": text})
                found.append(
                    (
                        i,
                        turn,
                        Text(
                            p.task,
                            p.prompt.question_id,
                            turn,
                            tokens,
                            len(ids),
                            max(0, min(n, known)),
                            log_p,
                        ),
                    )
                )
    return [text for _, _, text in sorted(found, key=lambda item: item[:2])], cut


def similar_length(
    jobs: Sequence[Job],
    ids: Callable[[Job], Sequence[int]],
    batch: int,
    slack: int,
    tokens: float = math.inf,
) -> list[list[Job]]:
    """Cut jobs, sorted by prompt length, into batches that waste little on padding.

    Parameters
    ----------
    jobs : sequence
        What to batch.
    ids : callable
        Returns a job's prompt.
    batch : int
        Most prompts of a batch.
    slack : int
        A prompt may be half as long again as the first of its batch, and so many tokens.
    tokens : float
        Most prompt tokens of a batch, padding included (default: any number).
    """
    chunks: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: len(ids(job))):
        length = len(ids(job))
        if (
            not chunks
            or len(chunks[-1]) == batch
            or (len(chunks[-1]) + 1) * length > tokens
            or length > 1.5 * len(ids(chunks[-1][0])) + slack
        ):
            chunks.append([])
        chunks[-1].append(job)
    return chunks


def _jobs(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    chats: dict[int, list[dict[str, str]]],
    turn: int,
    room: int,
) -> list[tuple[int, list[int]]]:
    """Ask the turn in every chat; return index and ids of those that fit, drop the other chats."""
    asked = []
    for i, p in enumerate(prompts):
        if turn < len(p.prompt.turns) and i in chats:
            chats[i].append({"role": "user", "content": p.prompt.turns[turn]})
            asked.append((i, chat_ids(pair.tokenizer, chats[i])))
    fit = {prompts[i].task for i, ids in asked if len(ids) <= room}
    for i, ids in asked:
        if turn == 0 and prompts[i].task not in fit:
            raise InputError(
                f"{_where(prompts[i], 0)}: {len(ids)} tokens do not fit the model's context with "
                f"room for an answer (at most {room}), nor does another prompt of the task; give "
                "shorter ones, or lower max_new_tokens"
            )
        if len(ids) > room:
            del chats[i]
    return [(i, ids) for i, ids in asked if i in chats]


def _answer_length(answer: Sequence[int], eos: Sequence[int], limit: int) -> int:
    for n, token in enumerate(answer[:limit]):
        if token in eos:
            return n + 1
    return min(limit, len(answer))


def _score(
    pair: Pair, tokens: list[int], prompt_tokens: int, width: int
) -> tuple[list[int], list[float], bool]:
    model = CachedModel(pair.target)
    logits = model.run(tokens, np.arange(len(tokens)))
    choice = logits.argmax(-1).tolist()
    end = len(tokens)
    for at in range(prompt_tokens, len(tokens)):
        if choice[at - 1] != tokens[at]:
            end = at
            break
    log_p = token_log_p(logits[: end - 1], tokens[1:end], width)
    return tokens[:end], [0.0, *log_p], end == len(tokens)


def _digest(
    pair: Pair, prompts: Sequence[TaskPrompt], max_new_tokens: int, config: DraftingConfig
) -> str:
    value = [
        str(pair.target.dtype),
        fingerprint(pair.target),
        pair.tokenizer.chat_template,
        pair.max_context,
        [[p.task, p.prompt.question_id, *p.prompt.turns] for p in prompts],
        max_new_tokens,
        reach(config),
        config.width,
        pair.eos_token_ids,
    ]
    return digest(value)


def fingerprint(model: nn.Module) -> str:
    """Digest of a sample of every weight of a model, and of its config, if it has one."""
    found = hashlib.sha256()
    if isinstance(model, PreTrainedModel):
        config = model.config.to_dict() | {"_name_or_path": None, "transformers_version": None}
        found.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)].double().cpu()
        found.update(name.encode() + sample.numpy().tobytes())
    return found.hexdigest()


def _save(path: Path, texts: Sequence[Text], cut: int) -> None:
    header = [[t.task, t.prompt_id, t.turn, t.prompt_tokens, t.answer_tokens] for t in texts]
    tensors = {
        "tokens": torch.tensor([x for t in texts for x in t.tokens]),
        "log_p": torch.tensor([x for t in texts for x in t.log_p], dtype=torch.float64),
        "length": torch.tensor([len(t.tokens) for t in texts]),
        "cut": torch.tensor([cut]),
        "header": torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8),
    }
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


def _load(path: Path) -> tuple[list[Text], int]:
    try:
        t = load_file(path)
    except SafetensorError as error:
        raise InputError(f"paths.cache={path}: damaged ({error}); delete the file") from error
    header = json.loads(bytes(t["header"].tolist()))
    lengths = t["length"].tolist()
    texts = [
        Text(task, prompt_id, turn, tokens.tolist(), n_prompt, n_answer, log_p.tolist())
        for (task, prompt_id, turn, n_prompt, n_answer), tokens, log_p in zip(
            header, t["tokens"].split(lengths), t["log_p"].split(lengths), strict=True
        )
    ]
    return texts, int(t["cut"][0])
