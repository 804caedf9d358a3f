"""Prompts of a task: the shipped files, any local file, or a set on the hub."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from treegraft_core import InputError
from treegraft_core.prompts import Prompt, read_prompts


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt and the task it is counted under."""

    task: str
    prompt: Prompt


def load_prompts(conf: DictConfig, split: str, per_task: int) -> list[TaskPrompt]:
    """Return up to ``per_task`` prompts of each task.

    ``task.path`` reads one local file, under the name of the task; the shipped task reads the
    split's own file, with one task for each kind of prompt; the public sets come from the hub.

    Parameters
    ----------
    conf : DictConfig
        The composed configuration.
    split : {"collect", "evaluate"}
        Which file of the shipped task.
    per_task : int
        Most prompts of each task; 0 takes all.
    """
    if per_task < 0:
        raise InputError(f"prompts_per_task={per_task}: must be 0 (all) or more")
    task = conf.task
    if task.path is not None:
        pairs = [TaskPrompt(task.name, p) for p in read_prompts(task.path)]
    elif task.hub is not None:
        pairs = [TaskPrompt(task.name, p) for p in read_hub(task.name, task.hub)]
    else:
        pairs = [TaskPrompt(p.category or task.name, p) for p in read_prompts(task[split])]
    return first_of_each(pairs, per_task) if per_task else pairs


def first_of_each(prompts: Sequence[TaskPrompt], count: int) -> list[TaskPrompt]:
    """Return the first ``count`` prompts of each task, in their order."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for p in prompts:
        taken[p.task] += 1
        if taken[p.task] <= count:
            chosen.append(p)
    return chosen


def _gsm8k(row: dict[str, Any]) -> list[str]:
    return [row["question"]]


def _alpaca(row: dict[str, Any]) -> list[str]:
    return ["\n\n".join(x for x in (row["instruction"], row["input"]) if x)]


def _humaneval(row: dict[str, Any]) -> list[str]:
    return ["Complete the code I provided.\n\n" + row["prompt"]]


def _natural_questions(row: dict[str, Any]) -> list[str]:
    question = row["question"]
    text = question["text"] if isinstance(question, dict) else question
    return [text[:1].upper() + text[1:].rstrip("?") + "?"]


def _cnn_dailymail(row: dict[str, Any]) -> list[str]:
    return ["Summarize: " + row["article"]]


def _mt_bench(row: dict[str, Any]) -> list[str]:
    return list(row["prompt"])


READERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "gsm8k": _gsm8k,
    "alpaca": _alpaca,
    "humaneval": _humaneval,
    "natural_questions": _natural_questions,
    "cnn_dailymail": _cnn_dailymail,
    "mt_bench": _mt_bench,
}


def read_hub(name: str, hub: DictConfig) -> list[Prompt]:
    """Read a public set through ``datasets``: a hub id or a local folder of data files.

    Raises
    ------
    InputError
        If it cannot be loaded or its columns are not those of the set.
    """
    import datasets

    if hub.reader not in READERS:
        raise InputError(f"task.hub.reader={hub.reader}: choose one of {', '.join(READERS)}")
    try:
        rows = datasets.load_dataset(hub.id, hub.config, split=hub.split)
    except Exception as error:  # datasets raises errors of many unrelated classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"task.hub.id={hub.id}: cannot be loaded ({reason[:160]}); give a local file with "
            f"task.path=FILE or reach the hub"
        ) from error
    if hub.limit:
        rows = rows.select(range(min(int(hub.limit), len(rows))))
    prompts = []
    for number, row in enumerate(rows):
        try:
            turns = READERS[hub.reader](row)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"task.hub.id={hub.id}: row {number} lacks {error}; is it the set that "
                f"task.hub.reader={hub.reader} reads?"
            ) from error
        prompts.append(Prompt(f"{name}-{number}", name, tuple(turns)))
    return prompts
