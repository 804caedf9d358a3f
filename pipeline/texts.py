"""The target's own greedy output on prompts, with its log-probabilities: where states lie."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from pipeline.inputs import digest
from pipeline.tasks import TaskPrompt
from treegraft_core import Context, DraftingConfig, InputError, Pair
from treegraft_core.enumeration import out_of_memory
from treegraft_core.errors import NonFiniteError
from treegraft_core.files import atomic_path
from treegraft_core.models import CachedModel, all_finite
from treegraft_core.prompts import chat_ids
from treegraft_core.verify import token_log_p

log = logging.getLogger(__name__)

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
    """Decode a batch greedily; one that runs out of memory is halved."""
    width = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, p in enumerate(prompts):
        ids[row, width - len(p) :] = torch.tensor(p)
        mask[row, width - len(p) :] = 1
    try:
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
    except (MemoryError, RuntimeError) as error:
        if len(prompts) == 1 or not out_of_memory(error):
            raise
        half = len(prompts) // 2
        return _continue(pair, prompts[:half], n_new) + _continue(pair, prompts[half:], n_new)
    return out[:, width:].tolist()


def greedy_texts(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    max_new_tokens: int,
    batch: int,
    config: DraftingConfig,
    cache: Path | None = None,
) -> tuple[list[Text], int]:
    """Decode all turns greedily and read their log-probabilities; name what does not fit.

    A turn that does not fit the context with room for an answer is left out, with those that
    follow it (`left_out`); a note names it. The rest is as in `decode_texts`.

    Returns
    -------
    texts : list of Text
        In the order of the prompts; a two-turn prompt gives two.
    ties : int
        Places where a batch had chosen another of two tokens that tie within rounding.

    Raises
    ------
    InputError
        If no prompt of a task fits.
    NonFiniteError
        If the target's logits are not finite.
    """
    check_fit(pair, prompts, max_new_tokens, config)
    found = decode_texts(pair, prompts, max_new_tokens, batch, config, cache, progress=True)
    texts = [text for turns, _ in found for text in turns]
    room = answer_room(pair, max_new_tokens, config)
    for p, turn in left_out(prompts, texts).items():
        print(f"note: {_where(p, turn)}: left out; {too_long(pair, room)}")
    return texts, sum(ties for _, ties in found)


def answer_room(pair: Pair, max_new_tokens: int, config: DraftingConfig) -> int:
    """Return the longest prompt, in tokens, that leaves room for an answer and its drafts.

    Raises
    ------
    InputError
        If ``max_new_tokens`` is below 2.
    """
    if max_new_tokens < 2:
        raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 2")
    return pair.max_context - max_new_tokens - reach(config) - 1


def too_long(pair: Pair, room: int) -> str:
    """Say why a prompt is left out."""
    return (
        f"it is longer than the {room} tokens that the context of {pair.max_context} leaves beside "
        "an answer"
    )


def check_fit(
    pair: Pair, prompts: Sequence[TaskPrompt], max_new_tokens: int, config: DraftingConfig
) -> None:
    """Raise `InputError` if of some task no prompt's first turn fits."""
    room = answer_room(pair, max_new_tokens, config)
    worst: dict[str, tuple[TaskPrompt, int]] = {}
    fit: set[str] = set()
    for p in prompts:
        if p.task not in fit:
            length = len(chat_ids(pair.tokenizer, [_user(p, 0)]))
            worst.setdefault(p.task, (p, length))
            if length <= room:
                fit.add(p.task)
    for task, (p, length) in worst.items():
        if task not in fit:
            raise InputError(
                f"{_where(p, 0)}: {length} tokens do not fit the model's context with room for an "
                f"answer (at most {room}), nor does another prompt of the task; give shorter ones, "
                "or lower max_new_tokens"
            )


