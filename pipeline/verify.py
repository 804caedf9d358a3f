"""stage=verify: whether a dataset of trajectories is what was collected, whole and sound.

Everything that can be told without models is: the manifest's lines, the files against it, and
every row (`pipeline.checks`). A sample of prompts is then collected again, elsewhere, and compared
(`pipeline.recompute`). ``verify.repair=true`` collects what is wrong or missing again.
"""

from __future__ import annotations

import errno
import hashlib
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.card import write_card
from pipeline.checks import Rules, check_part
from pipeline.collect import check_split, collect_units
from pipeline.dataset import WHOLE, Dataset, hold, profile_of, with_logged_budget
from pipeline.dispatch import Stop, stop_on_signals
from pipeline.engine import check_name
from pipeline.manifest import (
    Manifest,
    UnitKey,
    differences,
    discard,
    part_name,
    read_manifest,
    within,
)
from pipeline.parts import REPAIR, difference
from pipeline.places import dataset_url
from pipeline.recompute import Compared, draw, recompute
from pipeline.report import Stage, stage_run
from pipeline.secrets import redact
from pipeline.store import LocalStore, NoFileError, Store, busy, open_store
from pipeline.tasks import load_prompts
from pipeline.units import Unit, plan, settings
from treegraft_core import InputError
from treegraft_core.errors import StageError
from treegraft_core.files import write_json

AGAIN = "verify.repair=true"
ANEW = "collect.force=true"
OTHERS = "the prompts that it was collected from, and verify.repair=true"
BY_HAND = "remove it by hand unless it is wanted; no stage reads it"
MOST_SHOWN = 40


@dataclass(frozen=True)
class Finding:
    """Something to say of a dataset.

    Attributes
    ----------
    what, where : str
        In words; a file, a line of the manifest or a prompt.
    unit : (str, str) or None
        Task and prompt id of the unit that it is about.
    fix : str
        What mends it.
    count : int
        How many rows, states or prompts.
    fault : bool
        Whether the dataset is not sound because of it.
    """

    what: str
    where: str
    unit: UnitKey | None = None
    fix: str = ""
    count: int = 1
    fault: bool = True


@dataclass
class Report:
    """What was found in a dataset."""

    manifest: Manifest
    findings: list[Finding] = field(default_factory=list)
    sound: list[UnitKey] = field(default_factory=list)
    rows: int = 0

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    def add(self, what: str, where: str, unit: UnitKey | None = None, **more: Any) -> None:
        """Add a finding."""
        self.findings.append(Finding(what, where, unit, **more))


def name_of(key: UnitKey) -> str:
    """Return a unit's name as in other messages."""
    return f"task={key[0]}, question_id={key[1]}"


def inspect(conf: DictConfig, store: Store, units: Sequence[Unit]) -> Report:
    """Check a dataset without models, file by file.

    Raises
    ------
    InputError
        If there is none, or it was collected with another configuration.
    """
    manifest, names = read_manifest(store), store.names()
    report = Report(manifest)
    parts = [name for name in names if within(name)]
    if manifest.header is None:
        if not parts and not manifest.units:
            raise InputError(
                f"trajectories={store.url}: no trajectories there; run "
                "python -m pipeline.run stage=collect first"
            )
        _lines(report)
        report.add(
            "no manifest that says what the dataset is (an earlier version's, or damaged)",
            store.url,
            fix=f"stage=collect {ANEW}, which moves it aside and begins a new one",
        )
        return report
    _check_config(conf, store, manifest.header)
    _lines(report)
    rules = Rules.of(manifest.header, profile_of(manifest.header, store))
    planned = {unit.key: unit for unit in units}
    for name, record in tqdm(manifest.files().items(), desc="files", unit="file"):
        key = (record["task"], record["prompt"])
        fix = AGAIN if key in planned else OTHERS
        before = len(report.findings)
        _file(report, store, key, name, rules, fix)
        if len(report.findings) == before:
            report.sound.append(key)
            report.rows += record["rows"]
    _unlisted(report, parts, planned)
    _prompts(report, conf, units)
    return report


def _check_config(conf: DictConfig, store: Store, header: dict[str, Any]) -> None:
    old = header["config"]
    models = {name: value for name, value in old.items() if name.startswith("models.")}
    changed = differences(old, settings(conf, models))
    if changed:
        raise InputError(
            f"trajectories={store.url}: collected with another config ({'; '.join(changed)}); "
            "give the same to verify it"
        )


def _lines(report: Report) -> None:
    # A line that is lost shows as a prompt that is missing; if none is, it takes nothing away.
    for fault in report.manifest.faults:
        what = fault.what.partition(";")[0]
        fix = "nothing: what it said counts as not done"
        report.add(f"line of the manifest: {what}", fault.where, fix=fix, fault=False)


