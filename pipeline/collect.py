"""stage=collect: all 2^D schedules at real decoding states, logged to Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from pipeline.card import CARD, write_card
from pipeline.dataset import (
    Dataset,
    hold,
    move_aside,
    unit_records,
    with_logged_budget,
)
from pipeline.dispatch import Dispatcher, Stop, Tally, stop_on_signals
from pipeline.engine import check_name, drafting_config, drafting_rules, open_pair, open_profile
from pipeline.engines import open_engine
from pipeline.logs import event, log_file
from pipeline.manifest import FOLDER
from pipeline.places import SPLITS, dataset_url, meta_folder, old_folder
from pipeline.progress import STATUS, Progress
from pipeline.report import Stage, stage_run
from pipeline.rows import enumerate_text
from pipeline.schema import COLUMNS
from pipeline.store import Store, below, is_url, open_store
from pipeline.tasks import TaskPrompt, load_prompts, prompt_source
from pipeline.texts import Text, greedy_texts
from pipeline.units import Unit, plan
from pipeline.worker import Setup
from treegraft_core import (
    AS_DEFINED,
    DraftingConfig,
    FixedSchedule,
    InputError,
    LatencyProfile,
    Pair,
    TreeGraftDecoder,
)
from treegraft_core.errors import StageError

SIGNAL_STATUS = 128
REPLAY_PROMPTS = 6


def show_summary(stage: Stage, records: Sequence[dict[str, Any]]) -> None:
    """Print counts and means by task, and what failed."""
    rows = []
    for task in dict.fromkeys(r["task"] for r in records):
        mine = [r for r in records if r["task"] == task]
        done = [r for r in mine if r["status"] == "done"]
        states = sum(r["states"] for r in done)
        rows.append(
            {
                "task": task,
                "prompts": len(done),
                "empty": sum(r["status"] == "empty" for r in mine),
                "failed": sum(r["status"] == "failed" for r in mine),
                "turns": sum(r["turns"] for r in done),
                "states": states,
                "rows": sum(r["rows"] for r in done),
                **{
                    title: sum(r[name] for r in done) / states if states else float("nan")
                    for title, name in MEANS.items()
                },
            }
        )
    stage.show("collected, by task (A: mean accepted tokens; best: over all schedules)", rows)
    failed = [r for r in records if r["status"] == "failed"]
    if failed:
        stage.show(
            "failed: the same command tries them again",
            [{"task": r["task"], "prompt": r["prompt"], "reason": r["reason"]} for r in failed],
        )
    for r in records:
        if r["status"] != "failed" and "left out" in r.get("reason", ""):
            print(f"note: task={r['task']}, question_id={r['prompt']}: {r['reason']}")


MEANS = {
    "paths a state": "paths",
    "A All Small": "A small",
    "A All Mid": "A mid",
    "A best": "A best",
}


def replay_rounds(
    pair: Pair,
    texts: Sequence[Text],
    config: DraftingConfig,
    profile: LatencyProfile,
    rounds: int,
    seed: int,
) -> dict[str, float]:
    """Run random schedules at random states for real; compare time and A with the log's.

    Returns
    -------
    dict
        Rounds, the ratio of predicted to measured time (ratio of sums, and its quartiles over
        rounds), and the share of rounds with the same A.
    """
    rng = np.random.default_rng(seed)
    usable = [t for t in texts if len(t.roots())]
    model = pair.open_mid()
    predicted, measured, same = [], [], 0
    for _ in tqdm(range(rounds), desc="replay", unit="round"):
        text = usable[int(rng.integers(len(usable)))]
        root = int(rng.choice(np.array(text.roots())))
        outcomes = enumerate_text(pair, model, text, [root], config).outcomes(0)
        o = outcomes[int(rng.integers(len(outcomes)))]
        decoder = TreeGraftDecoder(pair, FixedSchedule(o.bits), config, profile, runtime=AS_DEFINED)
        context = decoder.resume(text.tokens[: root + 1])
        done, _ = decoder.round(context, text.prompt_tokens)
        predicted.append(
            profile.draft_ms(o.calls, root + 1) + profile.verify_ms(o.kept_nodes, root + 1)
        )
        measured.append(done.draft_ms + done.verify_ms)
        same += done.accepted == o.accepted
    ratio = np.array(predicted) / np.array(measured)
    return {
        "replayed_rounds": rounds,
        "predicted_over_measured": float(np.sum(predicted) / np.sum(measured)),
        "ratio_q25": float(np.percentile(ratio, 25)),
        "ratio_q75": float(np.percentile(ratio, 75)),
        "same_accepted_share": same / rounds,
    }


def check_split(conf: DictConfig) -> str:
    """Return ``collect.split``, checked."""
    split = str(conf.collect.split)
    if split not in SPLITS:
        raise InputError(f"collect.split={split}: choose one of {', '.join(SPLITS)}")
    return split


def worker_conf(conf: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain data that means the same in another working directory."""
    plain = OmegaConf.to_container(conf, resolve=True)
    assert isinstance(plain, dict)
    values: dict[str, Any] = {str(name): value for name, value in plain.items()}
    values.pop("stage", None)
    for name, value in values["paths"].items():
        values["paths"][name] = value if is_url(value) else str(Path(value).resolve())
    for role in ("target", "mid"):
        path = values["pair"][role]["path"]
        if Path(path).exists():
            values["pair"][role]["path"] = str(Path(path).resolve())
    return values