def decode_texts(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    max_new_tokens: int,
    batch: int,
    config: DraftingConfig,
    cache: Path | None = None,
    fingerprint_: str | None = None,
    progress: bool = False,
) -> list[tuple[list[Text], int]]:
    """Decode all turns of each prompt greedily and read their log-probabilities.

    Batched decoding only proposes: each text is read in one pass of its own, and where the two
    differ (two tokens that tie within rounding) the reading is right and the rest is decoded
    anew. So a text does not depend on what was decoded beside it.

    Parameters
    ----------
    pair, prompts, config
        What to decode, and for which drafting.
    max_new_tokens, batch : int
        Longest answer, tokens; most prompts decoded together.
    cache : Path, optional
        Folder of finished texts, one file a prompt, shared by pairs with one target.
    fingerprint_ : str, optional
        `fingerprint` of the target, if it is known.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of (list of Text, int)
        For each prompt its turns, up to the first that does not fit the context, and its ties.

    Raises
    ------
    NonFiniteError
        If the target's logits are not finite.
    """
    answer_room(pair, max_new_tokens, config)
    found: list[tuple[list[Text], int] | None] = [None] * len(prompts)
    files: list[Path] = []
    if cache is not None:
        target = _target_key(pair, max_new_tokens, config, fingerprint_)
        names = [digest([target, p.task, p.prompt.question_id, *p.prompt.turns]) for p in prompts]
        files = [cache / f"text-{name}.safetensors" for name in names]
        found = [_load(file) if file.is_file() else None for file in files]
    missing = [i for i, known in enumerate(found) if known is None]
    if missing:
        chosen = [prompts[i] for i in missing]
        decoded = _decode(pair, chosen, max_new_tokens, batch, config, progress)
        for i, (turns, ties) in zip(missing, decoded, strict=True):
            found[i] = turns, ties
            if files:
                _keep(files[i], turns, ties)
    return [known for known in found if known is not None]


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
    progress: bool,
) -> list[tuple[list[Text], int]]:
    extra = reach(config)
    room = answer_room(pair, max_new_tokens, config)
    chats: dict[int, list[dict[str, str]]] = {i: [] for i in range(len(prompts))}
    found: list[list[Text]] = [[] for _ in prompts]
    ties = [0] * len(prompts)
    for turn in range(max(len(p.prompt.turns) for p in prompts)):
        jobs = _jobs(pair, prompts, chats, turn, room)
        chunks = similar_length(jobs, lambda job: job[1], batch, LENGTH_SLACK)
        # A bar that is not shown starts a thread all the same, which hangs where memory is short.
        shown = tqdm(chunks, desc=f"decode turn {turn + 1}", unit="batch") if progress else chunks
        for chunk in shown:
            answers = _continue(pair, [ids for _, ids in chunk], max_new_tokens + extra)
            for (i, ids), answer in zip(chunk, answers, strict=True):
                p = prompts[i]
                try:
                    tokens, log_p, corrected = _read(pair, ids, answer, config.width)
                except NonFiniteError as error:
                    raise NonFiniteError(f"{_where(p, turn)}: {error}") from error
                n = _answer_length(tokens[len(ids) :], pair.eos_token_ids, max_new_tokens)
                answer = tokens[len(ids) : len(ids) + n]
                content = [t for t in answer if t not in pair.eos_token_ids]
                text = pair.tokenizer.decode(content, skip_special_tokens=True)
                chats[i].append({"role": "assistant", "content": text})
                ties[i] += corrected
                name = p.prompt.question_id
                found[i].append(Text(p.task, name, turn, tokens, len(ids), n, log_p))
    return list(zip(found, ties, strict=True))


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


def _user(p: TaskPrompt, turn: int) -> dict[str, str]:
    return {"role": "user", "content": p.prompt.turns[turn]}


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
            chats[i].append(_user(p, turn))
            ids = chat_ids(pair.tokenizer, chats[i])
            if len(ids) <= room:
                asked.append((i, ids))
            else:
                del chats[i]
    return asked


def _answer_length(answer: Sequence[int], eos: Sequence[int], limit: int) -> int:
    for n, token in enumerate(answer[:limit]):
        if token in eos:
            return n + 1
    return min(limit, len(answer))