def _file(report: Report, store: Store, key: UnitKey, name: str, rules: Rules, fix: str) -> None:
    record = report.manifest.units[key]
    try:
        data = store.read(name)
    except FileNotFoundError:
        report.add("file is missing", name, key, fix=fix)
        return
    except NoFileError as error:
        report.add(str(error.strerror), name, key, fix=fix)
        return
    except OSError as error:
        # A worn disk; a network's errors say nothing of one file.
        if error.errno != errno.EIO or not isinstance(store, LocalStore):
            raise
        report.add(f"cannot be read ({error.strerror})", name, key, fix=fix)
        return
    sha256 = hashlib.sha256(data).hexdigest()
    wrong = difference(record, len(data), sha256)
    if wrong:
        others = report.manifest.files().items()
        whose = [other for other, r in others if r["sha256"] == sha256 and other != name]
        wrong += f": it is {whose[0]}" if whose else ""
        report.add(wrong, name, key, fix=fix)
        return
    for problem in check_part(data, key, record, rules):
        where = f"{name}, {problem.at}" if problem.at else name
        report.add(problem.what, where, key, fix=fix, count=problem.count)


def _unlisted(report: Report, parts: Sequence[str], planned: dict[UnitKey, Unit]) -> None:
    ours = {part_name(*key): key for key in planned}
    for name in parts:
        if name in report.manifest.files():
            continue
        status = report.manifest.units.get(ours.get(name, ("", "")), {}).get("status")
        if name in ours and status != "empty":
            what = "file of a prompt that is not finished; it is not read"
            report.add(what, name, ours[name], fix=AGAIN, fault=False)
        else:
            report.add("file that the manifest does not list", name, fix=BY_HAND, fault=False)


def _prompts(report: Report, conf: DictConfig, units: Sequence[Unit]) -> None:
    records = report.manifest.units
    failed = [u for u in units if records.get(u.key, {}).get("status") == "failed"]
    many = len(failed) > float(conf.collect.failures) * len(units)
    for unit in units:
        record, where = records.get(unit.key), str(unit)
        if record is None or record["status"] == "discarded":
            report.add("prompt is missing", where, unit.key, fix=AGAIN)
        elif record["status"] == "failed":
            what = f"prompt failed: {record.get('reason', 'no reason given')}"
            report.add(what, where, unit.key, fix=AGAIN, fault=many)
        elif record.get("digest") != unit.digest:
            report.add("prompt has changed since it was collected", where, unit.key, fix=AGAIN)
    extra = sorted({*report.manifest.finished()} - {unit.key for unit in units})
    if extra:
        report.add(
            "prompts that are not among the configured ones",
            f"{name_of(extra[0])} first",
            fix="nothing, if they are wanted",
            count=len(extra),
            fault=False,
        )


def sample(conf: DictConfig, store: Store, report: Report, units: Sequence[Unit]) -> int:
    """Compute a sample of the sound units again; add what differs; return its states."""
    sound, records = set(report.sound), report.manifest.units
    usable = [u for u in units if u.key in sound and records[u.key].get("digest") == u.digest]
    header = report.manifest.header
    if not conf.verify.states or not usable or header is None:
        return 0
    chosen = draw(usable, records, int(conf.verify.states), int(conf.seed))
    found = recompute(conf, store, header, records, chosen)
    _compared(report, found)
    return found.states


def _compared(report: Report, found: Compared) -> None:
    for key, reason in found.failed.items():
        report.add(f"cannot be computed again: {reason}", _place(report, key), key, fix=AGAIN)
    for key, states in found.differing.items():
        state, columns = next(iter(states.items()))
        more = ", …" if len(columns) > 4 else ""
        report.add(
            f"states that differ when computed again, in {', '.join(columns[:4])}{more}"
            + (" (few enough for rounding)" if found.rounding else ""),
            f"{_place(report, key)}, {state}",
            key,
            fix=AGAIN,
            count=len(states),
            fault=not found.rounding,
        )


def _place(report: Report, key: UnitKey) -> str:
    return str(report.manifest.units[key]["file"])


def repair(
    conf: DictConfig,
    stage: Stage,
    store: Store,
    report: Report,
    units: Sequence[Unit],
    stop: Stop,
) -> list[Unit]:
    """Collect the configured units again that are not sound; return them.

    What the manifest says of them is taken back first, so that a repair that is cut short is gone
    on with by any later one, or by stage=collect. No other file is touched.
    """
    bad = {f.unit: f.what for f in reversed(report.findings) if f.unit and f.fix == AGAIN}
    again = [unit for unit in units if unit.key in bad]
    if not again:
        return []
    header = report.manifest.header
    assert header is not None, "without one there is no unit to repair"
    profile = profile_of(header, store)
    dataset = Dataset(store, conf, profile)
    for unit in again:
        if dataset.manifest.units.pop(unit.key, None) is not None:
            discard(dataset.segment(), [unit.key], bad[unit.key])
    collect_units(conf, stage, dataset, again, stop)
    write_card(conf, store)
    return again


