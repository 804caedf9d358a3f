"""``results.json`` of stage=evaluate: checked reading, statistics over prompts, rows of tables.

One file holds what every system did on every turn of one pair. All intervals are 95 % percentile
bootstrap intervals over prompts; a comparison of two systems counts only turns that both ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.inputs import damaged, read_json
from treegraft_core import InputError
from treegraft_core.tree import FloatArray, IntArray

FORMAT = 1
STAGE = "evaluate"
FIELDS = ("tokens", "ms", "rounds", "accepted", "calls", "same")
TOKENS, MS, ROUNDS, ACCEPTED, CALLS, SAME = range(len(FIELDS))
ROLES = (
    *("plain", "fastest", "peer", "small", "mid", "scheduler", "guarded", "fixed"),
    *("csd", "without_eg", "without_nd", "specinfer", "online", "other"),
)
NONE = "–"
ONE_PROMPT = "one prompt: no interval"

ABLATIONS = {
    "csd": "CSD",
    "without_nd": "w/o ND",
    "without_eg": "w/o EG",
    "fixed": "full, fixed schedule",
    "scheduler": "TreeGraft, scheduler",
    "online": "online planning",
    "specinfer": "SpecInfer",
}
PAPER_ABLATIONS = {
    "csd": (0.94, 0.81),
    "without_nd": (1.20, 1.47),
    "without_eg": (1.35, 1.80),
    "fixed": (1.43, 2.17),
    "scheduler": (1.94, 2.30),
    "online": (0.95, math.nan),
}
"""× plain and A in the paper (GSM8K and CNN/DM, two pairs, 2 × A100)."""


class Estimate(NamedTuple):
    """A figure and its 95 % interval over prompts; NaN bounds where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, decimals: int = 2) -> str:
        """Return ``1.43 (1.38 … 1.49)``; a dash if there is no figure."""
        if not math.isfinite(self.value):
            return NONE
        return f"{self.value:.{decimals}f} ({self.interval(decimals)})"

    def interval(self, decimals: int = 2) -> str:
        """Return ``1.38 … 1.49``, or that one prompt has none."""
        if math.isnan(self.low):
            return ONE_PROMPT
        return f"{self.low:.{decimals}f} … {self.high:.{decimals}f}"


def number(value: float, form: str = ".2f") -> str:
    """Return a figure as text; a dash if there is none."""
    return format(value, form) if math.isfinite(value) else NONE


def estimate(samples: FloatArray) -> Estimate:
    """Return the figure ``samples[0]`` and the interval of its resamples ``samples[1:]``."""
    value = float(samples[0])
    drawn = samples[1:][np.isfinite(samples[1:])]
    if not math.isfinite(value) or not len(drawn):
        return Estimate(value if math.isfinite(value) else math.nan)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class System:
    """One way of decoding.

    Attributes
    ----------
    name, label : str
        Key in ``runs``, and what tables show.
    role : str
        One of `ROLES`.
    bits : str or None
        The schedule, if it is a fixed one.
    predicted : float or None
        Speed-up over plain decoding that was predicted without decoding.
    predicted_from : str or None
        What from: ``replay`` or ``counts``.
    """

    name: str
    label: str
    role: str
    bits: str | None = None
    predicted: float | None = None
    predicted_from: str | None = None


@dataclass(frozen=True)
class Picks:
    """Where the mid drafter's frontier picks lie.

    Attributes
    ----------
    calls, picks : float
        Mid calls, and nodes picked by them in all.
    earlier_share : float
        Share of the picks at a depth that no node of N_k has.
    by_offset : dict of int to float
        Picks by depth minus the deepest depth in N_k.
    pool, frontier, usual_pool : float
        Mean nodes of the pool, of N_k, and of the pool without grafting.
    """

    calls: float
    picks: float
    earlier_share: float
    by_offset: dict[int, float]
    pool: float
    frontier: float
    usual_pool: float


@dataclass(frozen=True)
class Policy:
    """η of one policy in exact replay, tokens/s; mean mid calls and accepted tokens a round."""

    name: str
    label: str
    eta: Estimate
    calls: float
    accepted: float