def _read(
    pair: Pair, prompt: list[int], answer: list[int], width: int
) -> tuple[list[int], list[float], int]:
    """Return prompt and greedy continuation, their log-probabilities, and the tokens corrected.

    The pass over the whole text says which token is greedy: its shape is that of the prompt's
    length alone, and a row of it depends on the tokens before it alone.
    """
    corrected = 0
    while True:
        tokens = prompt + answer
        logits = CachedModel(pair.target).run(tokens, np.arange(len(tokens)))
        if not all_finite(logits):
            raise NonFiniteError(
                f"the target's logits are not finite at position {_first_wrong(pair, tokens)}; try "
                "engine.dtype=float32, or repair the model's weights"
            )
        choice = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        differ = [n for n, (a, b) in enumerate(zip(answer, choice, strict=True)) if a != b]
        if not differ:
            return tokens, [0.0, *token_log_p(logits[:-1], tokens[1:], width)], corrected
        corrected += 1
        known = [*answer[: differ[0]], choice[differ[0]]]
        left = len(answer) - len(known)
        answer = known + (_continue(pair, [prompt + known], left)[0] if left else [])


def _first_wrong(pair: Pair, tokens: list[int]) -> int:
    """Return the first position whose token makes logits not finite.

    Not the first row: a key that is not a number spoils the rows that do not see it, too.
    """
    low, high = 0, len(tokens)
    while high - low > 1:
        half = (low + high) // 2
        if all_finite(CachedModel(pair.target).run(tokens[:half], np.arange(half))):
            low = half
        else:
            high = half
    return high - 1


def _target_key(
    pair: Pair, max_new_tokens: int, config: DraftingConfig, known: str | None
) -> list[Any]:
    return [
        str(pair.target.dtype),
        known or fingerprint(pair.target),
        pair.tokenizer.chat_template,
        pair.max_context,
        max_new_tokens,
        reach(config),
        config.width,
        list(pair.eos_token_ids),
    ]


def fingerprint(model: Any) -> str:
    """Digest of a sample of every weight of a model, and of its config, if it has one.

    Of a mid drafter that is no module: of its class, and of the text ``fingerprint`` if it has one.
    """
    found = hashlib.sha256()
    if not isinstance(model, nn.Module):
        found.update(f"{type(model).__qualname__} {getattr(model, 'fingerprint', '')}".encode())
        return found.hexdigest()
    if isinstance(model, PreTrainedModel):
        config = model.config.to_dict() | {"_name_or_path": None, "transformers_version": None}
        found.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)].double().cpu()
        found.update(name.encode() + sample.numpy().tobytes())
    return found.hexdigest()


def _keep(path: Path, texts: Sequence[Text], ties: int) -> None:
    # A cache that cannot be written costs time, no more.
    try:
        _save(path, texts, ties)
    except (OSError, SafetensorError) as error:
        log.warning("%s: not kept (%s); that text is decoded again next time", path, error)


def _save(path: Path, texts: Sequence[Text], ties: int) -> None:
    header = [[t.task, t.prompt_id, t.turn, t.prompt_tokens, t.answer_tokens] for t in texts]
    tensors = {
        "tokens": torch.tensor([x for t in texts for x in t.tokens], dtype=torch.int64),
        "log_p": torch.tensor([x for t in texts for x in t.log_p], dtype=torch.float64),
        "length": torch.tensor([len(t.tokens) for t in texts], dtype=torch.int64),
        "ties": torch.tensor([ties]),
        "header": torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8),
    }
    with atomic_path(path) as temporary:
        save_file(tensors | {"check": torch.tensor([_checksum(tensors)])}, temporary)


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    value = 0
    for name in ("tokens", "log_p", "length", "ties", "header"):
        value = zlib.crc32(tensors[name].numpy().tobytes(), value)
    return value


def _load(path: Path) -> tuple[list[Text], int] | None:
    """Return what a cache file holds; a damaged one is named and decoded again."""
    try:
        t = load_file(path)
        if int(t["check"]) != _checksum(t):
            raise ValueError("checksum differs")
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        log.warning("%s: damaged (%s); decoding that text again", path, error)
        return None
    header = json.loads(bytes(t["header"].tolist()))
    lengths = t["length"].tolist()
    texts = [
        Text(task, prompt_id, turn, tokens.tolist(), n_prompt, n_answer, log_p.tolist())
        for (task, prompt_id, turn, n_prompt, n_answer), tokens, log_p in zip(
            header, t["tokens"].split(lengths), t["log_p"].split(lengths), strict=True
        )
    ]
    return texts, int(t["ties"])
