"""Decoding prompts with every system in turn: timed honestly, cut short and gone on with.

Systems take turns prompt by prompt, starting with another each time, so that drift of the machine
hits all alike. One file a prompt is written when all of its systems are done; a run that was cut
short goes on with the missing ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from pipeline.features import check_numerator
from pipeline.inputs import digest
from pipeline.report import machine
from pipeline.systems import Bench, Output, System
from pipeline.tasks import TaskPrompt
from pipeline.texts import Text, fingerprint
from treegraft_core import InputError, LatencyProfile, Round, Sampling
from treegraft_core.drafting import MidCall
from treegraft_core.files import write_json

FORMAT = 1
OUTPUT_FIELDS = ("tokens", "counted", "ms", "rounds")
CALL_FIELDS = tuple(field.name for field in fields(MidCall))
EXPECTED_SHARE = 0.85
"""Of the most new tokens, what an answer is expected to take."""
EXPECTED = {
    "small": (0.0, 1.5),
    "mid": (5.0, 2.3),
    "specinfer": (5.0, 2.2),
    "csd": (3.0, 1.5),
    "without_nd": (3.0, 1.9),
    "without_eg": (3.0, 2.0),
    "fixed": (3.0, 2.1),
    "scheduler": (1.0, 1.8),
    "online": (1.0, 1.8),
}
"""Mid calls and committed tokens of a round, to say beforehand what a run will take."""
WARM_UP_TOKENS = 4
LEAST_SAMPLING = {"temperature": 1e-4, "repetition_penalty": 1e-3}
"""Below these, logits overflow."""
ENUMERATED_CALLS = 4.0
"""Time of enumerating a state, in mid calls."""


@dataclass(frozen=True)
class Turn:
    """One turn to decode: where it comes from, and its prompt."""

    task: str
    prompt_id: str
    turn: int
    ids: tuple[int, ...]

    @classmethod
    def of(cls, text: Text) -> Turn:
        """Return the turn that a text answers."""
        return cls(text.task, text.prompt_id, text.turn, tuple(text.tokens[: text.prompt_tokens]))


def sampling_config(conf: DictConfig) -> Sampling:
    """Return the validated way of choosing tokens, with the run's seed."""
    values = OmegaConf.to_container(conf.sampling, resolve=True)
    assert isinstance(values, dict)
    sampling = Sampling(**{str(k): v for k, v in values.items()}, seed=int(conf.seed))
    for name, least in LEAST_SAMPLING.items():
        value = getattr(sampling, name)
        if 0 < value < least:
            raise InputError(
                f"sampling.{name}={value}: logits overflow; must be at least {least}"
                f"{', or 0 (greedy)' if name == 'temperature' else ''}"
            )
    return sampling


def seed_of(seed: int, turn: Turn) -> int:
    """Return the seed of one turn, the same for every system."""
    text = json.dumps([seed, turn.task, turn.prompt_id, turn.turn])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def units(texts: Sequence[Text], prompts: Sequence[TaskPrompt]) -> list[list[Turn]]:
    """Return the turns of each prompt, in the order of ``prompts``."""
    turns: dict[tuple[str, str], list[Turn]] = {}
    for text in texts:
        turns.setdefault((text.task, text.prompt_id), []).append(Turn.of(text))
    keys = [(p.task, p.prompt.question_id) for p in prompts]
    return [turns[key] for key in keys if key in turns]


# What it will cost --------------------------------------------------------------------------


def expected_minutes(
    conf: DictConfig, profile: LatencyProfile, prompts: Sequence[TaskPrompt]
) -> float:
    """Return what measuring is expected to take, minutes: from the latency profile alone."""
    tokens = int(conf.evaluate.max_new_tokens)
    total = 0.0
    for p in prompts:
        for turn in p.prompt.turns:
            context = len(turn) // 4 + tokens // 2 + 40
            read = float(profile.verify.at(context, 0))
            each = tokens * EXPECTED_SHARE
            for options in conf.systems.values():
                if options.get("ablation") and not in_ablation(conf, p.task):
                    continue
                total += each * expected_ms(conf, profile, options, context)
                total += read * (options.role == "peer")
            total += read + each * ENUMERATED_CALLS * profile.mid_ms
    return total / 60e3


def expected_ms(
    conf: DictConfig, profile: LatencyProfile, options: DictConfig, context: int
) -> float:
    """Return the expected time of one token under a system, ms."""
    if options.role not in EXPECTED:
        return profile.plain_ms
    calls, committed = EXPECTED[options.role]
    nodes = int(conf.drafting.depth if options.role == "csd" else conf.drafting.verify_nodes)
    calls *= conf.drafting.depth / 5
    return (float(profile.verify.at(nodes + 1, context)) + calls * profile.mid_ms) / committed