@dataclass(frozen=True)
class Budget:
    """η with at most ``calls`` mid calls a round, tokens/s."""

    calls: int
    scheduler: Estimate
    oracle: Estimate


@dataclass(frozen=True)
class Replay:
    """Exact replay: policies, every fixed schedule, and η by mid-call budget."""

    prompts: int
    plain: float
    policies: list[Policy]
    fixed: list[Policy]
    by_calls: list[Budget]


@dataclass
class Results:
    """What stage=evaluate measured for one pair.

    Attributes
    ----------
    turn_tasks, groups : str arrays, shape ``[turns]``
        Task of each turn, and its prompt; the turns of one prompt are resampled together.
    runs : dict of str to float64 array, shape ``[turns, 6]``
        By system: `FIELDS` of each turn, NaN where the system did not run. ``same`` is 1 where
        the tokens are those of plain decoding, NaN where they cannot be compared.
    calls_by_step : dict of str to dict of str to list of float
        By system and task (or ``all``): share of rounds that call the mid drafter, by step.
    cost : dict of str to dict of str to float
        By system: ms a round of each part.
    path : Path
        The file.
    """

    pair: str
    target: str
    mid: str
    fitted_on: list[str]
    unseen_pair: bool
    held_out_tasks: list[str]
    settings: dict[str, Any]
    profile: dict[str, float]
    systems: list[System]
    turn_tasks: np.ndarray
    groups: np.ndarray
    runs: dict[str, FloatArray]
    calls_by_step: dict[str, dict[str, list[float]]]
    cost: dict[str, dict[str, float]]
    picks: dict[str, Picks]
    replay: Replay | None
    path: Path
    _weights: dict[bytes, FloatArray] = field(default_factory=dict, repr=False)

    @property
    def tasks(self) -> list[str]:
        """The tasks in the order of the turns."""
        return list(dict.fromkeys(map(str, self.turn_tasks)))

    @property
    def plain(self) -> str:
        """Name of plain decoding, the base of × plain."""
        return next(s.name for s in self.systems if s.role == "plain")

    def role(self, role: str) -> System | None:
        """Return the first system of a role, if any."""
        return next((s for s in self.systems if s.role == role), None)

    def label(self, name: str) -> str:
        """Return a system's label; the name itself for what is no system."""
        return next((s.label for s in self.systems if s.name == name), name)

    def turns(self, *names: str, tasks: Sequence[str] | None = None) -> IntArray:
        """Return the turns that all the named systems ran, in ``tasks`` if given."""
        ran = np.ones(len(self.turn_tasks), bool)
        for name in names:
            ran &= ~np.isnan(self.runs[name][:, MS])
        if tasks is not None:
            ran &= np.isin(self.turn_tasks, list(tasks))
        return np.flatnonzero(ran)

    def weights(self, turns: IntArray) -> FloatArray:
        """Return how often each resample draws each turn.

        Returns
        -------
        float64 array, shape ``[1 + draws, turns]``
            The first row is the data, all ones; it is the only row if all turns are of one prompt.
            The draws are those of `pipeline.replay.bootstrap` on the same turns.
        """
        key = turns.tobytes()
        if key not in self._weights:
            names, prompt = np.unique(self.groups[turns], return_inverse=True)
            draws = int(self.settings["bootstrap"]) if len(names) > 1 else 0
            rng = np.random.default_rng(int(self.settings["seed"]))
            picked = rng.integers(max(len(names), 1), size=(draws, len(names)))
            cells = picked + len(names) * np.arange(draws)[:, None]
            counts = np.bincount(cells.ravel(), minlength=draws * len(names))
            drawn = counts.reshape(draws, len(names))[:, prompt]
            self._weights[key] = np.vstack([np.ones((1, len(turns))), drawn])
        return self._weights[key]

    def _speedups(
        self, name: str, base: str, turns: IntArray, members: FloatArray | None = None
    ) -> FloatArray:
        """Return ratios of tokens/ms, ``[1 + draws, parts]``; ``members`` is ``[turns, parts]``."""
        weights = self.weights(turns)
        parts = np.ones((len(turns), 1)) if members is None else members

        def sums(system: str, column: int) -> FloatArray:
            found: FloatArray = weights @ (parts * self.runs[system][turns, column, None])
            return found

        with np.errstate(divide="ignore", invalid="ignore"):
            ours = sums(name, TOKENS) / sums(name, MS)
            return ours / (sums(base, TOKENS) / sums(base, MS))

    def speedup_samples(
        self, name: str, base: str, tasks: Sequence[str] | None = None
    ) -> FloatArray:
        """Return the speed-up over the turns that both ran, and its resamples: ``[1 + draws]``."""
        return self._speedups(name, base, self.turns(name, base, tasks=tasks))[:, 0]

    def average_samples(
        self, name: str, base: str, tasks: Sequence[str] | None = None
    ) -> FloatArray:
        """Return the mean of the per-task speed-ups, and its resamples: ``[1 + draws]``.

        A task of which a resample draws no prompt is left out of that resample's mean.
        """
        turns = self.turns(name, base, tasks=tasks)
        of_turn = self.turn_tasks[turns]
        members = (of_turn[:, None] == np.unique(of_turn)).astype(np.float64)
        ratios = self._speedups(name, base, turns, members)
        there = np.isfinite(ratios)
        with np.errstate(invalid="ignore"):
            return np.where(there, ratios, 0.0).sum(axis=1) / there.sum(axis=1)

    def speedup(self, name: str, base: str, tasks: Sequence[str] | None = None) -> Estimate:
        """Return the ratio of tokens/ms of two systems, summed over the turns that both ran."""
        return estimate(self.speedup_samples(name, base, tasks))

    def average_speedup(self, name: str, base: str, tasks: Sequence[str] | None = None) -> Estimate:
        """Return the mean over tasks of the per-task speed-ups, the paper's average."""
        return estimate(self.average_samples(name, base, tasks))

    def _per_round(self, name: str, turns: IntArray, column: int) -> FloatArray:
        weights, run = self.weights(turns), self.runs[name][turns]
        with np.errstate(divide="ignore", invalid="ignore"):
            return (weights @ run[:, column]) / (weights @ run[:, ROUNDS])

    def accepted(self, name: str, tasks: Sequence[str] | None = None) -> Estimate:
        """Return the mean A of a round."""
        return estimate(self._per_round(name, self.turns(name, tasks=tasks), ACCEPTED))

    def calls(self, name: str, tasks: Sequence[str] | None = None) -> Estimate:
        """Return the mean mid calls of a round."""
        return estimate(self._per_round(name, self.turns(name, tasks=tasks), CALLS))

    def accepted_difference(
        self, name: str, other: str, tasks: Sequence[str] | None = None
    ) -> Estimate:
        """Return mean A of ``name`` minus that of ``other`` over the turns that both ran."""
        turns = self.turns(name, other, tasks=tasks)
        ours, theirs = (self._per_round(n, turns, ACCEPTED) for n in (name, other))
        return estimate(ours - theirs)

    def rate(self, name: str, tasks: Sequence[str] | None = None) -> float:
        """Return tokens/s of a system over the turns that it ran; NaN without time."""
        tokens, ms = self.runs[name][self.turns(name, tasks=tasks)][:, [TOKENS, MS]].sum(axis=0)
        return float(1e3 * tokens / ms) if ms else math.nan

    def better_endpoint(self) -> System | None:
        """Return All Small or All Mid, whichever is faster on the turns that both ran."""
        small, mid = self.role("small"), self.role("mid")
        if small is None or mid is None:
            return small or mid
        return mid if self.speedup_samples(mid.name, small.name)[0] > 1 else small


