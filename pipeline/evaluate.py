"""stage=evaluate: the paper's systems decode prompts that nothing was fitted on, and exact replay.

Measured rows come from real decoding (`pipeline.measure`), the others from the outcomes of every
schedule at every state of the same texts (`pipeline.replay`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.collate import collate, predict
from pipeline.engine import drafting_config, drafting_rules, open_pair, open_profile
from pipeline.features import check_numerator
from pipeline.hardware import Outcomes, outcomes
from pipeline.measure import (
    Turn,
    expected_minutes,
    in_ablation,
    measure,
    sampling_config,
    units,
)
from pipeline.planning import OnlinePlanner
from pipeline.plots import plot_policies
from pipeline.replay import (
    Judged,
    Replayed,
    Texts,
    at_most,
    bits_of,
    follow,
    planned_decisions,
    rate_oracle,
    reference_runs,
    replay,
    scheduler_decisions,
    texts_of,
    tries_of,
)
from pipeline.report import Stage, stage_run
from pipeline.results import ablation_table, load_results, main_table, orderings, task_table
from pipeline.rows import bits_text, enumerate_text, pack_memory
from pipeline.systems import Bench, System
from pipeline.tasks import TaskPrompt, first_of_each, load_prompts, prompt_source
from pipeline.texts import Text, greedy_texts, left_out
from pipeline.tries import Tries, join
from pipeline.value import ValueModel, load_value
from treegraft_core import (
    DraftingConfig,
    InputError,
    LatencyProfile,
    SchedulerArtifact,
    load_scheduler,
)
from treegraft_core.files import write_json
from treegraft_core.fit_check import check_fits, families
from treegraft_core.tree import IntArray

PAPER_FIXED = (1, 0, 1, 0, 1)
BUDGETS = (3, 7, 15, 31)


def schedule_bits(number: int, depth: int) -> tuple[int, ...]:
    """Return the bits of a schedule's number, τ_1 first."""
    return tuple(map(int, bits_of(number, depth)))


@dataclass(frozen=True)
class Enumerated:
    """The states of the replayed texts, and what each policy that reads them decides.

    Attributes
    ----------
    tries : Tries
        Every state of every text.
    texts : Texts
        Their turns.
    leaves : dict of int64 array, shape ``[S]``
        The schedule, by number, that each such policy walks to.
    """

    tries: Tries
    texts: Texts
    leaves: dict[str, IntArray]


def enumerate_texts(bench: Bench, texts: Sequence[Text], config: DraftingConfig) -> Tries:
    """Enumerate every state of every text."""
    model, conf = bench.pair.open_mid(), bench.conf
    memory, pack = pack_memory(conf), int(conf.collect.pack)
    parts = []
    with tqdm(texts, desc="enumerate", unit="turn") as bar:
        for text in bar:
            roots = list(text.roots())
            if roots:
                found = enumerate_text(bench.pair, model, text, roots, config, memory, pack)
                parts.append(tries_of(bench.pair.name, text, found, bench.profile))
                bar.set_postfix(states=sum(map(len, parts)))
    return join(parts)


def walks(bench: Bench, tries: Tries, planner: OnlinePlanner | None) -> dict[str, IntArray]:
    """Return the schedules that the policies that read the state walk to."""
    artifact, depth = bench.artifact, tries.depth
    found = outcomes(tries, bench.profile)
    wanted = scheduler_decisions(artifact, tries, found)
    leaves = {
        capped("scheduler", most): follow(at_most(wanted, depth, most), depth)
        for most in range(depth + 1)
    }
    leaves["scheduler"] = follow(wanted, depth)
    if planner is not None:
        leaves["online"] = follow(planned_decisions(planner, tries, found), depth)
    return leaves


def capped(name: str, most: int) -> str:
    """Return the name of a policy with so many mid calls a round at most."""
    return f"{name}, {most} calls"


