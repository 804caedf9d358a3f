"""stage=evaluate: the paper's systems decode prompts that nothing was fitted on, and exact replay.

Measured rows come from real decoding (`pipeline.measure`), the others from the outcomes of every
schedule at every state of the same texts (`pipeline.replay`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.collate import collate, predict
from pipeline.collect import bits_text, enumerate_text, pack_memory
from pipeline.engine import drafting_config, drafting_rules, open_pair, open_profile
from pipeline.features import check_numerator
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
    Replayed,
    TextTable,
    capped,
    chosen,
    fixed,
    interval,
    oracle,
    planner_walk,
    resamples,
    run_policy,
    scheduler_walk,
    text_table,
    throughput,
    with_budget,
)
from pipeline.report import Stage, stage_run, table
from pipeline.results import ablation_table, load_results, main_table, orderings, task_table
from pipeline.systems import Bench, System
from pipeline.tasks import TaskPrompt, first_of_each, load_prompts, prompt_source
from pipeline.texts import Text, greedy_texts, left_out
from pipeline.value import ValueModel, load_value
from treegraft_core import (
    DraftingConfig,
    InputError,
    LatencyProfile,
    SchedulerArtifact,
    load_scheduler,
)
from treegraft_core.enumeration import Enumeration
from treegraft_core.files import write_json, write_text
from treegraft_core.models import CachedModel
from treegraft_core.tree import IntArray

PAPER_FIXED = (1, 0, 1, 0, 1)
BUDGETS = (3, 7, 15, 31)


def schedule_bits(number: int, depth: int) -> tuple[int, ...]:
    """Return the bits of a schedule's number, τ_1 first."""
    return tuple(number >> (depth - 1 - k) & 1 for k in range(depth))


def build_tables(
    bench: Bench, texts: Sequence[Text], config: DraftingConfig, planner: OnlinePlanner | None
) -> list[TextTable]:
    """Enumerate every state of every text."""
    model, conf = CachedModel(bench.pair.mid), bench.conf
    memory, pack = pack_memory(conf), int(conf.collect.pack)
    tables = []
    with tqdm(texts, desc="enumerate", unit="turn") as bar:
        states = 0
        for text in bar:
            roots = list(text.roots())
            if roots:
                found = enumerate_text(bench.pair, model, text, roots, config, memory, pack)
                choices = walks(bench, found, text, planner)
                tables.append(text_table(text, found, bench.profile, choices))
                states += len(roots)
                bar.set_postfix(states=states)
    return tables


def walks(
    bench: Bench, found: Enumeration, text: Text, planner: OnlinePlanner | None
) -> dict[str, IntArray]:
    """Return the schedules that the policies that read the state walk to."""
    artifact, profile = bench.artifact, bench.profile
    choices = {
        capped(most): scheduler_walk(artifact, found, text, profile, most)
        for most in range(artifact.depth + 1)
    }
    choices["scheduler"] = choices[capped(artifact.depth)]  # no round has more calls
    if planner is not None:
        choices["online"] = planner_walk(planner, found, text, profile)
    return choices


def replay_all(
    tables: Sequence[TextTable], depth: int, decision_ms: dict[str, float]
) -> dict[str, list[Replayed]]:
    """Replay every fixed schedule, the policies that read the state, and the oracle.

    ``decision_ms`` is the time of one decision of each policy that reads the state.
    """
    runs = {
        bits_text(schedule_bits(n, depth)): run_policy(tables, fixed(n)) for n in range(1 << depth)
    }
    for name, each in decision_ms.items():
        runs[name] = run_policy(tables, chosen(name), depth * each)
    runs["oracle"] = run_policy(tables, oracle(depth))
    return runs


