"""The offline stages, in order, on trajectories with a planted rule."""

from __future__ import annotations

import ast
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from pipeline import report
from pipeline.distill import check_parameters
from pipeline.features import (
    contexts,
    fit_pairs,
    input_names,
    load_tries,
    prompt_keys,
    scheduler_inputs,
    trajectory_folder,
    validation_states,
)
from pipeline.hardware import COSTS, RANGES, outcomes
from pipeline.label import RATE_ROUNDS, RATE_STATES, load_labels
from pipeline.replay import follow, replay, scheduler_decisions, texts_of
from pipeline.training import column_stats
from pipeline.tries import prefix_bits, prefix_steps, schedules
from pipeline.value import load_value, value_rows
from tests.pipeline.synthetic import (
    DEPTH,
    RULE_SIGNAL,
    TASKS,
    THRESHOLD,
    write_texts,
    write_trajectories,
)
from tests.reference import offline as slow
from treegraft_core import PAPER_SIGNALS, SIGNALS, InputError, load_scheduler
from treegraft_core.signals import context_features

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("select", "value", "label", "distill", "export")
STATES = 120
QUICK = (
    "select.seeds=1",
    "select.states=96",
    "value.hidden=[48,48]",
    "value.max_epochs=14",
    "value.batch_size=512",
    "value.block_states=32",
    "label.block_states=32",
    "distill.max_epochs=25",
    "distill.batch_size=256",
    "distill.rollout_epochs=4",
    "distill.block_states=32",
)


def config(data: Path, stage: str, *overrides: str) -> DictConfig:
    """Compose the real configuration with its data below ``data``."""
    fixed = [f"stage={stage}", f"paths.data={data}", "tracker=disabled", *QUICK]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=[*fixed, *overrides])


def run_stage(data: Path, stage: str, *overrides: str) -> None:
    """Run one stage as the entry point does."""
    import_module(f"pipeline.{stage}").run(config(data, stage, *overrides))


