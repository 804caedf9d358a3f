"""stage=compare: drafters side by side, from replays of the same prompts.

`make drafters` profiles, collects, distils and replays every pair of drafters of ``compare.pairs``
under a name of its own; this stage reads what they left and prints one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.engine import check_name
from pipeline.inputs import read_json
from pipeline.report import Stage, stage_run
from treegraft_core import InputError, LatencyProfile, load_scheduler

POLICY = "scheduler"


@dataclass(frozen=True)
class Replayed:
    """What one pair of drafters left.

    Attributes
    ----------
    name : str
        The pair's name.
    small, mid : str
        Families of its drafters.
    profile : LatencyProfile
        Costs.
    whole : dict
        The replay's figures over all tasks.
    tasks : dict of str to dict
        The same of each task.
    """

    name: str
    small: str
    mid: str
    profile: LatencyProfile
    whole: dict[str, Any]
    tasks: dict[str, dict[str, Any]]

    def policy(self, name: str, task: str | None = None) -> dict[str, Any]:
        """Return the figures of one policy."""
        cell = self.whole if task is None else self.tasks[task]
        wanted = cell["best_fixed"] if name == "best fixed" else name
        found: dict[str, Any] = next(p for p in cell["policies"] if p["policy"] == wanted)
        return found


def read_replayed(data: Path, name: str) -> Replayed:
    """Read one pair's replay, profile and scheduler.

    Raises
    ------
    InputError
        If one of them is missing, or the replay holds several pairs or machines.
    """
    found = read_json(data / "replay" / name / "replay.json", "replay")
    cells: list[dict[str, Any]] = found["cells"]
    whole = [cell for cell in cells if cell["task"] is None]
    if len(whole) != 1 or all(p["policy"] != POLICY for p in whole[0]["policies"]):
        raise InputError(
            f"compare.pairs={name}: its replay has {len(whole)} pairs and machines; run "
            "stage=replay of this pair alone, with replay.policies=[scheduler]"
        )
    trained = load_scheduler(data / "schedulers" / name).trained
    each = trained.drafters[0] if trained.drafters else None
    return Replayed(
        name,
        "?" if each is None else each.small,
        "?" if each is None else each.mid,
        LatencyProfile.load(data / "profiles" / name / "profile.json"),
        whole[0],
        {cell["task"]: cell for cell in cells if cell["task"] is not None},
    )


def row(found: Replayed, first: Replayed) -> dict[str, Any]:
    """Return a pair's line of the main table."""
    fixed, chosen = found.policy("best fixed"), found.policy(POLICY)
    base = first.policy("best fixed")["eta"][0]
    return {
        "drafters": found.name,
        "small": found.small,
        "mid": found.mid,
        "small step, µs": f"{1e3 * found.profile.small_ms:.0f}",
        "mid call, ms": f"{found.profile.mid_ms:.1f}",
        "A, All Small": f"{found.policy(ends(found)[0])['A']:.2f}",
        "A, All Mid": f"{found.policy(ends(found)[1])['A']:.2f}",
        "best fixed": found.whole["best_fixed"],
        "A": f"{fixed['A']:.2f}",
        "η": bounded(fixed),
        "A, scheduler": f"{chosen['A']:.2f}",
        "η, scheduler": bounded(chosen),
        f"÷ {first.name}": f"{fixed['eta'][0] / base:.3f}",
    }


def ends(found: Replayed) -> tuple[str, str]:
    """Return the names of All Small and All Mid."""
    depth = len(found.whole["best_fixed"])
    return "0" * depth, "1" * depth


def bounded(policy: Mapping[str, Any]) -> str:
    """Return η with its interval over prompts."""
    eta, low, high = policy["eta"]
    return f"{eta:.1f} ({low:.1f} … {high:.1f})"


def task_rows(found: Sequence[Replayed]) -> list[dict[str, Any]]:
    """Return η of each task at the best fixed schedule and with the scheduler."""
    tasks = sorted(set.intersection(*(set(each.tasks) for each in found)))
    return [
        {
            "drafters": each.name,
            "policy": policy,
            **{task: f"{each.policy(policy, task)['eta'][0]:.1f}" for task in tasks},
        }
        for policy in ("best fixed", POLICY)
        for each in found
    ]


def same_prompts(found: Sequence[Replayed]) -> None:
    """Raise if the replays are not of the same tasks and as many prompts."""
    for each in found:
        counts, wanted = [
            {task: cell["prompts"] for task, cell in other.tasks.items()}
            | {"all": other.whole["prompts"]}
            for other in (each, found[0])
        ]
        if counts != wanted:
            raise InputError(
                f"compare.pairs={each.name}: replayed on {counts}, {found[0].name} on {wanted} "
                "prompts; collect both with the same task and collect.prompts_per_task"
            )


def show(stage: Stage, found: Sequence[Replayed]) -> None:
    """Print both tables."""
    stage.show(
        "drafters: A and η in tokens/s on the same prompts; best fixed in hindsight",
        [row(each, found[0]) for each in found],
    )
    stage.show("η by task", task_rows(found))
    for each in found:
        stage.metrics[f"eta_best_fixed_{each.name}"] = each.policy("best fixed")["eta"][0]
        stage.metrics[f"eta_scheduler_{each.name}"] = each.policy(POLICY)["eta"][0]


def run(conf: DictConfig) -> None:
    """Print and write the table of ``compare.pairs``, the first of which is the yardstick."""
    data, names = Path(conf.paths.data), [str(name) for name in conf.compare.pairs]
    if not names:
        raise InputError("compare.pairs=[]: give the names of one pair or more")
    for name in names:
        check_name("compare.pairs", name)
    found = [read_replayed(data, name) for name in names]
    same_prompts(found)
    with stage_run(conf, "compare", data / "compare") as stage:
        for name in names:
            stage.read(data / "replay" / name / "replay.json")
        show(stage, found)
        stage.write_tables()