def in_ablation(conf: DictConfig, task: str) -> bool:
    """Tell whether ablations run on a task."""
    tasks = conf.evaluate.ablation_tasks
    if tasks is not None and not OmegaConf.is_list(tasks):
        raise InputError(
            f"evaluate.ablation_tasks={tasks}: give a list of tasks, such as [{task}], or null for "
            "all"
        )
    return tasks is None or task in tasks


# Which run it is ----------------------------------------------------------------------------


def settings(
    bench: Bench, systems: Mapping[str, System], jobs: Sequence[Sequence[Turn]]
) -> dict[str, Any]:
    """Return everything that the results depend on; runs that differ in it do not mix."""
    conf, value = bench.conf, bench.value
    clock = asdict(bench.profile) | {"meta": None}
    keys = ("systems", "drafting", "runtime", "sampling", "seed")
    return {
        "format": FORMAT,
        "pair": [fingerprint(bench.pair.target), fingerprint(bench.pair.mid)],
        "eos": list(bench.pair.eos_token_ids),
        "dtype": str(bench.pair.target.dtype),
        "device": str(bench.pair.device),
        "pack": bool(conf.engine.pack),
        "machine": machine(),
        "scheduler": digest(bench.artifact.literal()),
        "profile": digest(clock),
        "value": value
        and [
            [fingerprint(module) for module in value.modules],
            digest([value.signals, value.low.tolist(), value.high.tolist()]),
            check_numerator(conf),
        ],
        "turns": digest([[t.task, t.prompt_id, t.turn, t.ids] for unit in jobs for t in unit]),
        "tasks": {name: system.ablation for name, system in systems.items()},
        "ablation_tasks": plain(conf.evaluate.ablation_tasks),
        "max_new_tokens": int(conf.evaluate.max_new_tokens),
        **{key: plain(conf[key]) for key in keys},
    }


def plain(value: Any) -> Any:
    """Return a config value as plain data."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


# Measuring ----------------------------------------------------------------------------------


def measure(
    bench: Bench,
    systems: dict[str, System],
    jobs: Sequence[Sequence[Turn]],
    warm: Sequence[Turn],
    folder: Path,
) -> list[dict[str, Any]]:
    """Decode every turn with every system; return one record a turn, in order.

    Parameters
    ----------
    bench : Bench
        What the systems share.
    systems : dict of System
        Rows of the tables; those with variants get the fastest one.
    jobs : sequence of sequence of Turn
        The turns of each prompt.
    warm : sequence of Turn
        Decoded before the clock starts, to choose among variants.
    folder : Path
        Holds a folder for each run, by its settings.
    """
    what = settings(bench, systems, jobs)
    home = folder / f"run-{digest(what)}"
    if bench.conf.evaluate.restart:
        for part in [*home.glob("*.json")]:
            part.unlink()
    done = {
        number: read_part(home, number, jobs[number])
        for number in range(len(jobs))
        if part_path(home, number).is_file()
    }
    chosen = read_run(home, systems) if done or (home / "run.json").is_file() else {}
    if done:
        print(
            f"{len(done)} of {len(jobs)} prompts were measured before and are in {home}; "
            "evaluate.restart=true measures them again"
        )
    missing = [number for number in range(len(jobs)) if number not in done]
    if missing:
        chosen = choose_variants(bench, systems, warm or jobs[0][:1], chosen)
        write_json(home / "run.json", {"settings": what, "chosen": chosen})
    use_variants(systems, chosen)
    for number in tqdm(missing, desc="decode", unit="prompt"):
        records = decode_prompt(bench, systems, jobs[number], number)
        write_json(part_path(home, number), {"turns": records})
        done[number] = read_part(home, number, jobs[number])
    return [record for number in range(len(jobs)) for record in done[number]]


def part_path(home: Path, number: int) -> Path:
    """Return the file of one prompt."""
    return home / f"{number:05d}.json"


def read_part(home: Path, number: int, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the records of one prompt."""
    path = part_path(home, number)
    try:
        records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["turns"]
        keys = [(r["task"], r["prompt_id"], r["turn"]) for r in records]
        if keys != [(t.task, t.prompt_id, t.turn) for t in turns]:
            raise ValueError("of other turns")
        if any(set(o) != set(OUTPUT_FIELDS) for r in records for o in r["outputs"].values()):
            raise ValueError("an output lacks a field")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: damaged ({error}); delete it and run stage=evaluate again"
        ) from error
    return records