def files(folder: Path) -> list[str]:
    """Return every file and folder below ``folder``."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, and leave git alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "git_sha", lambda: "test")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair() -> str:
    """Return the default pair's name."""
    return str(config(Path("unused"), "select").pair.name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, pair: str) -> Path:
    """Return a data folder in which all five stages have run."""
    folder = tmp_path_factory.mktemp("offline")
    write_trajectories(folder, pair, STATES)
    for stage in STAGES:
        run_stage(folder, stage)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pair: str) -> Path:
    """Return a data folder in which the stages have run on whole texts: label=paper."""
    folder = tmp_path_factory.mktemp("whole")
    write_texts(folder, pair, 6, 13)
    path = folder / "selection" / pair / "selection.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"signals": list(PAPER_SIGNALS), "pairs": [pair]}))
    for stage in STAGES[1:]:
        run_stage(folder, stage, "label=paper")
    return folder


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:
    """Return a copy of ``data`` that a test may damage."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def test_contexts_equal_the_core_row_by_row(data: Path) -> None:
    tries = load_tries(config(data, "value"))
    target_ms = np.linspace(3.0, 300.0, len(tries))
    mid_ms = np.linspace(50.0, 1.0, len(tries))
    steps, bits = prefix_steps(DEPTH), prefix_bits(DEPTH)
    logged, other = contexts(tries), contexts(tries, target_ms, mid_ms)
    assert logged.shape == (STATES, 31, 6 + DEPTH)
    for state in range(0, STATES, 7):
        row = tries.states.iloc[state]
        for prefix, k in enumerate(steps):
            rest = (int(k), bits[prefix, : k - 1].tolist(), DEPTH)
            tokens = row["prompt_tokens"]
            expected = context_features(tokens, row["target_ms"], row["mid_ms"], *rest)
            np.testing.assert_array_equal(logged[state, prefix], expected)
            expected = context_features(tokens, target_ms[state], mid_ms[state], *rest)
            np.testing.assert_array_equal(other[state, prefix], expected)


def test_inputs_have_the_design_s_17_numbers_and_the_schedule_ahead(data: Path) -> None:
    tries = load_tries(config(data, "value"))
    signals = SIGNALS[:6]
    z = scheduler_inputs(tries, signals)
    assert z.shape == (STATES, 31, 17) and len(input_names(DEPTH, signals)) == 17
    np.testing.assert_array_equal(z[..., 11:], tries.signals[..., :6])
    np.testing.assert_array_equal(scheduler_inputs(tries, SIGNALS[5:])[..., 11], z[..., 16])
    x = value_rows(z, DEPTH).reshape(STATES, DEPTH, 32, 17 + DEPTH)
    names = ["".join(map(str, bits)) for bits in schedules(DEPTH).tolist()]
    prefixes = slow.prefixes(DEPTH)
    assert names == slow.schedules(DEPTH)
    for step in range(1, DEPTH + 1):
        for n, schedule in enumerate(names):
            ahead = [0 if j < step else 2 * int(b) - 1 for j, b in enumerate(schedule, start=1)]
            assert x[3, step - 1, n, 17:].tolist() == ahead
            before = prefixes.index(schedule[: step - 1])
            np.testing.assert_array_equal(x[3, step - 1, n, :17], z[3, before])


def test_validation_holds_whole_prompts() -> None:
    prompts = np.array([f"p{i % 10}" for i in range(200)], dtype=object)
    options = OmegaConf.create({"validation_share": 0.2})
    held = validation_states(prompts, options, 3, "value")
    assert len(set(prompts[held])) == 2
    assert not set(prompts[held]) & set(prompts[~held])
    np.testing.assert_array_equal(held, validation_states(prompts, options, 3, "k"))
    assert (held != validation_states(prompts, options, 4, "k")).any()
    with pytest.raises(InputError, match=r"value\.validation_share=0\.2: .* 1 prompt"):
        validation_states(prompts[:1], options, 3, "value")


def test_constant_columns_have_std_1() -> None:
    mean, std = column_stats(np.array([[82.1, 1.0], [82.1, 3.0], [82.1, 5.0]]))
    assert (mean[0], std[0], mean[1]) == (82.1, 1.0, 3.0)


def test_selection_keeps_the_signal_that_matters_in_table_order(data: Path, pair: str) -> None:
    selection = json.loads((data / "selection" / pair / "selection.json").read_text())
    signals = selection["signals"]
    assert len(signals) == 6
    assert signals == sorted(signals, key=SIGNALS.index)
    assert selection["cv"]["order"][1]["signal"] == RULE_SIGNAL
    steps = selection["cv"]["order"]
    assert selection["cv"]["eta_ratio"] > steps[0]["eta_ratio"] + 0.05


def rows_by_state(data: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every state, as they are in the files."""
    states: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for part in sorted((data / "trajectories").rglob("*.parquet")):
        for row in pq.ParquetFile(part).read().to_pylist():
            states[row["state_id"]].append(row)
    return states