def replay_all(
    enumerated: Enumerated, found: Outcomes, decision_ms: dict[str, float]
) -> dict[str, Replayed]:
    """Replay every fixed schedule, the policies that read the state, and the oracles.

    ``decision_ms`` is the time of one decision of each policy that reads the state.
    """
    texts, depth = enumerated.texts, enumerated.tries.depth
    runs = reference_runs(texts, found, depth)
    for name, each in decision_ms.items():
        runs[name] = replay(texts, found, enumerated.leaves[name]).with_cost(depth * each)
    return runs


def replay_capped(
    enumerated: Enumerated, found: Outcomes, decision_ms: dict[str, float]
) -> dict[str, Replayed]:
    """Replay scheduler and oracle for every number of mid calls that a round may have."""
    texts, depth = enumerated.texts, enumerated.tries.depth
    runs = {}
    for most in range(depth + 1):
        name = capped("scheduler", most)
        done = replay(texts, found, enumerated.leaves[name])
        runs[name] = done.with_cost(depth * decision_ms["scheduler"])
        leaf = rate_oracle(found, depth, most)
        runs[capped("oracle", most)] = replay(texts, found, leaf)
    return runs


class Verdict(Judged):
    """Means, intervals and comparisons over held-out texts.

    Parameters
    ----------
    texts : Texts
        The turns.
    runs : dict of Replayed
        From `replay_all` and `replay_capped`.
    depth : int
        D.
    plain_ms : float
        One step of plain decoding, ms.
    decision_ms : dict of float
        Time of one decision of each policy that reads the state.
    draws, seed : int
        Of the bootstrap over prompts.
    """

    def __init__(
        self,
        texts: Texts,
        runs: dict[str, Replayed],
        depth: int,
        plain_ms: float,
        decision_ms: dict[str, float],
        draws: int,
        seed: int,
    ):
        super().__init__(runs, texts.groups, depth, draws, seed)
        self.texts, self.plain_ms, self.decision_ms = texts, plain_ms, decision_ms

    def row(self, label: str, name: str) -> dict[str, Any]:
        """Return one line of the table of policies."""
        found = self.figures(self.runs[name])
        return {
            "policy": label,
            "η tokens/s": found["eta"],
            "95 % interval": f"{found['low']:.2f} … {found['high']:.2f}",
            "× plain": found["eta"] * self.plain_ms / 1e3,
            "mean A": found["A"],
            "mid calls a round": found["calls"],
        }

    def policies(self) -> list[dict[str, Any]]:
        """Return the main table."""
        return [
            self.row("All Small", self.small),
            self.row("All Mid", self.mid),
            self.row(f"best fixed ({self.best_fixed}, chosen in hindsight)", self.best_fixed),
            *(
                [self.row("fixed 10101 (the paper's)", bits_text(PAPER_FIXED))]
                if self.depth == len(PAPER_FIXED)
                else []
            ),
            self.row("scheduler", "scheduler"),
            *([self.row("online planning", "online")] if "online" in self.runs else []),
            self.row("oracle (best schedule of each state)", "oracle"),
            self.row("oracle (best for the whole text)", "gain_oracle"),
        ]

    def by_task(self) -> list[dict[str, Any]]:
        """Return η by task."""
        rows = []
        for task in sorted(set(self.texts.tasks)):
            at = self.texts.tasks == task
            prompts = np.bincount(self.prompt[at], minlength=self.prompts) > 0
            columns = {
                "All Small": self.small,
                "All Mid": self.mid,
                f"fixed {self.best_fixed}": self.best_fixed,
                "scheduler": "scheduler",
                "oracle": "oracle",
            }
            eta = {label: self.eta(name, prompts) for label, name in columns.items()}
            rows.append({"task": str(task), "turns": int(at.sum()), **eta})
        return rows

    def comparisons(self) -> dict[str, Any]:
        """Return the scheduler against the better endpoint, the best fixed schedule, the oracles.

        ``oracle`` takes the best rate of each state; ``gain_oracle`` is the bound.
        """
        result: dict[str, Any] = {"better_endpoint": self.endpoint, "best_fixed": self.best_fixed}
        for key, other in (("endpoint", self.endpoint), ("best_fixed", self.best_fixed)):
            ratio = self.ratio("scheduler", other)
            result[f"scheduler_over_{key}"] = ratio()
            result[f"scheduler_over_{key}_interval"] = self.interval(ratio)
        for oracle in ("oracle", "gain_oracle"):
            closed = self.gap("scheduler", oracle)
            result[f"{oracle}_gap_closed"] = float(closed())
            result[f"{oracle}_gap_closed_interval"] = self.interval(closed)
            result[f"{oracle}_over_endpoint"] = self.ratio(oracle, self.endpoint)()
        return result


