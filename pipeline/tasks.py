"""Prompts of a task: the shipped files, any local file, a set on the hub, or several sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from treegraft_core import InputError
from treegraft_core.prompts import Prompt, check_turns, read_prompts


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt and the task it is counted under."""

    task: str
    prompt: Prompt


@dataclass(frozen=True)
class Source:
    """Where the prompts of one task come from: a local file, or a set on the hub.

    With ``kinds`` every category in the file is a task of its own.
    """

    name: str
    path: str | None
    hub: DictConfig | None
    kinds: bool = False


def load_prompts(conf: DictConfig, split: str, per_task: int) -> list[TaskPrompt]:
    """Return up to ``per_task`` prompts of each task.

    ``task.path`` reads one local file, under the name of the task; the shipped task reads the
    split's own file, with one task for each kind of prompt; the public sets come from the hub, or
    several from a folder. To collect, the held-out tasks are left out.

    Parameters
    ----------
    conf : DictConfig
        The composed configuration.
    split : {"collect", "evaluate"}
        Which file of the shipped task.
    per_task : int
        Most prompts of each task; 0 takes all.

    Raises
    ------
    InputError
        If a source is missing or damaged, or only held-out tasks are to be collected.
    """
    if per_task < 0:
        raise InputError(f"prompts_per_task={per_task}: must be 0 (all) or more")
    held_out = held_out_tasks(conf) if split == "collect" else []
    prompts = [p for source in task_sources(conf, split) for p in read_source(source)]
    prompts = [p for p in prompts if not {p.task, p.prompt.category} & set(held_out)]
    if not prompts:
        raise InputError(
            f"held_out_tasks={held_out}: leaves no prompt of task={conf.task.name} to collect; "
            "give another task, or take it out of held_out_tasks to fit on it"
        )
    return first_of_each(prompts, per_task) if per_task else prompts


def held_out_tasks(conf: DictConfig) -> list[str]:
    """Return the tasks that nothing is fitted on."""
    return [str(name) for name in conf.held_out_tasks]


def prompt_source(conf: DictConfig, split: str) -> str:
    """Return where `load_prompts` reads, in words."""
    return ", ".join(str(s.path or (s.hub and s.hub.id)) for s in task_sources(conf, split))


def task_sources(conf: DictConfig, split: str) -> list[Source]:
    """Return the sources of the configured task; to collect, without the held-out ones.

    Raises
    ------
    InputError
        If a set in ``task.sets`` is unknown, or ``task.folder`` lacks its file.
    """
    task = conf.task
    if task.get("sets") is not None:
        sources = each_set(task)
    elif task.path is None and task.hub is None:
        sources = [Source(task.name, task[split], None, kinds=True)]
    else:
        sources = [Source(task.name, task.path, task.hub)]
    if split == "collect":
        held_out = held_out_tasks(conf)
        sources = [s for s in sources if not {s.name, Path(s.path or "").stem} & set(held_out)]
    for s in sources:
        if task.get("folder") is not None and not Path(str(s.path)).is_file():
            there = Path(task.folder).is_dir()
            raise InputError(
                f"task.folder={task.folder}: {f'no {s.name}.jsonl in it' if there else 'not there'}"
                "; give the folder that holds NAME.jsonl of every set in task.sets, or "
                "task.folder=null to read them from the hub"
            )
    return sources


def each_set(task: DictConfig) -> list[Source]:
    """Return a source for every name in ``task.sets``."""
    names = [str(name) for name in task.sets]
    if not names or len(set(names)) < len(names) or not set(names) <= set(task.each):
        raise InputError(f"task.sets={names}: choose from {', '.join(task.each)}, each once")
    if task.folder is not None:
        return [Source(name, str(Path(task.folder) / f"{name}.jsonl"), None) for name in names]
    return [Source(name, task.each[name].path, task.each[name].hub) for name in names]


def read_source(source: Source) -> list[TaskPrompt]:
    """Return all prompts of a source."""
    if source.hub is not None and source.path is None:
        return [TaskPrompt(source.name, p) for p in read_hub(source.name, source.hub)]
    prompts = read_prompts(str(source.path))
    if source.kinds:
        return [TaskPrompt(p.category or source.name, p) for p in prompts]
    return [TaskPrompt(source.name, p) for p in prompts]


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
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"task.hub.id={hub.id}: row {number} lacks {error}; is it the set that "
                f"task.hub.reader={hub.reader} reads?"
            ) from error
        checked = check_turns(turns, f"task.hub.id={hub.id}: row {number}")
        prompts.append(Prompt(f"{name}-{number}", name, checked))
    return prompts