class Verdict:
    """Means, intervals and comparisons over held-out texts.

    Parameters
    ----------
    tables, runs
        From `build_tables` and `replay_all`.
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
        tables: Sequence[TextTable],
        runs: dict[str, list[Replayed]],
        depth: int,
        plain_ms: float,
        decision_ms: dict[str, float],
        draws: int,
        seed: int,
    ):
        self.tables, self.runs, self.depth, self.plain_ms = tables, runs, depth, plain_ms
        self.decision_ms = decision_ms
        self.groups = [f"{t.task}\n{t.prompt_id}" for t in tables]
        self._drawn = resamples(self.groups, draws, seed)
        self.tasks = [t.task for t in tables]
        self._sums = {
            name: np.array([[r.tokens, r.ms] for r in rows]) for name, rows in runs.items()
        }
        self.small, self.mid = "0" * depth, "1" * depth
        self.fixed = [name for name in runs if set(name) <= {"0", "1"}]
        self.endpoint = max((self.small, self.mid), key=self.eta)
        self.best_fixed = max(self.fixed, key=self.eta)

    def eta(self, name: str, at: Any = slice(None)) -> float:
        """Return η over texts ``at``, tokens/s."""
        tokens, ms = self._sums[name][at].sum(0)
        return float(1e3 * tokens / ms)

    def interval(self, statistic: Callable[[Any], float]) -> tuple[float, float]:
        """Return the 95 % interval over prompts."""
        return interval(statistic, self._drawn)

    def figures(self, rows: Sequence[Replayed]) -> dict[str, float]:
        """Return η of replayed texts with its interval, mean mid calls and A a round."""
        sums = np.array([[r.tokens, r.ms] for r in rows])

        def eta(at: Any) -> float:
            tokens, ms = sums[at].sum(0)
            return float(1e3 * tokens / ms)

        low, high = self.interval(eta)
        rounds = sum(r.rounds for r in rows)
        return {
            "eta": eta(slice(None)),
            "low": low,
            "high": high,
            "calls": sum(r.calls for r in rows) / rounds,
            "A": sum(r.accepted for r in rows) / rounds,
        }

    def gap_closed(self, at: Any = slice(None)) -> float:
        """Return (scheduler − better endpoint) / (oracle − better endpoint) in η."""
        base = self.eta(self.endpoint, at)
        room = self.eta("oracle", at) - base
        return (self.eta("scheduler", at) - base) / room if room > 1e-9 else float("nan")

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
        ]

    def by_task(self) -> list[dict[str, Any]]:
        """Return η by task."""
        rows = []
        for task in sorted(set(self.tasks)):
            at = np.flatnonzero(np.array(self.tasks) == task)
            rows.append(
                {
                    "task": task,
                    "turns": len(at),
                    "All Small": self.eta(self.small, at),
                    "All Mid": self.eta(self.mid, at),
                    f"fixed {self.best_fixed}": self.eta(self.best_fixed, at),
                    "scheduler": self.eta("scheduler", at),
                    "oracle": self.eta("oracle", at),
                }
            )
        return rows

    def comparisons(self) -> dict[str, Any]:
        """Return the scheduler against the better endpoint and the best fixed schedule."""
        result: dict[str, Any] = {"better_endpoint": self.endpoint, "best_fixed": self.best_fixed}
        for key, other in (("endpoint", self.endpoint), ("best_fixed", self.best_fixed)):
            ratio = self._ratio_to(other)
            result[f"scheduler_over_{key}"] = ratio(slice(None))
            result[f"scheduler_over_{key}_interval"] = self.interval(ratio)
        result["oracle_gap_closed"] = self.gap_closed()
        result["oracle_gap_closed_interval"] = self.interval(self.gap_closed)
        result["oracle_over_endpoint"] = self.eta("oracle") / self.eta(self.endpoint)
        return result

    def _ratio_to(self, other: str) -> Callable[[Any], float]:
        return lambda at: self.eta("scheduler", at) / self.eta(other, at)


def by_budget(
    tables: Sequence[TextTable],
    config: DraftingConfig,
    profile: LatencyProfile,
    decision_ms: dict[str, float],
) -> list[dict[str, Any]]:
    """Return η × plain under every smaller B_ver, exactly, from the logged pruning order."""
    budgets = sorted({b for b in BUDGETS if b < config.verify_nodes} | {config.verify_nodes})
    rows = []
    for budget in budgets:
        smaller = [with_budget(t, profile, budget) for t in tables]
        runs = replay_all(smaller, config.depth, decision_ms)
        plain = 1e3 / profile.plain_ms
        eta = {name: throughput(done) / plain for name, done in runs.items()}
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
    low, high = values["oracle_gap_closed_interval"]
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
        f"It closes {100 * values['oracle_gap_closed']:.0f} % of the gap from the better endpoint "
        f"to the oracle (95 % interval {100 * low:.0f} … {100 * high:.0f} %); the oracle is "
        f"{values['oracle_over_endpoint']:.3f} × the better endpoint.",
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
        systems = bench.build()
        texts, cut = greedy_texts(
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
        stage.metrics["texts_cut_at_a_tie"] = cut
        stage.metrics["prompts_left_out"] = len(left_out(prompts, texts))
        jobs = units(texts, decoded)
        records: list[dict[str, Any]] = []
        if jobs:
            warm = warm_up_turns(texts, decoded, int(conf.evaluate.warmup_prompts))
            records = measure(bench, systems, jobs, warm, folder)
        verdict = replay_texts(bench, stage, texts, config) if sampling.untouched else None
        if records:
            report_systems(bench, stage, systems, records, verdict)
        write_text(
            folder / "tables.txt",
            "\n\n".join(table(rows, title) for title, rows in stage.tables) + "\n",
        )
        stage.wrote(folder / "tables.txt")


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
    tables = build_tables(bench, texts, config, planner)
    verdict = Verdict(
        tables,
        replay_all(tables, config.depth, decision_ms),
        config.depth,
        profile.plain_ms,
        decision_ms,
        int(conf.evaluate.bootstrap),
        int(conf.seed),
    )
    show_replay(stage, verdict)
    budgets = by_budget(tables, config, profile, decision_ms)
    stage.show("× plain decoding under a smaller verification budget, same trees", budgets)
    values = verdict.comparisons()
    values["findings"] = [*sentences(values), budget_advice(budgets, config.verify_nodes)]
    for line in values["findings"]:
        print(line)
    stage.metrics |= {k: v for k, v in values.items() if k not in ("findings",)}
    stage.metrics["states"] = int(sum(len(t.context) for t in tables))
    replayed = {"policies": verdict.policies(), "budgets": budgets, **values}
    write_json(folder / "replay.json", replayed)
    stage.wrote(folder / "replay.json")
    picture = folder / "eta_by_policy.png"
    plot_policies(picture, verdict, conf.pair.name)
    stage.picture("η by policy", picture)
    return verdict


def show_replay(stage: Stage, verdict: Verdict) -> None:
    """Print the replayed policies, by task, and the fixed schedules."""
    prompts = len(set(verdict.groups))
    stage.show(f"replay of {prompts} held-out prompts, exact", verdict.policies())
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
