"""stage=report: the paper's experiments on this machine, as one HTML page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from pipeline import figures
from pipeline.document import (
    Block,
    Heading,
    Listing,
    Paragraph,
    Picture,
    Table,
    html_page,
    markdown_page,
)
from pipeline.report import stage_run
from pipeline.results import (
    GAINS,
    NONE,
    Estimate,
    Results,
    ablation_table,
    ablation_tasks,
    estimate,
    load_all,
    main_table,
    number,
    orderings,
    role_speedup,
    task_label,
    task_table,
)
from treegraft_core.files import write_text

PAPER_GENERALISATION = {
    "all pairs": (1.32, 1.39, 1.60),
    "fitted pairs": (math.nan, math.nan, math.nan),
    "unseen pairs": (1.32, 1.20, 1.48),
    "unseen task": (math.nan, math.nan, 1.60),
}
"""S, M and TreeGraft × plain in the paper: ten pairs, six tasks, 2 × A100."""


@dataclass
class Pictures:
    """Where the pictures of one pair go."""

    folder: Path
    pair: str

    def draw(self, name: str, title: str, alt: str, plot: Any, *arguments: Any) -> Picture:
        """Draw one figure to ``PAIR-NAME.png``."""
        path = self.folder / f"{self.pair}-{name}.png".replace("/", "-")
        return Picture(title, figures.draw(plot, *arguments, path=path), alt)


def settings(found: Sequence[Results]) -> Iterator[Block]:
    """Say what was run: one column a pair."""
    yield Heading(2, "Settings")
    columns = [_settings(results) for results in found]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [
        {"setting": name} | {r.pair: c.get(name, NONE) for r, c in zip(found, columns, strict=True)}
        for name in names
    ]
    yield Table("Settings of each pair", rows)


def _settings(results: Results) -> dict[str, str]:
    """Return every setting as text; those of drafting, sampling and machine one by one."""
    fitted = ", ".join(results.fitted_on) or "nothing"
    rows = {
        "target": results.target,
        "mid drafter": results.mid,
        "scheduler fitted on": f"{fitted}{' (this pair is unseen)' if results.unseen_pair else ''}",
        "held-out tasks": ", ".join(results.held_out_tasks) or "none",
    }
    for name, value in results.settings.items():
        if isinstance(value, dict):
            rows |= {f"{name}: {key}": str(each) for key, each in value.items()}
        else:
            rows[name.replace("_", " ")] = str(value)
    return rows | {
        name.removesuffix("_ms").replace("_", " ") + ", ms": f"{ms:.3g}"
        for name, ms in results.profile.items()
    }


def speed_by_task(found: Sequence[Results]) -> Iterator[Block]:
    """Show the paper's main table: pair × {S, M, TreeGraft} by task, gains, average."""
    yield Heading(2, "Speed-up by task")
    yield Paragraph(
        "S is All Small, M is All Mid, TreeGraft is the decoder with the distilled scheduler. A "
        "speed-up is a ratio of tokens/s over the turns that both systems ran; the average is the "
        "mean of the tasks' speed-ups. In brackets: 95 % bootstrap interval over prompts."
    )
    tasks = list(dict.fromkeys(task for results in found for task in results.tasks))
    held_out = {task for results in found for task in results.held_out_tasks}
    rows = []
    for results in found:
        for column, (role, base) in GAINS.items():
            row: dict[str, Any] = {"pair": results.pair, "what": column}
            for task in tasks:
                name = f"{task} (held out)" if task in held_out else task
                row[name] = role_speedup(results, role, base, [task]).text()
            average = role_speedup(results, role, base, average=True)
            rows.append(row | {"average of tasks": average.text()})
    yield Table("Speed-up by pair and task; nothing was fitted on held-out tasks", rows)


def generalisation(found: Sequence[Results]) -> Iterator[Block]:
    """Compare fitted pairs, unseen pairs and unseen tasks with the paper's figures."""
    yield Heading(2, "Generalisation")
    fitted = [r for r in found if not r.unseen_pair]
    unseen = [r for r in found if r.unseen_pair]
    held_out = [r for r in found if set(r.held_out_tasks) & set(r.tasks)]
    yield Table(
        "Mean speed-up, × plain decoding, beside the paper's (other hardware: compare shapes)",
        [
            _generalisation_row("all pairs", found),
            _generalisation_row("fitted pairs", fitted),
            _generalisation_row("unseen pairs", unseen),
            _generalisation_row("unseen task", held_out, held_out_only=True),
        ],
    )
    if not unseen:
        yield Paragraph("No pair here is unseen: every scheduler was fitted on its own pair.")
    if not held_out:
        yield Paragraph("No task here is unseen: none was held out from fitting.")