def by_budget(
    enumerated: Enumerated,
    config: DraftingConfig,
    profile: LatencyProfile,
    decision_ms: dict[str, float],
) -> list[dict[str, Any]]:
    """Return η × plain under every smaller B_ver, exactly, from the logged pruning order.

    Trees and decisions stay as they are.
    """
    budgets = sorted({b for b in BUDGETS if b < config.verify_nodes} | {config.verify_nodes})
    rows = []
    for budget in budgets:
        runs = replay_all(enumerated, outcomes(enumerated.tries, profile, budget), decision_ms)
        eta = {name: run.rate("committed") * profile.plain_ms for name, run in runs.items()}
        best = max((n for n in eta if set(n) <= {"0", "1"}), key=eta.__getitem__)
        rows.append(
            {
                "B_ver": budget,
                "All Small": eta["0" * config.depth],
                "All Mid": eta["1" * config.depth],
                "best fixed": eta[best],
                "bits": best,
                "scheduler": eta["scheduler"],
                "oracle": eta["oracle"],
            }
        )
    return rows


def budget_advice(rows: Sequence[dict[str, Any]], configured: int) -> str:
    """Say which B_ver this machine wants."""
    best = max(rows, key=lambda row: row["best fixed"])
    now = next(row for row in rows if row["B_ver"] == configured)
    if best["B_ver"] == configured:
        return f"B_ver = {configured} is the best of these budgets for this machine."
    return (
        f"This machine wants a smaller budget: with B_ver = {best['B_ver']} the best fixed "
        f"schedule ({best['bits']}) runs at {best['best fixed']:.2f} × plain decoding, with "
        f"{configured} at {now['best fixed']:.2f} ×; collect, distil and evaluate with "
        f"drafting.verify_nodes={best['B_ver']}."
    )


def sentence(name: str, other: str, ratio: float, interval: Sequence[float]) -> str:
    """Say plainly whether the scheduler wins."""
    low, high = interval
    if math.isnan(low):
        verdict = "cannot be compared on one prompt with"
    elif low > 1:
        verdict = "beats"
    elif high < 1:
        verdict = "loses to"
    else:
        verdict = "is not distinguishable from"
    return (
        f"The scheduler {verdict} {name} ({other}): η ratio {ratio:.3f}, "
        f"95 % interval {low:.3f} … {high:.3f}."
    )


def sentences(values: dict[str, Any]) -> list[str]:
    """Return the findings in words."""
    low, high = values["gain_oracle_gap_closed_interval"]
    return [
        sentence(
            "the better endpoint",
            values["better_endpoint"],
            values["scheduler_over_endpoint"],
            values["scheduler_over_endpoint_interval"],
        ),
        sentence(
            "the best fixed schedule",
            values["best_fixed"],
            values["scheduler_over_best_fixed"],
            values["scheduler_over_best_fixed_interval"],
        ),
        f"It closes {100 * values['gain_oracle_gap_closed']:.0f} % of the gap from the better "
        f"endpoint to the oracle for the whole text (95 % interval {100 * low:.0f} … "
        f"{100 * high:.0f} %); that oracle is {values['gain_oracle_over_endpoint']:.3f} × the "
        "better endpoint.",
    ]


def open_scheduler(conf: DictConfig, config: DraftingConfig) -> SchedulerArtifact:
    """Load the exported scheduler and check that it fits the drafting depth."""
    artifact = load_scheduler(Path(conf.paths.scheduler))
    check_depth(config, artifact.depth, f"the scheduler in {conf.paths.scheduler} was trained")
    return artifact