class ByHand:
    """Labels of the states of one pair from its files alone, one number at a time."""

    def __init__(self, data: Path, pair: str):
        folder = data / "value" / pair
        tensors = load_file(folder / "value.safetensors")
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        header = json.loads((folder / "value.json").read_text())
        self.stats, self.signals = header["stats"], header["selected_signals"]
        self.states = rows_by_state(data)

    def estimate(self, state: str, prefix: str) -> dict[str, tuple[float, float]]:
        """Return the value network's tokens and ms of every schedule that begins so."""
        found = {}
        for r in self.states[state]:
            if r["prefix"] == prefix:
                bits = [int(b) for b in prefix]
                ahead = [2.0 * int(b) - 1 for b in f"{r['action']}{r['future']}"]
                times = r["target_ms"], r["mid_ms"]
                context = context_features(r["prompt_tokens"], *times, r["step"], bits, DEPTH)
                x = [*context, *(r[s] for s in self.signals), *([0.0] * len(bits)), *ahead]
                heads = slow.value_heads(self.tensors, self.stats, x, times[1], times[0])
                found[r["schedule"]] = heads[0], heads[1] + heads[2]
        return found

    def logged(self, state: str, _: str = "") -> dict[str, tuple[float, float]]:
        """Return what happened."""
        return {
            r["schedule"]: (r["committed"], r["t_draft_ms"] + r["t_verify_ms"])
            for r in self.states[state]
            if r["step"] == 1
        }

    def long_run(self) -> tuple[float, float]:
        """Return λ and T of the value network's choices."""
        assert len(self.states) <= RATE_STATES
        names = slow.schedules(DEPTH)
        rounds, guesses = (
            [[made[name] for name in names] for made in (of(state, "") for state in self.states)]
            for of in (self.logged, self.estimate)
        )
        return slow.best_ratio(rounds, guesses, RATE_ROUNDS)

    def labels(self, state: str, worth: Any) -> dict[str, list[float]]:
        """Return y and y_hindsight at every prefix; ``worth`` takes tokens and ms."""
        return {
            kind: slow.advantages(
                DEPTH, lambda prefix, of=of: {k: worth(*v) for k, v in of(state, prefix).items()}
            )
            for kind, of in (("y", self.estimate), ("y_hindsight", self.logged))
        }


@pytest.mark.parametrize("objective", ["gain", "paper"])
def test_labels_equal_a_slow_obvious_computation(
    request: pytest.FixtureRequest, pair: str, objective: str
) -> None:
    """The default objective on sampled states, the paper's on whole texts."""
    data = request.getfixturevalue("data" if objective == "gain" else "whole")
    hand = ByHand(data, pair)
    table = pq.read_table(data / "labels" / pair / "labels.parquet").to_pandas()
    assert len(table) == len(hand.states) * 31
    rate, round_ms = hand.long_run()
    np.testing.assert_allclose(table["rate"], 1e3 * rate, rtol=1e-4)

    def worth(tokens: float, ms: float) -> float:
        if objective == "paper":
            return 1e3 * tokens / ms  # tokens/s
        return (tokens - rate * ms) / (rate * round_ms)

    for state in sorted(hand.states)[::50]:
        mine = table[table["state_id"] == state]
        assert mine["prefix"].tolist() == slow.prefixes(DEPTH)
        expected = hand.labels(state, worth)
        for kind, values in expected.items():
            assert mine[kind].tolist() == pytest.approx(values, abs=2e-3), kind
        assert np.std(expected["y"]) > 0.02


def test_labels_say_what_they_are(data: Path, whole: Path, pair: str) -> None:
    kinds = [load_labels(folder / "labels" / pair)[1] for folder in (data, whole)]
    assert [(k["objective"], k["source"], k["unit"]) for k in kinds] == [
        ("gain", "value", "share of the long-run rate"),
        ("rate", "value", "tokens/s"),
    ]


def test_the_distilled_scheduler_follows_the_planted_rule(data: Path, pair: str) -> None:
    scheduler = load_scheduler(data / "schedulers" / pair)
    assert scheduler.n_parameters == 3265
    labels = pq.read_table(data / "labels" / pair / "labels.parquet").to_pandas()
    calls = scheduler.margins(labels[list(scheduler.input_names)].to_numpy(np.float64)) > 0
    assert (calls == (labels[RULE_SIGNAL] > THRESHOLD)).mean() > 0.93
    assert scheduler.trained.metrics["texts_whole"] is False


def test_whole_texts_are_decoded_as_fast_as_by_the_planted_rule(whole: Path, pair: str) -> None:
    """There what is left of the text counts too; no fixed schedule comes near."""
    scheduler = load_scheduler(whole / "schedulers" / pair)
    assert scheduler.n_parameters == 3265
    distilled = scheduler.trained.metrics
    assert distilled["texts_whole"] is True
    assert distilled["speed_after_rollouts"] >= distilled["speed_before_rollouts"] > 1
    tries = load_tries(config(whole, "value"))
    texts, found = texts_of(tries), outcomes(tries)
    rule = tries.signals[..., SIGNALS.index(RULE_SIGNAL)] > THRESHOLD
    mine, by_rule = (
        replay(texts, found, follow(wanted, DEPTH)).rate("committed")
        for wanted in (scheduler_decisions(scheduler, tries, found), rule)
    )
    fixed = [
        replay(texts, found, np.full(len(tries), n)).rate("committed") for n in range(1 << DEPTH)
    ]
    assert mine > 0.95 * by_rule
    assert mine > 1.1 * max(fixed), (mine, by_rule, max(fixed))