def command(words: str = REPAIR) -> str:
    """Return a command line with the user's own overrides."""
    own = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    kept = [o for o in own if not o.startswith(("stage=", "verify.repair=", "status."))]
    return " ".join([words, *map(shlex.quote, kept)])


def show(stage: Stage, report: Report, title: str) -> None:
    """Print the findings, faults first."""
    rows = [
        {
            "what": f.what if f.fault else f"note: {f.what}",
            "where": f.where,
            "count": f.count,
            "unit": name_of(f.unit) if f.unit else "",
            "fix": f.fix,
        }
        for f in sorted(report.findings, key=lambda f: not f.fault)
    ]
    stage.show(title, rows[:MOST_SHOWN])
    if len(rows) > MOST_SHOWN:
        print(f"  … and {len(rows) - MOST_SHOWN} more in {stage.folder / 'findings.json'}")


def conclude(stage: Stage, report: Report, states: int, repaired: Sequence[Unit]) -> None:
    """Write what was found."""
    failed = sum(record["status"] == "failed" for record in report.manifest.units.values())
    stage.metrics |= {
        "sound_prompts": len(report.sound),
        "rows": report.rows,
        "states_computed_again": states,
        "faults": len(report.faults),
        "prompts_with_faults": len(report_units(report)),
        "prompts_failed": failed,
        "notes": len(report.findings) - len(report.faults),
        "repaired_prompts": len(repaired),
    }
    path = stage.folder / "findings.json"
    write_json(path, redact({"findings": [asdict(f) for f in report.findings]}))
    stage.wrote(path)
    stage.write_tables()


def counted(count: int, name: str) -> str:
    """Return a number with its noun."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def report_units(report: Report) -> set[UnitKey]:
    """Return the units that have a fault."""
    return {finding.unit for finding in report.faults if finding.unit}


def verify(conf: DictConfig, store: Store, units: Sequence[Unit]) -> Report:
    """Verify a dataset, and repair it if asked to; return what is wrong with it then."""
    split = check_split(conf)
    name = "verify" if split == "collect" else f"verify-{split}"
    with stage_run(conf, "verify", Path(conf.paths.check) / name) as stage:
        report = inspect(conf, store, units)
        stage.read(store.url, f"{report.rows:,} sound rows")
        states = sample(conf, store, report, units)
        repaired: list[Unit] = []
        if report.findings:
            show(stage, report, f"found in {store.url}")
        if conf.verify.repair:
            with stop_on_signals() as stop:
                repaired = repair(conf, stage, store, report, units, stop)
        if repaired:
            report = inspect(conf, store, units)
            rows = [{"prompt": str(u), "sound": u.key in set(report.sound)} for u in repaired]
            stage.show("collected again", rows[:MOST_SHOWN])
            if report.findings:
                show(stage, report, "found after the repair")
        conclude(stage, report, states, repaired)
    return report


def run(conf: DictConfig) -> None:
    """Verify the configured pair's trajectories of ``collect.split``; repair them if asked to.

    Raises
    ------
    StageError
        If there are faults (left).
    """
    split = check_split(conf)
    check_name("pair.name", str(conf.pair.name))
    units = plan(conf, load_prompts(conf, split, conf.collect.prompts_per_task))
    store = open_store(dataset_url(conf, split, str(conf.pair.name)))
    with ExitStack() as stack:
        if conf.verify.repair:
            shard, shards = int(conf.collect.shard), int(conf.collect.shards)
            stack.enter_context(hold(store, shard, shards, bool(conf.collect.wait)))
        elif (holder := store.held(WHOLE)) is not None:
            raise busy(store.url, holder)
        conf = with_logged_budget(conf, store)
        report = verify(conf, store, units)
    faults = report.faults
    if faults:
        where = f"{counted(len(faults), 'fault')} in {counted(len(report_units(report)), 'prompt')}"
        fixes = {f.fix for f in faults}
        if AGAIN in fixes and not conf.verify.repair:
            raise StageError(f"{where}; run {command()}")
        raise StageError(
            f"{where}, the first: {faults[0].what} ({faults[0].where}); {faults[0].fix}"
        )
    print(f"\nsound: {counted(len(report.sound), 'prompt')}, {report.rows:,} rows", flush=True)