def collect_units(
    conf: DictConfig, stage: Stage, dataset: Dataset, units: Sequence[Unit], stop: Stop
) -> Tally:
    """Collect the units that are missing; return what was done."""
    missing = dataset.missing(units)
    if not missing:
        print(f"all {len(units)} prompts are collected already", flush=True)
        return Tally(0)
    url = dataset.store.url if is_url(dataset.store.url) else str(Path(dataset.store.url).resolve())
    setup = Setup(worker_conf(conf), dataset.profile.to_dict(), url, dataset.run)
    engine = open_engine(conf, setup, len(missing))
    before = len(units) - len(missing)
    shard, shards = int(conf.collect.shard), int(conf.collect.shards)
    name = f"{FOLDER}/status-{shard}-of-{shards}.json" if shards > 1 else STATUS
    progress = Progress(stage, dataset.store, engine.name, before, len(units), name)
    note = f", {before} are there already" if before else ""
    print(f"{len(missing)} of {len(units)} prompts to collect{note}; {engine.name}", flush=True)
    with log_file(stage.folder / "log.jsonl", progress.terminal()), progress:
        event("run", engine=engine.name, missing=len(missing), prompts=len(units), url=url)
        dataset.clean()
        try:
            tally = Dispatcher(
                engine,
                missing,
                dataset.accept,
                dataset.commit,
                dataset.drop,
                int(conf.collect.batch),
                int(conf.engine.retries),
                float(conf.engine.unit_timeout_s),
                progress,
            ).run(stop)
        finally:
            dataset.clean()
        event("end", finished=tally.finished["done"], failed=tally.finished["failed"])
    if stop.signal is not None:
        done = before + tally.finished["done"] + tally.finished["empty"]
        print(
            f"stopped; {done} of {len(units)} prompts are collected, the same command goes on",
            flush=True,
        )
        raise SystemExit(SIGNAL_STATUS + stop.signal)
    return tally


def check_outcome(conf: DictConfig, records: Sequence[dict[str, Any]]) -> None:
    """Raise if too much has failed, or nothing is there.

    Raises
    ------
    StageError
        If more than ``collect.failures`` of the prompts failed.
    InputError
        If a task has no state at all.
    """
    failed = [r for r in records if r["status"] == "failed"]
    if len(failed) > float(conf.collect.failures) * len(records):
        raise StageError(
            f"{len(failed)} of {len(records)} prompts failed, the first: {failed[0]['reason']}; "
            f"more than collect.failures={conf.collect.failures} of them"
        )
    for task in dict.fromkeys(r["task"] for r in records):
        mine = [r for r in records if r["task"] == task]
        if all(r["status"] == "empty" for r in mine):
            raise InputError(
                f"task={task}: no prompt has a decoding state (question_id={mine[0]['prompt']}: "
                f"{mine[0]['reason']}); give other prompts, or another collect.max_new_tokens="
                f"{conf.collect.max_new_tokens}"
            )