def _generalisation_row(
    name: str, found: Sequence[Results], held_out_only: bool = False
) -> dict[str, Any]:
    paper = map(number, PAPER_GENERALISATION[name])
    row: dict[str, Any] = {"where": name, "pairs": len(found)}
    for column, (role, base) in GAINS.items():
        row[column] = mean_speedup(found, role, base, held_out_only).text()
    return row | dict(zip(("paper S", "paper M", "paper TreeGraft"), paper, strict=True))


def mean_speedup(
    found: Sequence[Results], role: str, base: str, held_out_only: bool = False
) -> Estimate:
    """Return the mean over pairs of the averages over tasks; NaN if a pair lacks a role.

    Pairs evaluated on the same prompts with one seed share their resamples, so the interval counts
    what they have in common.
    """
    samples = []
    for results in found:
        ours, theirs = results.role(role), results.role(base)
        if ours is None or theirs is None:
            return Estimate(math.nan)
        tasks = results.held_out_tasks if held_out_only else None
        samples.append(results.average_samples(ours.name, theirs.name, tasks))
    if not samples:
        return Estimate(math.nan)
    shortest = min(map(len, samples))
    return estimate(np.mean([each[:shortest] for each in samples], axis=0))


def systems(results: Results, pictures: Pictures) -> Iterator[Block]:
    """Show every system of one pair."""
    yield Heading(3, "Systems")
    yield Table(f"{results.pair}: systems", main_table(results))
    yield pictures.draw(
        "speedups",
        "Measured speed-up with its 95 % interval, and the speed-up predicted without decoding.",
        "Measured and predicted speed-up of every system; the table above has the numbers.",
        figures.speedups,
        results,
    )
    if all(system.predicted is None for system in results.systems):
        yield Paragraph("No speed-up was predicted for this pair.")
    yield Table(f"{results.pair}: speed-up by task", task_table(results))
    yield pictures.draw(
        "tasks",
        "Speed-up by task; dots are measured, bars 95 % intervals over prompts.",
        "Speed-up of All Small, All Mid and TreeGraft by task; the table above has the numbers.",
        figures.by_task,
        results,
    )


def ablations(results: Results) -> Iterator[Block]:
    """Show the ablations of one pair and which of the paper's claims hold."""
    yield Heading(3, "Ablations")
    rows = ablation_table(results)
    if rows:
        tasks = ", ".join(ablation_tasks(results))
        yield Table(f"{results.pair}: ablations on {tasks}; paper: other hardware", rows)
    else:
        yield Paragraph("No task has a turn of every ablation that was run, so there is no table.")
    yield Listing(orderings(results))


def picks(results: Results, pictures: Pictures) -> Iterator[Block]:
    """Show where the mid drafter's picks lie, and the pools they come from."""
    yield Heading(3, "Where the mid drafter expands")
    found = {
        name: picked for name, picked in results.picks.items() if sum(picked.by_offset.values()) > 0
    }
    if not found:
        yield Paragraph("No picks of the mid drafter were logged for this pair.")
        return
    rows: list[dict[str, Any]] = [
        {
            "system": results.label(name),
            "mid calls": int(picked.calls),
            "picks": int(picked.picks),
            "at an earlier depth, %": 100 * picked.earlier_share,
            "pool, nodes": picked.pool,
            "usual pool, nodes": picked.usual_pool,
            "pool / usual": picked.pool / picked.usual_pool if picked.usual_pool else math.nan,
            "frontier, nodes": picked.frontier,
        }
        for name, picked in found.items()
    ]
    paper = {
        "system": "paper",
        "at an earlier depth, %": 61.47,
        "pool, nodes": 112.54,
        "pool / usual": 2.38,
    }
    yield Table(f"{results.pair}: picks and pools of the mid drafter", [*rows, paper])
    drawn = {name: found[name] for name in found if name in _main(results)} or found
    yield pictures.draw(
        "picks",
        "Depth of the nodes that the mid drafter picks, relative to the frontier N_k; left of 0 "
        "is what only a pool of the whole tree can reach.",
        "Share of the picks by depth relative to the frontier: "
        + "; ".join(
            f"{results.label(name)}, {100 * picked.earlier_share:.1f} % at an earlier depth"
            for name, picked in drawn.items()
        ),
        figures.picks,
        results,
        drawn,
    )


def _main(results: Results) -> list[str]:
    """Return the systems that a crowded picture shows: the fixed schedule and TreeGraft."""
    return [s.name for s in map(results.role, ("fixed", "scheduler")) if s is not None]