def read_run(home: Path, systems: Mapping[str, System]) -> dict[str, str]:
    """Return the variant of each system that has any, as a run chose it."""
    path = home / "run.json"
    try:
        chosen: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["chosen"]
        if set(chosen) != {s.name for s in systems.values() if s.variants}:
            raise ValueError("chosen: not of these systems")
        for name, variant in chosen.items():
            if variant not in systems[name].variants:
                raise ValueError(f"chosen.{name}={variant}: no such variant")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: damaged ({error}); evaluate.restart=true measures this run again"
        ) from error
    return chosen


def choose_variants(
    bench: Bench, systems: Mapping[str, System], warm: Sequence[Turn], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Warm every system up; return the fastest variant of each, or the ``chosen`` one."""
    n = int(bench.conf.evaluate.warmup_tokens)
    sampling = sampling_config(bench.conf)
    found = dict(chosen)
    for system in tqdm(systems.values(), desc="warm up", unit="system"):
        if not system.variants:
            system.decode(warm[0].ids, WARM_UP_TOKENS, sampling)
        elif system.name in found:
            system.variants[found[system.name]](warm[0].ids, WARM_UP_TOKENS, sampling)
        else:
            rates = {}
            for name, decode in system.variants.items():
                decode(warm[0].ids, WARM_UP_TOKENS, sampling)
                outs = [decode(turn.ids, n, sampling) for turn in warm]
                rates[name] = sum(o.counted for o in outs) / max(1e-9, sum(o.ms for o in outs))
            found[system.name] = max(rates, key=rates.__getitem__)
    return found


def use_variants(systems: Mapping[str, System], chosen: Mapping[str, str]) -> None:
    """Decode by the chosen variants, and name them in the labels."""
    for name, variant in chosen.items():
        system = systems[name]
        system.decode = system.variants[variant]
        system.label = f"{system.label} ({variant})"


def decode_prompt(
    bench: Bench, systems: Mapping[str, System], turns: Iterable[Turn], number: int
) -> list[dict[str, Any]]:
    """Decode the turns of one prompt with every system that runs on its task."""
    n = int(bench.conf.evaluate.max_new_tokens)
    sampling = sampling_config(bench.conf)
    records = []
    for turn in turns:
        names = [
            name
            for name, system in systems.items()
            if not system.ablation or in_ablation(bench.conf, turn.task)
        ]
        first = number % len(names)
        seeded = replace(sampling, seed=seed_of(sampling.seed, turn))
        outputs: dict[str, Output] = {}
        for name in names[first:] + names[:first]:
            decode = systems[name].decode
            # The fastest plain decoding may be another row's own.
            twin = next((other for other in outputs if systems[other].decode == decode), None)
            outputs[name] = outputs[twin] if twin else decode(turn.ids, n, seeded)
        records.append(
            {
                "task": turn.task,
                "prompt_id": turn.prompt_id,
                "turn": turn.turn,
                "prompt_tokens": len(turn.ids),
                "outputs": {name: output_record(outputs[name]) for name in names},
            }
        )
    return records


def output_record(output: Output) -> dict[str, Any]:
    """Return an output as plain data."""
    return {
        "tokens": output.tokens,
        "counted": output.counted,
        "ms": output.ms,
        "rounds": [round_record(r) for r in output.rounds],
    }


def round_record(r: Round) -> dict[str, Any]:
    """Return a round as plain data."""
    return {
        "schedule": list(r.schedule),
        "accepted": r.accepted,
        "committed": r.committed,
        "context": r.context_tokens,
        "tree": r.tree_nodes,
        "kept": r.kept_nodes,
        "caught_up": r.caught_up,
        "mode": r.mode,
        "ms": r.ms,
        "calls": [[getattr(call, name) for name in CALL_FIELDS] for call in r.calls],
        "frontiers": r.frontiers,
        "picks": [[list(p.offsets), p.pool, p.level_pool] for p in r.picks],
    }


def clocked_ms(
    profile: LatencyProfile, record: Mapping[str, Any], decision_ms: float = 0.0
) -> float:
    """Return what the profile says that a recorded round takes, ms."""
    calls = iter(record["calls"])
    steps = [
        MidCall(**dict(zip(CALL_FIELDS, next(calls), strict=True))) if bit else None
        for bit in record["schedule"]
    ]
    return (
        profile.draft_ms(steps, record["context"])
        + profile.verify_ms(record["kept"], record["context"])
        + decision_ms * len(steps)
    )