def test_what_never_varied_has_no_weight(data: Path, pair: str) -> None:
    """A latency profile measured again does not change decisions by chance."""
    scheduler = load_scheduler(data / "schedulers" / pair)
    labels = pq.read_table(data / "labels" / pair / "labels.parquet").to_pandas()
    x = labels[list(scheduler.input_names)].to_numpy(np.float64)[:200]
    every = labels[list(scheduler.input_names)].to_numpy(np.float64)
    constant = every.max(axis=0) == every.min(axis=0)
    assert constant.any() and not constant.all()
    np.testing.assert_array_equal(scheduler.margins(x), scheduler.margins(x + 7.0 * constant))
    value = load_value(data / "value" / pair)
    first = value.modules[0].net.trunk[0].weight.detach()
    assert float(first[:, : len(constant)][:, torch.from_numpy(constant)].abs().max()) == 0


def test_both_formats_hold_the_same_numbers_and_their_provenance(data: Path, pair: str) -> None:
    folder = data / "schedulers" / pair
    ours, literal = load_scheduler(folder), load_scheduler(folder / "treegraft_scheduler.py")
    x = np.random.default_rng(0).normal(size=(50, 17))
    np.testing.assert_array_equal(ours.margins(x), literal.margins(x))
    assert (ours.metadata["fit"], ours.metadata["pairs"]) == (pair, [pair])
    assert ours.metadata["tasks"] == sorted(TASKS)
    assert {"selection", "git_sha", "numerator"} <= set(ours.metadata)
    known = ours.trained
    assert known.widths == {"width": 10, "verify_nodes": 63, "max_ngram": 5}
    labels = pq.read_table(data / "labels" / pair / "labels.parquet").to_pandas()
    ratio = labels["target_ms"] / labels["mid_ms"]
    assert known.costs["ratio"] == pytest.approx((ratio.min(), ratio.max()))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"# {pair}" in card and f"| r2 | {known.metrics['r2']:.4g} |" in card
    assert json.loads((folder / "metrics.json").read_text())["max_difference"] < 1e-5


def test_nothing_is_left_behind(data: Path) -> None:
    assert not [p for p in files(data) if ".tmp" in p or "lightning" in p or ".export" in p]
    assert files(data / "cache") == []


OUTPUTS = (
    "selection/{}/selection.json",
    "value/{}/value.safetensors",
    "value/{}/value.json",
    "labels/{}/labels.parquet",
    "distill/{}/classifier.safetensors",
    "distill/{}/classifier.json",
    "schedulers/{}/scheduler.safetensors",
    "schedulers/{}/scheduler.json",
    "schedulers/{}/treegraft_scheduler.py",
)


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path: Path, pair: str) -> None:
    """Rollouts and machines drawn from a range included."""
    machines = ("hardware=range", "hardware.profiles=3", "select.signals=1")
    few = ("value.max_epochs=2", "distill.max_epochs=2", "distill.rollout_epochs=2", *machines)
    folders = {"a": "seed=1", "b": "seed=1", "c": "seed=2"}
    for name, seed in folders.items():
        write_trajectories(tmp_path / name, pair, 20)
        for stage in STAGES:
            run_stage(tmp_path / name, stage, seed, *few)
    read = {
        name: [(tmp_path / name / out.format(pair)).read_bytes() for out in OUTPUTS]
        for name in folders
    }
    assert read["a"] == read["b"]
    assert all(a != c for a, c in zip(read["a"][1:], read["c"][1:], strict=True))
    kept = [json.loads((tmp_path / n / OUTPUTS[5].format(pair)).read_text()) for n in folders]
    assert all(k["metrics"]["rollout_epochs"] == 2 for k in kept)