def open_value(conf: DictConfig, config: DraftingConfig) -> ValueModel | None:
    """Load the value network if a system plans with it; check that it fits the drafting depth."""
    if all(options.get("schedule") != "online" for options in conf.systems.values()):
        return None
    value = load_value(Path(conf.paths.value))
    check_depth(config, value.depth, f"the value network in {conf.paths.value} was fitted")
    return value


def check_depth(config: DraftingConfig, depth: int, what: str) -> None:
    """Raise if ``what`` was made for another depth than drafting has."""
    if depth != config.depth:
        raise InputError(
            f"drafting.depth={config.depth}: {what} for depth {depth}; collect and distil for "
            "this depth"
        )


def note_other_rules(artifact: SchedulerArtifact, config: DraftingConfig) -> None:
    """Say so when the scheduler was distilled from trees grown by other rules."""
    trained = artifact.metadata.get("drafting", {})
    for name, value in drafting_rules(config).items():
        if name in artifact.trained.widths:
            continue  # checked: it is refused, or a warning says it
        if name in trained and trained[name] != value:
            print(
                f"note: the scheduler was distilled with drafting.{name}={trained[name]}; "
                f"this evaluates it with {value}"
            )


def evaluated_prompts(conf: DictConfig) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
    """Return the prompts to replay, and those of them to decode for real."""
    prompts = load_prompts(conf, "evaluate", int(conf.evaluate.prompts_per_task))
    if not conf.evaluate.decode:
        return prompts, []
    each = int(conf.evaluate.decode_prompts_per_task)
    return prompts, first_of_each(prompts, each) if each else prompts


