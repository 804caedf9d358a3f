"""stage=evaluate: what the scheduler is worth on prompts it never saw."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.collect import bits_text, enumerate_text, pack_memory
from pipeline.engine import (
    drafting_config,
    drafting_rules,
    open_pair,
    open_profile,
    runtime_config,
)
from pipeline.plots import plot_policies
from pipeline.replay import (
    Replayed,
    TextTable,
    bootstrap,
    fixed,
    oracle,
    replay,
    scheduled,
    text_table,
    throughput,
    with_budget,
)
from pipeline.report import Stage, stage_run, table
from pipeline.tasks import TaskPrompt, first_of_each, load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import (
    AS_DEFINED,
    DistilledScheduler,
    DraftingConfig,
    FixedSchedule,
    Generation,
    InputError,
    LatencyProfile,
    Pair,
    RuntimeConfig,
    Scheduler,
    SchedulerArtifact,
    TreeGraftDecoder,
    decode_plain,
    load_scheduler,
)
from treegraft_core.files import write_json, write_text
from treegraft_core.models import CachedModel
from treegraft_core.prompts import chat_ids

PAPER_FIXED = (1, 0, 1, 0, 1)
GUARDED = "scheduler, guarded"
BUDGETS = (3, 7, 15, 31)


def schedule_bits(number: int, depth: int) -> tuple[int, ...]:
    """Return the bits of a schedule's number, τ_1 first."""
    return tuple(number >> (depth - 1 - k) & 1 for k in range(depth))


def build_tables(
    pair: Pair,
    texts: Sequence[Text],
    config: DraftingConfig,
    memory: int,
    pack: int,
    profile: LatencyProfile,
    artifact: SchedulerArtifact,
) -> list[TextTable]:
    """Enumerate every state of every held-out text."""
    model = CachedModel(pair.mid)
    tables = []
    with tqdm(texts, desc="enumerate", unit="turn") as bar:
        states = 0
        for text in bar:
            roots = list(text.roots())
            if roots:
                found = enumerate_text(pair, model, text, roots, config, memory, pack)
                tables.append(text_table(text, found, profile, artifact))
                states += len(roots)
                bar.set_postfix(states=states)
    return tables