@pytest.mark.parametrize(
    ("stage", "gone", "first"),
    [
        ("select", "trajectories", "collect"),
        ("value", "trajectories", "collect"),
        ("value", "selection", "select"),
        ("label", "trajectories", "collect"),
        ("label", "value", "value"),
        ("distill", "labels", "label"),
        ("distill", "trajectories", "collect"),
        ("export", "distill", "distill"),
        ("export", "labels", "label"),
        ("export", "selection", "select"),
    ],
)
def test_a_missing_prerequisite_is_named_and_nothing_is_written(
    copy: Path, stage: str, gone: str, first: str
) -> None:
    shutil.rmtree(copy / gone)
    before = files(copy)
    with pytest.raises(InputError, match=f"pipeline.run stage={first}") as error:
        run_stage(copy, stage)
    assert str(copy / gone) in str(error.value)
    assert files(copy) == before


@pytest.mark.parametrize(
    ("stage", "damage"),
    [
        ("select", "trajectories/collect/pair={}/task=code/part-0.parquet"),
        ("value", "selection/{}/selection.json"),
        ("value", "trajectories/collect/pair={}/task=code/part-0.parquet"),
        ("label", "value/{}/value.safetensors"),
        ("label", "value/{}/value.json"),
        ("distill", "labels/{}/labels.parquet"),
        ("distill", "trajectories/collect/pair={}/task=code/part-0.parquet"),
        ("export", "distill/{}/classifier.safetensors"),
        ("export", "distill/{}/classifier.json"),
        ("export", "labels/{}/labels.parquet"),
    ],
)
def test_a_half_file_is_one_line(copy: Path, pair: str, stage: str, damage: str) -> None:
    path = copy / damage.format(pair)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    before = files(copy)
    with pytest.raises(InputError, match="damaged") as error:
        run_stage(copy, stage)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert files(copy) == before


def test_a_header_of_other_shapes_is_damaged(copy: Path, pair: str) -> None:
    path = copy / "distill" / pair / "classifier.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps({**header, "hidden": [7]}))
    with pytest.raises(InputError, match="damaged"):
        run_stage(copy, "export")


@pytest.mark.parametrize("change", ["drop", "repeat", "nan", "inconsistent"])
def test_incomplete_states_are_refused(copy: Path, pair: str, change: str) -> None:
    folder = trajectory_folder(config(copy, "label"), pair)
    path = sorted(folder.rglob("*.parquet"))[0]
    table = pq.ParquetFile(path).read()
    rows = table.to_pylist()
    if change == "drop":
        rows = rows[1:]
    elif change == "repeat":
        rows = [*rows[1:], rows[5]]
    elif change == "nan":
        rows[0]["depth_before"] = float("nan")
    else:
        rows[0]["action"] = 1 - rows[0]["action"]
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    with pytest.raises(InputError, match="stage=verify says where"):
        run_stage(copy, "label")


@pytest.mark.parametrize(
    ("stage", "override", "message"),
    [
        ("select", "select.group=pair", "select.group=pair: .* hold 1, fewer .* select.folds=5"),
        ("select", "select.group=state", "select.group=state: choose one of task, pair, prompt"),
        ("select", "select.folds=1", "select.folds=1"),
        ("select", "select.signals=11", "select.signals=11: choose 1 to 10"),
        ("select", "drafting.depth=4", "drafting.depth=4: .* drafting.depth=5"),
        ("value", "value.numerator=tokens", "value.numerator=tokens: choose one of committed"),
        ("value", "value.validation_share=1.0", "value.validation_share=1.0"),
        ("value", "value.committed=mode", "value.committed=mode: choose one of"),
        ("value", "hardware.ratio=[0,2]", r"hardware.ratio=\[0.0, 2.0\]: .* both above 0"),
        ("label", "label.objective=speed", "label.objective=speed: choose one of rate, gain"),
        ("label", "label.source=dreams", "label.source=dreams: choose one of value, logged"),
        ("label", "value.numerator=tokens", "value.numerator=tokens"),
        ("label", "drafting.depth=4", "drafting.depth=4: .* drafting.depth=5"),
        ("distill", "distill.loss=hinge", "distill.loss=hinge: choose one of regression, sign"),
        ("distill", "distill.weight=big", "distill.weight=big: choose one of none, size"),
        ("distill", "distill.validation_share=0", "distill.validation_share=0"),
    ],
)
def test_a_bad_choice_names_its_key(data: Path, stage: str, override: str, message: str) -> None:
    before = files(data)
    with pytest.raises(InputError, match=message):
        run_stage(data, stage, override)
    assert files(data) == before