def warm_up_turns(texts: Sequence[Text], decoded: Sequence[TaskPrompt], count: int) -> list[Turn]:
    """Return turns to warm up on: of prompts that are not measured, if there are any."""
    measured = {(p.task, p.prompt.question_id) for p in decoded}
    others = [t for t in texts if (t.task, t.prompt_id) not in measured] or list(texts)
    count = min(count, len(others))
    spread = [others[i * len(others) // count] for i in range(count)]
    return [Turn.of(t) for t in spread]


def run(conf: DictConfig) -> None:
    """Decode with every system, replay every policy, and write ``results.json`` and the tables."""
    config = drafting_config(conf)
    profile = open_profile(conf)
    artifact = open_scheduler(conf, config)
    value = open_value(conf, config)
    sampling = sampling_config(conf)
    if not (conf.evaluate.decode or sampling.untouched):
        raise InputError(
            "evaluate.decode=false: leaves replay only, which is of greedy decoding; give "
            "evaluate.decode=true or leave sampling.* as it is"
        )
    prompts, decoded = evaluated_prompts(conf)
    announce(conf, profile, decoded)
    folder = Path(conf.paths.evaluation)
    with stage_run(conf, "evaluate", folder) as stage:
        stage.read(prompt_source(conf, "evaluate"), f"{len(prompts)} prompts")
        stage.read(conf.paths.scheduler)
        note_other_rules(artifact, config)
        bench = Bench(conf, open_pair(conf), profile, artifact, value)
        small, mid = families(bench.pair, config)
        check_fits(artifact, config, small, mid, profile, list(conf.evaluate.allow))
        systems = bench.build()
        texts, ties = greedy_texts(
            bench.pair,
            prompts,
            int(conf.evaluate.max_new_tokens),
            int(conf.collect.batch),
            config,
            Path(conf.paths.cache) / "texts",
        )
        if sampling.untouched and not any(text.roots() for text in texts):
            raise InputError(
                f"evaluate.max_new_tokens={conf.evaluate.max_new_tokens}: no answer of two tokens "
                "or more; raise it or give other prompts"
            )
        stage.metrics["ties_decoded_again"] = ties
        stage.metrics["prompts_left_out"] = len(left_out(prompts, texts))
        jobs = units(texts, decoded)
        records: list[dict[str, Any]] = []
        if jobs:
            warm = warm_up_turns(texts, decoded, int(conf.evaluate.warmup_prompts))
            records = measure(bench, systems, jobs, warm, folder)
        verdict = replay_texts(bench, stage, texts, config) if sampling.untouched else None
        if records:
            report_systems(bench, stage, systems, records, verdict)
        stage.write_tables()


def announce(conf: DictConfig, profile: LatencyProfile, decoded: Sequence[TaskPrompt]) -> None:
    """Say what the run will cost, before anything is loaded."""
    turns = sum(len(p.prompt.turns) for p in decoded)
    print(
        f"about {expected_minutes(conf, profile, decoded):.0f} min by the latency profile: "
        f"{len(conf.systems)} systems x {turns} turns x {conf.evaluate.max_new_tokens} tokens; "
        "cut short (Ctrl-C), the same command goes on where it stopped",
        flush=True,
    )
    tasks = list(dict.fromkeys(p.task for p in decoded))
    if tasks and not any(in_ablation(conf, task) for task in tasks):
        print(
            f"note: evaluate.ablation_tasks={list(conf.evaluate.ablation_tasks)}: none of "
            f"{', '.join(tasks)}; no ablation runs"
        )


def replay_texts(
    bench: Bench, stage: Stage, texts: Sequence[Text], config: DraftingConfig
) -> Verdict:
    """Replay all policies, print the tables and the findings, draw η by policy."""
    conf, profile = bench.conf, bench.profile
    folder = Path(conf.paths.evaluation)
    planner = None
    decision_ms = {"scheduler": profile.decision_ms()}
    if bench.value is not None:
        planner = OnlinePlanner(bench.value, check_numerator(conf))
        search = planner.decision_ms(100, profile.target_ms, profile.mid_ms)
        decision_ms["online"] = profile.signals_ms + search
        stage.metrics["online_decision_ms"] = search
    tries = enumerate_texts(bench, texts, config)
    enumerated = Enumerated(tries, texts_of(tries), walks(bench, tries, planner))
    found = outcomes(tries, profile)
    runs = replay_all(enumerated, found, decision_ms)
    verdict = Verdict(
        enumerated.texts,
        runs | replay_capped(enumerated, found, decision_ms),
        config.depth,
        profile.plain_ms,
        decision_ms,
        int(conf.evaluate.bootstrap),
        int(conf.seed),
    )
    show_replay(stage, verdict)
    budgets = by_budget(enumerated, config, profile, decision_ms)
    stage.show("× plain decoding under a smaller verification budget, same trees", budgets)
    values = verdict.comparisons()
    values["findings"] = [*sentences(values), budget_advice(budgets, config.verify_nodes)]
    for line in values["findings"]:
        print(line)
    stage.metrics |= {k: v for k, v in values.items() if k not in ("findings",)}
    stage.metrics["states"] = len(tries)
    replayed = {"policies": verdict.policies(), "budgets": budgets, **values}
    write_json(folder / "replay.json", replayed)
    stage.wrote(folder / "replay.json")
    picture = folder / "eta_by_policy.png"
    plot_policies(picture, verdict, conf.pair.name)
    stage.picture("η by policy", picture)
    return verdict


def show_replay(stage: Stage, verdict: Verdict) -> None:
    """Print the replayed policies, by task, and the fixed schedules."""
    stage.show(f"replay of {verdict.prompts} held-out prompts, exact", verdict.policies())
    stage.show("η by task, tokens/s", verdict.by_task())
    ranked = sorted(verdict.fixed, key=verdict.eta, reverse=True)
    stage.show(
        "the fixed schedules, best first",
        [{"schedule": name, "η tokens/s": verdict.eta(name)} for name in ranked],
    )


def report_systems(
    bench: Bench,
    stage: Stage,
    systems: dict[str, System],
    records: Sequence[dict[str, Any]],
    verdict: Verdict | None,
) -> None:
    """Write ``results.json``; print the tables of the systems and what holds of the paper's."""
    path = Path(bench.conf.paths.evaluation) / "results.json"
    predicted = predict(bench, systems, records, verdict)
    write_json(path, collate(bench, systems, records, predicted, verdict))
    stage.wrote(path)
    results = load_results(path)
    tokens = bench.conf.evaluate.max_new_tokens
    stage.show(f"real decoding, {len(records)} turns of up to {tokens} tokens", main_table(results))
    stage.show("by task", task_table(results))
    stage.show("ablations", ablation_table(results))
    for line in orderings(results):
        print(line)