def replay_all(
    tables: Sequence[TextTable], depth: int, decision_ms: float
) -> dict[str, list[Replayed]]:
    """Replay every fixed schedule, the scheduler and the oracle on every text."""
    runs = {
        bits_text(schedule_bits(n, depth)): [replay(t, fixed(n)) for t in tables]
        for n in range(1 << depth)
    }
    runs["scheduler"] = [replay(t, scheduled, depth * decision_ms) for t in tables]
    runs["oracle"] = [replay(t, oracle) for t in tables]
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
    draws, seed : int
        Of the bootstrap over prompts.
    """

    def __init__(
        self,
        tables: Sequence[TextTable],
        runs: dict[str, list[Replayed]],
        depth: int,
        plain_ms: float,
        draws: int,
        seed: int,
    ):
        self.runs, self.depth, self.plain_ms = runs, depth, plain_ms
        self.draws, self.seed = draws, seed
        self.groups = [f"{t.task}\n{t.prompt_id}" for t in tables]
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
        return bootstrap(self.groups, statistic, self.draws, self.seed)

    def gap_closed(self, at: Any = slice(None)) -> float:
        """Return (scheduler − better endpoint) / (oracle − better endpoint) in η."""
        base = self.eta(self.endpoint, at)
        room = self.eta("oracle", at) - base
        return (self.eta("scheduler", at) - base) / room if room > 1e-9 else float("nan")

    def row(self, label: str, name: str) -> dict[str, Any]:
        """Return one line of the table of policies."""
        rows = self.runs[name]
        rounds = sum(r.rounds for r in rows)
        low, high = self.interval(lambda at: self.eta(name, at))
        return {
            "policy": label,
            "η tokens/s": self.eta(name),
            "95 % interval": f"{low:.2f} … {high:.2f}",
            "× plain": self.eta(name) * self.plain_ms / 1e3,
            "mean A": sum(r.accepted for r in rows) / rounds,
            "mid calls a round": sum(r.calls for r in rows) / rounds,
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
) -> list[dict[str, Any]]:
    """Return η × plain under every smaller B_ver, exactly, from the logged pruning order."""
    budgets = sorted({b for b in BUDGETS if b < config.verify_nodes} | {config.verify_nodes})
    rows = []
    for budget in budgets:
        smaller = [with_budget(t, profile, budget) for t in tables]
        runs = replay_all(smaller, config.depth, profile.decision_ms())
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


def systems(
    config: DraftingConfig, artifact: SchedulerArtifact
) -> dict[str, Callable[[], Scheduler]]:
    """Return the schedulers of the real decode."""
    chosen: dict[str, Callable[[], Scheduler]] = {
        "All Small": lambda: FixedSchedule([0] * config.depth),
        "All Mid": lambda: FixedSchedule([1] * config.depth),
    }
    if config.depth == len(PAPER_FIXED):
        chosen["fixed 10101"] = lambda: FixedSchedule(PAPER_FIXED)
    chosen["scheduler"] = lambda: DistilledScheduler(artifact)
    return chosen


def decode_for_real(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    config: DraftingConfig,
    profile: LatencyProfile,
    artifact: SchedulerArtifact,
    max_new_tokens: int,
    runtime: RuntimeConfig,
) -> dict[str, list[Generation]]:
    """Decode prompts with every system, prompt by prompt so that drift hits all alike.

    All run as defined; the last one is the scheduler under ``runtime``.
    """
    decoders = {
        name: TreeGraftDecoder(pair, make(), config, profile, runtime=AS_DEFINED)
        for name, make in systems(config, artifact).items()
    }
    decoders[GUARDED] = TreeGraftDecoder(
        pair, DistilledScheduler(artifact), config, profile, runtime=runtime
    )
    done: dict[str, list[Generation]] = defaultdict(list)
    for p in tqdm(prompts, desc="decode", unit="prompt"):
        chat: list[dict[str, str]] = []
        for turn in p.prompt.turns:
            chat.append({"role": "user", "content": turn})
            ids = chat_ids(pair.tokenizer, chat)
            plain = decode_plain(pair, ids, max_new_tokens)
            done["plain"].append(plain)
            for name, decoder in decoders.items():
                done[name].append(decoder.generate(ids, max_new_tokens))
            answer = pair.tokenizer.decode(plain.tokens, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": answer})
    return done


def decode_table(done: dict[str, list[Generation]]) -> list[dict[str, Any]]:
    """Return tokens/s, speed-up over plain, mean A and identical outputs of each system."""
    rows = []
    plain = _rate(done["plain"])
    for name, results in done.items():
        rounds = [r for g in results for r in g.rounds]
        same = sum(g.tokens == p.tokens for g, p in zip(results, done["plain"], strict=True))
        rows.append(
            {
                "system": name,
                "tokens/s": _rate(results),
                "× plain": _rate(results) / plain,
                "mean A": float(np.mean([r.accepted for r in rounds])) if rounds else 0.0,
                "mid calls a round": float(np.mean([sum(r.schedule) for r in rounds]))
                if rounds
                else 0.0,
                "same tokens as plain": f"{same} of {len(results)}",
            }
        )
    return rows


def _rate(results: Sequence[Generation]) -> float:
    ms = sum(g.decode_ms for g in results)
    return 1e3 * sum(len(g.tokens) - 1 for g in results) / ms if ms else float("nan")


def open_scheduler(conf: DictConfig, config: DraftingConfig) -> SchedulerArtifact:
    """Load the exported scheduler and check that it fits the drafting depth."""
    artifact = load_scheduler(Path(conf.paths.scheduler))
    if artifact.depth != config.depth:
        raise InputError(
            f"drafting.depth={config.depth}: the scheduler in {conf.paths.scheduler} was trained "
            f"for depth {artifact.depth}; collect and distil for this depth"
        )
    return artifact


def note_other_rules(artifact: SchedulerArtifact, config: DraftingConfig) -> None:
    """Say so when the scheduler was distilled from trees grown by other rules."""
    trained = artifact.metadata.get("drafting", {})
    for name, value in drafting_rules(config).items():
        if name in trained and trained[name] != value:
            print(
                f"note: the scheduler was distilled with drafting.{name}={trained[name]}; "
                f"this evaluates it with {value}"
            )


def run(conf: DictConfig) -> None:
    """Replay all policies on held-out prompts and decode some of them for real."""
    config = drafting_config(conf)
    profile = open_profile(conf)
    artifact = open_scheduler(conf, config)
    prompts = load_prompts(conf, "evaluate", conf.evaluate.prompts_per_task)
    folder = Path(conf.paths.evaluation)
    with stage_run(conf, "evaluate", folder) as stage:
        stage.read(
            conf.task.path or conf.task.evaluate or conf.task.hub.id, f"{len(prompts)} prompts"
        )
        stage.read(conf.paths.scheduler)
        note_other_rules(artifact, config)
        pair = open_pair(conf)
        texts, cut = greedy_texts(
            pair,
            prompts,
            int(conf.evaluate.max_new_tokens),
            int(conf.collect.batch),
            config,
            Path(conf.paths.cache) / "texts",
        )
        tables = build_tables(
            pair,
            texts,
            config,
            pack_memory(conf),
            int(conf.collect.pack),
            profile,
            artifact,
        )
        report_replay(conf, stage, tables, config, profile)
        stage.metrics["texts_cut_at_a_tie"] = cut
        chosen = first_of_each(prompts, int(conf.evaluate.decode_prompts_per_task))
        if chosen:
            done = decode_for_real(
                pair,
                chosen,
                config,
                profile,
                artifact,
                int(conf.evaluate.decode_tokens),
                runtime_config(conf),
            )
            rows = decode_table(done)
            stage.show(f"real decode of {len(chosen)} held-out prompts", rows)
            stage.metrics["real_decode"] = rows
        write_text(
            folder / "tables.txt",
            "\n\n".join(table(rows, title) for title, rows in stage.tables) + "\n",
        )
        stage.wrote(folder / "tables.txt")


def report_replay(
    conf: DictConfig,
    stage: Stage,
    tables: Sequence[TextTable],
    config: DraftingConfig,
    profile: LatencyProfile,
) -> None:
    """Replay all policies, print the tables and the findings, draw η by policy."""
    folder = Path(conf.paths.evaluation)
    if not tables:
        raise InputError(
            f"evaluate.max_new_tokens={conf.evaluate.max_new_tokens}: no answer of two tokens or "
            "more; raise it or give other prompts"
        )
    runs = replay_all(tables, config.depth, profile.decision_ms())
    verdict = Verdict(
        tables,
        runs,
        config.depth,
        profile.plain_ms,
        int(conf.evaluate.bootstrap),
        int(conf.seed),
    )
    policies = verdict.policies()
    n_prompts = len(set(verdict.groups))
    stage.show(f"replay of {n_prompts} held-out prompts, exact", policies)
    stage.show("η by task, tokens/s", verdict.by_task())
    ranked = sorted(verdict.fixed, key=verdict.eta, reverse=True)
    stage.show(
        "the fixed schedules, best first",
        [{"schedule": name, "η tokens/s": verdict.eta(name)} for name in ranked],
    )
    budgets = by_budget(tables, config, profile)
    stage.show("× plain decoding under a smaller verification budget, same trees", budgets)
    values = verdict.comparisons()
    values["findings"] = [*sentences(values), budget_advice(budgets, config.verify_nodes)]
    for line in values["findings"]:
        print(line)
    stage.metrics |= {k: v for k, v in values.items() if k not in ("findings",)}
    stage.metrics["states"] = int(sum(len(t.choice) for t in tables))
    write_json(folder / "replay.json", {"policies": policies, "budgets": budgets, **values})
    stage.wrote(folder / "replay.json")
    picture = folder / "eta_by_policy.png"
    plot_policies(picture, verdict, conf.pair.name)
    stage.picture("η by policy", picture)