def timing_check(
    conf: DictConfig, units: Sequence[Unit], config: DraftingConfig, profile: LatencyProfile
) -> dict[str, float]:
    """Run some rounds for real, on texts of a few prompts, as `replay_rounds` says."""
    step = max(1, len(units) // REPLAY_PROMPTS)
    prompts: list[TaskPrompt] = [unit.prompt for unit in units[::step]]
    pair = open_pair(conf)
    texts, _ = greedy_texts(
        pair,
        prompts,
        int(conf.collect.max_new_tokens),
        int(conf.collect.batch),
        config,
        Path(conf.paths.cache) / "texts",
    )
    rounds = int(conf.collect.replay_rounds)
    return replay_rounds(pair, texts, config, profile, rounds, int(conf.seed))


def run(conf: DictConfig) -> None:
    """Collect what is missing of the configured pair's trajectories on the configured prompts.

    With ``collect.split=evaluate`` on the prompts to judge on: they go into a folder of their own,
    which nothing that fits reads. A run that ends early, however it ends, is gone on with by the
    same command.
    """
    drafting_config(conf).small.check_stateless()
    split = check_split(conf)
    check_name("pair.name", str(conf.pair.name))
    profile = open_profile(conf)
    prompts = load_prompts(conf, split, conf.collect.prompts_per_task)
    units = plan(conf, prompts)
    shard, shards = int(conf.collect.shard), int(conf.collect.shards)
    store = open_store(dataset_url(conf, split, str(conf.pair.name)))
    meta = meta_folder(conf, split, str(conf.pair.name))
    meta = meta / f"shard-{shard}-of-{shards}" if shards > 1 else meta
    # The lock first: nothing is printed or moved by a run that has to wait, and Ctrl-C ends it.
    with hold(store, shard, shards, bool(conf.collect.wait)), stop_on_signals() as stop:
        if conf.collect.force:
            begin_anew(conf, store)
        conf = with_logged_budget(conf, store)
        config = drafting_config(conf)
        dataset = Dataset(store, conf, profile)
        with stage_run(conf, "collect", meta) as stage:
            stage.read(prompt_source(conf, split), f"{len(units)} prompts")
            stage.read(Path(conf.paths.profile) / "profile.json")
            note_profile(dataset)
            tally = collect_units(conf, stage, dataset, units, stop)
            finish(conf, stage, dataset, units, tally, config)
            write_card(conf, store)
            stage.wrote(store.url, f"{stage.metrics['rows']:,} rows")
            stage.wrote(below(store.url, CARD))


def begin_anew(conf: DictConfig, store: Store) -> None:
    """Move the dataset aside, as ``collect.force`` asks for."""
    if int(conf.collect.shards) > 1:
        raise InputError("collect.force=true: not with collect.shards; move the dataset yourself")
    place = move_aside(store, old_folder(conf))
    if place is not None:
        print(f"the dataset that was there is in {place} now", flush=True)


def note_profile(dataset: Dataset) -> None:
    """Say so if t does not come from the profile as it is now."""
    if dataset.other_profile:
        old, new = dataset.profile, dataset.own_profile
        print(
            f"note: t comes from the profile that this dataset began with (T_tgt "
            f"{old.target_ms:.4g}, T_mid {old.mid_ms:.4g} ms), not from the one measured since "
            f"({new.target_ms:.4g}, {new.mid_ms:.4g}); collect.force=true begins anew with it",
            flush=True,
        )


def finish(
    conf: DictConfig,
    stage: Stage,
    dataset: Dataset,
    units: Sequence[Unit],
    tally: Tally,
    config: DraftingConfig,
) -> None:
    """Show and check what is there now; compare times with real rounds."""
    records = unit_records(dataset.manifest, units)
    show_summary(stage, records)
    check_outcome(conf, records)
    done = [r for r in records if r["status"] == "done"]
    stage.metrics |= {
        "prompts": len(done),
        "prompts_empty": sum(r["status"] == "empty" for r in records),
        "prompts_failed": sum(r["status"] == "failed" for r in records),
        "states": sum(r["states"] for r in done),
        "rows": sum(r["rows"] for r in done),
        "prompts_left_out": sum("left out" in r.get("reason", "") for r in records),
        "ties_decoded_again": sum(r["ties"] for r in done),
        "collected_now": tally.ended,
        "tried_again": tally.retries,
        "workers_lost": tally.lost,
        "columns": len(COLUMNS),
        "drafting": drafting_rules(config),
    }
    if conf.collect.replay_rounds and done:
        if str(conf.engine.runner) == "ray":
            print("note: collect.replay_rounds: no rounds are run for real under engine=ray")
            return
        with_states = {(r["task"], r["prompt"]) for r in done}
        usable = [unit for unit in units if unit.key in with_states]
        stage.metrics |= timing_check(conf, usable, config, dataset.profile)