def load_results(path: Path) -> Results:
    """Read one ``results.json``.

    Raises
    ------
    InputError
        If it is missing, damaged or of another format; the fix is to run stage=evaluate.
    """
    return parse_results(read_json(path, STAGE), path)


def load_all(folder: Path) -> list[Results]:
    """Read ``folder/PAIR/results.json`` of every pair: fitted pairs first, each by name."""
    paths = sorted(folder.glob("*/results.json"))
    if not paths:
        raise InputError(
            f"{folder}: no results.json of any pair; run python -m pipeline.run stage={STAGE} first"
        )
    found = [load_results(path) for path in paths]
    names = [r.pair for r in found]
    for r in found:
        if names.count(r.pair) > 1:
            raise InputError(
                f"{r.path}: pair {r.pair} has another results.json beside it; remove one of them"
            )
    return sorted(found, key=lambda r: (r.unseen_pair, r.pair))


def parse_results(value: Mapping[str, Any], path: Path) -> Results:
    """Check a results object and turn it into arrays; ``path`` is for error messages.

    Raises
    ------
    InputError
        If anything in it is missing, of the wrong kind, or of another format.
    """
    if value.get("format") != FORMAT:
        raise damaged(path, STAGE, f"format {value.get('format')}, this version reads {FORMAT}")
    try:
        return _parse(value, path)
    except KeyError as error:
        raise damaged(path, STAGE, f"no key {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise damaged(path, STAGE, error) from error


def _parse(value: Mapping[str, Any], path: Path) -> Results:
    turns = value["turns"]
    settings = dict(value["settings"])
    if int(settings["bootstrap"]) < 1 or int(settings["seed"]) < 0:
        raise ValueError("settings.bootstrap must be 1 or more and settings.seed 0 or more")
    if not turns:
        raise ValueError("no turns")
    systems = [_system(entry) for entry in value["systems"]]
    runs = {s.name: _runs(value["runs"][s.name], len(turns), s.name) for s in systems}
    if len(runs) < len(systems) or sum(s.role == "plain" for s in systems) != 1:
        raise ValueError("systems need distinct names, and one of them the role plain")
    return Results(
        pair=str(value["pair"]),
        target=str(value["target"]),
        mid=str(value["mid"]),
        fitted_on=[str(name) for name in value["fitted_on"]],
        unseen_pair=bool(value["unseen_pair"]),
        held_out_tasks=[str(name) for name in value["held_out_tasks"]],
        settings=settings,
        profile=_numbers(value["profile"]),
        systems=systems,
        turn_tasks=np.array([str(turn["task"]) for turn in turns]),
        groups=np.array([f"{turn['task']}\n{turn['prompt_id']}" for turn in turns]),
        runs=runs,
        calls_by_step={name: _calls(rates) for name, rates in value["calls_by_step"].items()},
        cost={name: _numbers(parts) for name, parts in value["cost"].items() if parts},
        picks={name: _picks(entry) for name, entry in value["picks"].items()},
        replay=None if value["replay"] is None else _replay(value["replay"]),
        path=path,
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _numbers(value: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(number) for name, number in value.items()}


def _system(entry: Mapping[str, Any]) -> System:
    if entry["role"] not in ROLES:
        raise ValueError(f"role {entry['role']} of {entry['name']} is none of {', '.join(ROLES)}")
    predicted = _number(entry["predicted"])
    return System(
        str(entry["name"]),
        str(entry["label"]),
        str(entry["role"]),
        entry["bits"],
        predicted if math.isfinite(predicted) else None,
        entry["predicted_from"],
    )


def _runs(entries: Sequence[Mapping[str, Any] | None], turns: int, name: str) -> FloatArray:
    if len(entries) != turns:
        raise ValueError(f"runs of {name}: {len(entries)} entries for {turns} turns")
    found = np.full((turns, len(FIELDS)), math.nan)
    for at, entry in enumerate(entries):
        if entry is None:
            continue
        measured = [float(entry[column]) for column in FIELDS[:SAME]]
        timed = measured[MS] > 0 or measured[TOKENS] == 0
        if not (timed and all(math.isfinite(x) and x >= 0 for x in measured)):
            raise ValueError(f"runs of {name}, entry {at}: not a measured run")
        found[at] = [*measured, _number(entry["same"])]
    return found


def _calls(by_task: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    rates = {str(task): [_number(rate) for rate in row] for task, row in by_task.items()}
    if len({len(row) for row in rates.values()}) > 1:
        raise ValueError("calls_by_step: tasks with different numbers of steps")
    return rates


def _picks(entry: Mapping[str, Any]) -> Picks:
    return Picks(
        calls=_number(entry["calls"]),
        picks=_number(entry["picks"]),
        earlier_share=_number(entry["earlier_share"]),
        by_offset={int(k): _number(v) for k, v in entry["by_offset"].items()},
        pool=_number(entry["pool"]),
        frontier=_number(entry["frontier"]),
        usual_pool=_number(entry["usual_pool"]),
    )


def _policy(entry: Mapping[str, Any], name: str, label: str) -> Policy:
    eta = Estimate(_number(entry["eta"]), _number(entry["low"]), _number(entry["high"]))
    return Policy(str(name), str(label), eta, _number(entry["calls"]), _number(entry["A"]))


def _replay(value: Mapping[str, Any]) -> Replay:
    def bounded(entry: Mapping[str, Any], name: str) -> Estimate:
        return Estimate(*(_number(entry[key]) for key in (name, f"{name}_low", f"{name}_high")))

    return Replay(
        prompts=int(value["prompts"]),
        plain=float(value["plain"]),
        policies=[_policy(entry, entry["name"], entry["label"]) for entry in value["policies"]],
        fixed=[_policy(entry, entry["bits"], entry["bits"]) for entry in value["fixed"]],
        by_calls=[
            Budget(int(entry["budget"]), bounded(entry, "scheduler"), bounded(entry, "oracle"))
            for entry in value["by_calls"]
        ],
    )


def main_table(results: Results) -> list[dict[str, Any]]:
    """Return one row a system: speed, A, calls, losslessness, and how good its prediction was."""
    return [_main_row(results, system) for system in results.systems]


def _main_row(results: Results, system: System) -> dict[str, Any]:
    name, plain, fastest = system.name, results.plain, results.role("fastest")
    times = results.speedup(name, plain)
    same = results.runs[name][:, SAME]
    compared = np.isfinite(same)
    predicted = math.nan if system.predicted is None else system.predicted
    error = 100 * (predicted / times.value - 1) if times.value else math.nan
    return {
        "system": system.label,
        "turns": len(results.turns(name)),
        "tokens/s": results.rate(name),
        "× plain": "1.00" if name == plain else times.text(),
        "× fastest plain": over(results, name, fastest),
        "mean A": results.accepted(name).text(),
        "mid calls a round": number(results.calls(name).value),
        "same tokens": (
            f"{int(same[compared].sum())} of {compared.sum()}" if compared.any() else NONE
        ),
        "predicted × plain": number(predicted),
        "error of prediction, %": number(error, "+.1f"),
        "predicted from": system.predicted_from or NONE,
    }


def over(results: Results, name: str, base: System | None) -> str:
    """Return the speed-up over ``base`` with its interval; 1.00 over itself, a dash over none."""
    if base is None:
        return NONE
    return "1.00" if name == base.name else results.speedup(name, base.name).text()


def role_speedup(
    results: Results,
    role: str,
    base: str,
    tasks: Sequence[str] | None = None,
    average: bool = False,
) -> Estimate:
    """Return the speed-up of one role over another, or the mean over tasks; NaN if not run."""
    ours, theirs = results.role(role), results.role(base)
    if ours is None or theirs is None:
        return Estimate(math.nan)
    statistic = results.average_speedup if average else results.speedup
    return statistic(ours.name, theirs.name, tasks)


GAINS = {
    "S × plain": ("small", "plain"),
    "M × plain": ("mid", "plain"),
    "TreeGraft × plain": ("scheduler", "plain"),
    "TreeGraft over S": ("scheduler", "small"),
    "TreeGraft over M": ("scheduler", "mid"),
}
"""Columns of the paper's main table: role, and role of the base."""


def task_table(results: Results) -> list[dict[str, Any]]:
    """Return one row a task and their average: S, M, TreeGraft over plain; gains over S and M."""
    rows = []
    for task in [*results.tasks, None]:
        tasks, average = (results.tasks, True) if task is None else ([task], False)
        rows.append(
            {
                "task": "average of tasks" if task is None else task_label(results, task),
                "turns": len(results.turns(results.plain, tasks=tasks)),
                "plain tokens/s": results.rate(results.plain, tasks),
                **{
                    column: role_speedup(results, *roles, tasks, average).text()
                    for column, roles in GAINS.items()
                },
            }
        )
    return rows


def task_label(results: Results, task: str) -> str:
    """Return the task, marked if no scheduler was fitted on it."""
    return f"{task} (held out)" if task in results.held_out_tasks else task


def ablation_tasks(results: Results) -> list[str]:
    """Return the tasks of which every ablation that was run has a turn."""
    names = [s.name for s in map(results.role, ABLATIONS) if s is not None]
    return [t for t in results.tasks if all(len(results.turns(n, tasks=[t])) for n in names)]


def ablation_table(results: Results) -> list[dict[str, Any]]:
    """Return × plain and A of every ablation on `ablation_tasks`, beside the paper's figures.

    Empty if no task has all of them.
    """
    tasks = ablation_tasks(results)
    rows = []
    for role, label in ABLATIONS.items() if tasks else ():
        system = results.role(role)
        times, accepted = PAPER_ABLATIONS.get(role, (math.nan, math.nan))
        rows.append(
            {
                "variant": label,
                "bits": (system.bits if system else None) or NONE,
                "turns": len(results.turns(system.name, tasks=tasks)) if system else 0,
                "× plain": role_speedup(results, role, "plain", tasks).text(),
                "mean A": results.accepted(system.name, tasks).text() if system else NONE,
                "paper × plain": number(times),
                "paper A": number(accepted),
            }
        )
    return rows


def orderings(results: Results) -> list[str]:
    """Return the paper's claims about order, each with whether it holds here.

    A claim holds if the 95 % interval of the paired ratio or difference is on its side, does not
    hold if the interval is on the other side, and cannot be told apart if it contains equality.
    """
    endpoint = results.better_endpoint()
    role, label = (endpoint.role, endpoint.label) if endpoint else ("small", "All Small")
    others = ["without_nd", "without_eg", "fixed"]
    claims = [
        ("A", ["fixed"], "without_eg", "A: full > w/o EG (paper: 2.17 > 1.80)"),
        ("A", ["without_eg"], "without_nd", "A: w/o EG > w/o ND (paper: 1.80 > 1.47)"),
        ("speed", others, "csd", "CSD is the slowest of the ablations (paper: 0.94 × plain)"),
        ("A", others, "csd", "CSD has the lowest A of the ablations (paper: 0.81)"),
        (
            "speed",
            ["scheduler"],
            role,
            f"TreeGraft is faster than the better endpoint, here {label} (paper: 1.60 > 1.39)",
        ),
        (
            "speed",
            ["scheduler"],
            "fixed",
            "the scheduler is faster than the fixed schedule (paper: 1.94 > 1.43)",
        ),
        (
            "speed",
            ["scheduler"],
            "online",
            "the distilled scheduler is faster than online planning (paper: 1.94 > 0.95)",
        ),
    ]
    return [claim(results, *parts) for parts in claims]


def claim(results: Results, what: str, roles: Sequence[str], base: str, text: str) -> str:
    """Say whether every system of ``roles`` is above that of ``base``, in ``speed`` or ``A``."""
    there = {role: system for role in (*roles, base) if (system := results.role(role))}
    missing = [ABLATIONS.get(role, role) for role in (*roles, base) if role not in there]
    if missing:
        return f"{text}: not measured here ({', '.join(missing)} not run)."
    below = there[base]
    found, figures = [], []
    for above in map(there.__getitem__, roles):
        if what == "A":
            value, sign = results.accepted_difference(above.name, below.name), "−"
        else:
            value, sign = results.speedup(above.name, below.name), "/"
        found.append(value)
        figures.append(f"{above.label} {sign} {below.label} = {value.text()}")
    kind = "difference of A" if what == "A" else "ratio of tokens/s"
    said = verdict(found, 0 if what == "A" else 1)
    return f"{text}: {said}; {kind}: {', '.join(figures)}."


def verdict(found: Sequence[Estimate], equal: float) -> str:
    """Return whether all of ``found`` are above ``equal``, by their intervals."""
    if all(value.low > equal for value in found):
        return "holds"
    if any(value.high < equal for value in found):
        return "does not hold"
    return "cannot be told apart"