def test_grouping_by_prompt_and_fewer_signals(copy: Path, pair: str) -> None:
    run_stage(copy, "select", "select.group=prompt", "select.signals=3", "select.folds=3")
    selection = json.loads((copy / "selection" / pair / "selection.json").read_text())
    assert (len(selection["signals"]), selection["cv"]["groups"]) == (3, STATES // 4)
    with pytest.raises(InputError, match="other signals"):
        run_stage(copy, "export")


def test_the_paper_s_numerator_counts_accepted_tokens(copy: Path, pair: str) -> None:
    run_stage(copy, "label", "value.numerator=accepted", "label=paper")
    labels = pq.read_table(copy / "labels" / pair / "labels.parquet").to_pandas()
    low = labels[RULE_SIGNAL] < THRESHOLD - 0.2
    assert np.abs(labels.loc[low, "y_hindsight"]).max() == 0.0


def test_the_paper_s_shape_has_3265_parameters() -> None:
    check_parameters(3265, 5, 6, [64, 32])
    check_parameters(100, 4, 6, [64, 32])
    with pytest.raises(AssertionError, match="not 3265"):
        check_parameters(3264, 5, 6, [64, 32])


def test_no_dead_config_keys() -> None:
    """Keys read as attributes, or by name in brackets."""
    used: set[str] = {*RANGES, *COSTS}  # draw_costs goes through these
    more = ("features", "training", "hardware", "fitting", "leaving", "ablate")
    for name in (*STAGES, *more):
        tree = ast.parse((ROOT / "pipeline" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                used.add(str(node.slice.value))
    conf = config(Path("unused"), "select")
    groups = ("value", "distill", "select", "label", "hardware", "trainer", "leave_out", "ablate")
    for group in groups:
        assert set(conf[group]) <= used, f"{group}: {set(conf[group]) - used}"


PAIRS = ("one", "two")
BOTH = ("fit.name=both", f"fit.pairs=[{','.join(PAIRS)}]")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder in which one scheduler was fitted on two pairs with the same states."""
    folder = tmp_path_factory.mktemp("both")
    for seed, name in enumerate(PAIRS):
        write_trajectories(folder, name, 48, seed)
    for stage in STAGES:
        run_stage(folder, stage, *BOTH, "select.group=pair", "select.folds=2", "label=paper")
    return folder


def test_one_scheduler_of_two_pairs(both: Path) -> None:
    selection = json.loads((both / "selection" / "both" / "selection.json").read_text())
    assert selection["signals"][0] in SIGNALS
    assert selection["cv"]["order"][1]["signal"] == RULE_SIGNAL
    assert (selection["cv"]["group"], selection["cv"]["groups"]) == ("pair", 2)
    artifact = load_scheduler(both / "schedulers" / "both")
    assert artifact.n_parameters == 3265
    assert artifact.metadata["pairs"] == list(PAIRS)
    assert {p.parent.name for p in both.glob("*/*/provenance.json")} == {"both"}


def test_a_state_in_two_pairs_is_two_states(both: Path) -> None:
    """The pairs' ids are the same, their rows are not; hindsight is each pair's own."""
    labels = pq.read_table(both / "labels" / "both" / "labels.parquet").to_pandas()
    assert labels.groupby("pair").size().to_dict() == {name: 48 * 31 for name in PAIRS}
    assert labels["state_id"].nunique() == 48
    for name in PAIRS:
        part = trajectory_folder(config(both, "label"), name) / "task=code" / "part-0.parquet"
        rows: list[dict[str, Any]] = pq.ParquetFile(part).read().to_pylist()
        state = rows[0]["state_id"]
        best: dict[int, float] = defaultdict(lambda: -1e9)
        for r in (r for r in rows if r["state_id"] == state and r["step"] == 1):
            eta = 1000 * r["committed"] / (r["t_draft_ms"] + r["t_verify_ms"])
            best[r["action"]] = max(best[r["action"]], eta)
        mine = labels[(labels["pair"] == name) & (labels["state_id"] == state)]
        hindsight = mine.loc[mine["step"] == 1, "y_hindsight"]
        assert hindsight.tolist() == pytest.approx([best[1] - best[0]])


def test_a_prompt_is_on_one_side_of_a_split_in_both_pairs(both: Path) -> None:
    tries = load_tries(config(both, "value", *BOTH))
    options = OmegaConf.create({"validation_share": 0.3})
    held = validation_states(prompt_keys(tries), options, 0, "value")
    sides = tries.states.assign(held=held).groupby(["task", "prompt_id"])["held"]
    assert (sides.nunique() == 1).all()
    assert tries.states["pair"].nunique() == 2 and 0 < held.mean() < 1


def test_the_order_of_pairs_changes_nothing() -> None:
    conf = config(Path("unused"), "select", "fit.pairs=[two,one]")
    assert fit_pairs(conf) == ("one", "two")


def test_a_missing_pair_is_named_with_what_to_run(both: Path) -> None:
    before = files(both)
    with pytest.raises(InputError, match=r"no trajectories of three in .*pair=three; run python"):
        run_stage(both, "select", "fit.pairs=[one,two,three]")
    with pytest.raises(InputError, match="stage=collect pair=three first"):
        run_stage(both, "select", "fit.pairs=[one,three]")
    assert files(both) == before


def test_pairs_of_other_depths_or_rules_are_refused(both: Path) -> None:
    with pytest.raises(InputError, match=r"drafting\.depth=4: .*pair=one"):
        run_stage(both, "value", *BOTH, "drafting.depth=4")


@pytest.mark.parametrize("pairs", ["[]", "[one,one]", "[../one]"])
def test_bad_fit_pairs(both: Path, pairs: str) -> None:
    with pytest.raises(InputError, match=r"fit\.pairs="):
        run_stage(both, "select", f"fit.pairs={pairs}")


def test_a_bad_fit_name(both: Path) -> None:
    with pytest.raises(InputError, match=r"fit\.name=\.\.: names a folder"):
        run_stage(both, "select", "fit.pairs=[one]", "fit.name=..")


@pytest.mark.parametrize(
    ("stage", "again"),
    [("value", "select"), ("label", "value"), ("distill", "label"), ("export", "distill")],
)
def test_files_of_other_pairs_are_not_mixed_in(both: Path, stage: str, again: str) -> None:
    before = files(both)
    with pytest.raises(InputError, match=rf"fit\.pairs=\['one'\]: .* stage={again} again"):
        run_stage(both, stage, "fit.name=both", "fit.pairs=[one]")
    assert files(both) == before


def test_rows_of_a_held_out_task_are_refused(both: Path) -> None:
    before = files(both)
    for stage in ("select", "value", "label"):
        with pytest.raises(InputError, match="pair=one/task=code or take code out of held_out"):
            run_stage(both, stage, *BOTH, "held_out_tasks=[mt_bench,code]")
    assert files(both) == before


def test_an_unseen_pair_is_evaluated_with_the_fit_s_scheduler() -> None:
    conf = config(Path("d"), "evaluate", "pair=smollm2-135m-8l", "fit=embedded")
    assert (conf.paths.scheduler, conf.paths.profile, conf.paths.evaluation) == (
        "d/schedulers/embedded",
        "d/profiles/smollm2-135m-8l",
        "d/evaluation/smollm2-135m-8l",
    )
    assert conf.pair.name not in conf.fit.pairs