def calls(results: Results, pictures: Pictures) -> Iterator[Block]:
    """Show how often each step calls the mid drafter, by task, where that is not fixed."""
    yield Heading(3, "When the mid drafter is called")
    shown = {
        name: rates
        for name, rates in results.calls_by_step.items()
        if any(0 < rate < 1 for row in rates.values() for rate in row)
    }
    if not shown:
        yield Paragraph("No system that decides its calls was logged for this pair.")
    for name, rates in shown.items():
        rows = [
            {"task": "all tasks" if task == "all" else task_label(results, task)}
            | {f"step {k}": 100 * rate for k, rate in enumerate(row, 1)}
            | {"calls a round": float(sum(row))}
            for task, row in rates.items()
        ]
        label = results.label(name)
        yield Table(f"{results.pair}, {label}: rounds with a mid call at step k, %", rows)
        yield pictures.draw(
            f"calls-{name}",
            f"{label}: share of rounds that call the mid drafter, by step and task.",
            f"Calls of {label} by step and task; the table above has the numbers.",
            figures.calls_by_step,
            results,
            name,
            rates,
        )


def cost(results: Results, pictures: Pictures) -> Iterator[Block]:
    """Show what a round costs by part."""
    yield Heading(3, "What a round costs")
    if not results.cost:
        yield Paragraph("The cost of a round was not logged for this pair.")
        return
    parts = list(dict.fromkeys(part for row in results.cost.values() for part in row))
    rows = [
        {"system": results.label(name)}
        | {part: row.get(part, math.nan) for part in parts}
        | {"total": sum(row.values())}
        for name, row in results.cost.items()
    ]
    yield Table(f"{results.pair}: cost of a round, ms", rows)
    yield pictures.draw(
        "cost",
        "Mean time of a round by part, ms.",
        "Time of a round by part for each system; the table above has the numbers.",
        figures.cost,
        results,
    )


def budget(results: Results, pictures: Pictures) -> Iterator[Block]:
    """Show throughput against mid calls, from exact replay."""
    yield Heading(3, "Throughput against mid calls")
    replay = results.replay
    if replay is None:
        yield Paragraph("This pair has no exact replay, so there is no curve over call budgets.")
        return
    rows = [
        {
            "policy": policy.label,
            "η, tokens/s": policy.eta.text(),
            "× plain": policy.eta.value / replay.plain,
            "mid calls a round": policy.calls,
            "mean A": policy.accepted,
        }
        for policy in replay.policies
    ]
    if rows:
        yield Table(f"{results.pair}: exact replay of {replay.prompts} prompts", rows)
    yield pictures.draw(
        "budget",
        "Each dot is a policy; the curves allow at most so many mid calls a round; bands and bars "
        "are 95 % intervals over prompts.",
        "Throughput against mid calls a round: fixed schedules, scheduler and oracle.",
        figures.budget,
        results,
        replay,
    )


def report(found: Sequence[Results], folder: Path) -> list[Block]:
    """Return the whole report; its pictures are written to ``folder``."""
    blocks: list[Block] = [
        Heading(1, "TreeGraft: the paper's experiments on this machine"),
        Paragraph(
            f"{len(found)} pair{'s' if len(found) > 1 else ''}: "
            f"{', '.join(results.pair for results in found)}. Figures of the paper (arXiv "
            "2608.26112) were measured on 2 × A100 with other models: compare shapes."
        ),
        *speed_by_task(found),
        *generalisation(found),
    ]
    for results in found:
        pictures = Pictures(folder, results.pair)
        blocks += [
            Heading(2, f"Pair {results.pair}{' (unseen)' if results.unseen_pair else ''}"),
            *systems(results, pictures),
            *ablations(results),
            *picks(results, pictures),
            *calls(results, pictures),
            *cost(results, pictures),
            *budget(results, pictures),
        ]
    return [*blocks, *settings(found)]


def run(conf: DictConfig) -> None:
    """Write ``report.html`` and ``report.md`` to ``paths.report`` from every pair's results."""
    source, folder = Path(conf.paths.data) / "evaluation", Path(conf.paths.report)
    found = load_all(source)
    with stage_run(conf, "report", folder) as stage:
        for results in found:
            stage.read(results.path)
        blocks = report(found, folder)
        for block in blocks:
            if isinstance(block, Table):
                stage.show(block.title, block.rows)
            elif isinstance(block, Picture):
                stage.picture(block.path.stem, block.path)
            elif isinstance(block, Listing):
                print("\n".join(block.items))
        write_text(folder / "report.html", html_page(blocks))
        write_text(folder / "report.md", markdown_page(blocks))
        stage.wrote(folder / "report.html")
        stage.wrote(folder / "report.md")
        for results in found:
            for column, (role, base) in GAINS.items():
                average = role_speedup(results, role, base, average=True)
                stage.metrics[f"{results.pair}: {column}, average of tasks"] = average
