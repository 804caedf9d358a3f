"""The distilled scheduler on disk: exact, and safe to load from anyone."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from treegraft_core import DraftingConfig, fit_check
from treegraft_core.artifact import LITERAL_NAME, SchedulerArtifact, load_scheduler
from treegraft_core.errors import InputError
from treegraft_core.model_card import model_card
from treegraft_core.schedulers import DistilledScheduler, StepState
from treegraft_core.signals import PAPER_SIGNALS, SIGNALS, context_features, context_names
from treegraft_core.trained import COSTS, WIDTHS, Drafters, Trained


def random_artifact(
    depth: int = 5, signals: Sequence[str] = PAPER_SIGNALS, seed: int = 0
) -> SchedulerArtifact:
    """Return an artifact with random weights; one input never varied (x_std = 0)."""
    rng = np.random.default_rng(seed)
    sizes = [6 + depth + len(signals), 64, 32, 1]
    x_std = rng.uniform(0.1, 2.0, sizes[0])
    x_std[0] = 0.0
    x_mean = rng.normal(size=sizes[0])
    return SchedulerArtifact(
        depth=depth,
        selected_signals=tuple(signals),
        weights=tuple(
            rng.normal(size=(sizes[i + 1], sizes[i])) / math.sqrt(sizes[i]) for i in range(3)
        ),
        biases=tuple(rng.normal(size=sizes[i + 1]) for i in range(3)),
        x_mean=x_mean,
        x_std=x_std,
        y_mean=-1.26,
        y_std=2.97,
        metadata={"pair": "tiny", "command": ["python", "-m", "pipeline.run"]},
    )


def plain_margin(literal: dict[str, Any], x: Sequence[float]) -> float:
    """Evaluate the design's formula with plain Python numbers, from the literal alone."""
    net = literal["scheduler"]
    h = [
        (value - mean) / max(std, 1e-12)
        for value, mean, std in zip(x, net["x_mean"], net["x_std"], strict=True)
    ]
    for i, layer in enumerate(net["layers"]):
        h = [
            sum(w * v for w, v in zip(row, h, strict=True)) + bias
            for row, bias in zip(layer["weight"], layer["bias"], strict=True)
        ]
        if i < len(net["layers"]) - 1:
            h = [max(v, 0.0) for v in h]
    return float(net["y_std"] * h[0] + net["y_mean"])


def inputs(artifact: SchedulerArtifact, n: int = 25) -> np.ndarray:
    """Return random inputs; the constant one keeps its mean."""
    x = np.random.default_rng(1).normal(size=(n, len(artifact.x_mean)))
    x[:, 0] = artifact.x_mean[0]
    return x


def read_literal(path: Path) -> dict[str, Any]:
    """Read the exported module as the paper's runtime could: one assignment, one literal."""
    (assignment,) = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Assign)]
    assert assignment.targets[0].id == LITERAL_NAME == "SCHEDULER_ARTIFACTS"
    return ast.literal_eval(assignment.value)


def assert_same(a: SchedulerArtifact, b: SchedulerArtifact) -> None:
    """Every number equal to the last bit."""
    assert (a.depth, a.selected_signals) == (b.depth, b.selected_signals)
    assert (a.y_mean, a.y_std) == (b.y_mean, b.y_std)
    for x, y in zip((*a.weights, *a.biases), (*b.weights, *b.biases), strict=True):
        assert np.array_equal(x, y)
    assert np.array_equal(a.x_mean, b.x_mean)
    assert np.array_equal(a.x_std, b.x_std)


def test_parameters_and_input_names() -> None:
    """3,265 at D = 5 with six signals; 17 inputs in the design's order."""
    artifact = random_artifact()
    assert artifact.n_parameters == 3265
    assert artifact.input_names == (
        "log_prompt_tokens",
        "target_ms",
        "mid_ms",
        "log_target_mid_ratio",
        "step_fraction",
        "calls_fraction",
        "bit_1",
        "bit_2",
        "bit_3",
        "bit_4",
        "bit_5",
        "depth_before",
        "leaf_ratio_before",
        "collapse_debt",
        "pre_reselect_past_ratio",
        "pre_reselect_overlap",
        "pre_reselect_score",
    )


def test_context_features() -> None:
    """log(1 + prompt), T_tgt, T_mid, log ratio, k / D, calls / D, bits padded with zeros."""
    got = context_features(10, 80.0, 20.0, 3, (1, 0), 5)
    assert got.tolist() == pytest.approx(
        [math.log(11), 80.0, 20.0, math.log(4), 0.6, 0.2, 1, 0, 0, 0, 0]
    )
    assert len(got) == len(context_names(5))


@pytest.mark.parametrize(("depth", "count"), [(5, 6), (3, 10), (7, 1), (1, 0)])
def test_round_trips_and_margins(tmp_path: Path, depth: int, count: int) -> None:
    """Both formats return every bit; margins equal plain arithmetic within 1e-9."""
    artifact = random_artifact(depth, SIGNALS[:count])
    artifact.save(tmp_path / "scheduler")
    artifact.save_literal(tmp_path / "artifact.py")
    folder, literal = (
        load_scheduler(tmp_path / "scheduler"),
        load_scheduler(tmp_path / "artifact.py"),
    )
    assert_same(folder, artifact)
    assert_same(literal, artifact)
    assert folder.metadata == artifact.metadata
    x = inputs(artifact)
    expected = [plain_margin(read_literal(tmp_path / "artifact.py"), row) for row in x.tolist()]
    for loaded in (artifact, folder, literal):
        assert loaded.margins(x).tolist() == pytest.approx(expected, abs=1e-9)
        assert [loaded.margin(row) for row in x] == pytest.approx(expected, abs=1e-9)
    assert np.std(expected) > 0.1


def test_literal_layout(tmp_path: Path) -> None:
    """What the paper's runtime reads: keys, order and plain numbers only."""
    artifact = random_artifact()
    artifact.save_literal(tmp_path / "artifact.py")
    value = read_literal(tmp_path / "artifact.py")
    assert value == artifact.literal()
    assert set(value) == {"metadata", "scheduler"}
    assert value["metadata"] == {"depth": 5, "selected_signals": list(PAPER_SIGNALS)}
    layers = value["scheduler"]["layers"]
    assert [(len(la["weight"]), len(la["weight"][0]), len(la["bias"])) for la in layers] == [
        (64, 17, 64),
        (32, 64, 32),
        (1, 32, 1),
    ]
    names: dict[str, Any] = {}
    exec((tmp_path / "artifact.py").read_text(), names)
    assert names[LITERAL_NAME] == value


def test_numpy_scalars_make_a_readable_literal(tmp_path: Path) -> None:
    """Statistics as numpy scalars, as ``y.mean()`` gives them, export like Python floats."""
    artifact = replace(random_artifact(), y_mean=np.float64(-1.26), y_std=np.float64(2.97))
    artifact.save_literal(tmp_path / "artifact.py")
    assert_same(load_scheduler(tmp_path / "artifact.py"), artifact)


def test_a_published_literal_may_hold_one_element_lists(tmp_path: Path) -> None:
    """y_mean and y_std as ``[x]`` are read as numbers."""
    artifact = random_artifact()
    value = artifact.literal()
    value["scheduler"]["y_mean"], value["scheduler"]["y_std"] = [-1.26], [[2.97]]
    (tmp_path / "artifact.py").write_text(f"import os\nSCHEDULER_ARTIFACTS = {value!r}\n")
    assert_same(load_scheduler(tmp_path / "artifact.py"), artifact)


def test_distilled_scheduler_decides_by_the_margin() -> None:
    """Positive margin and room under the cap call the mid drafter; the input order is fixed."""
    chosen = ("tree_nodes_before", "depth_before")
    artifact = random_artifact(5, chosen)
    artifact = replace(artifact, x_std=np.ones_like(artifact.x_std))
    actions = set()
    for seed in range(30):
        values = np.random.default_rng(seed).normal(size=10)
        state = StepState(3, (1, 0), 5, 10, 80.0, 20.0, values)
        row = [*context_features(10, 80.0, 20.0, 3, (1, 0), 5), values[8], values[0]]
        margin = plain_margin(artifact.literal(), row)
        scheduler = DistilledScheduler(artifact)
        assert scheduler.margin(state) == pytest.approx(margin, abs=1e-9)
        assert scheduler.decide(state) == int(margin > 0)
        assert DistilledScheduler(artifact, max_calls=1).decide(state) == 0
        assert DistilledScheduler(artifact, max_calls=2).decide(state) == int(margin > 0)
        actions.add(int(margin > 0))
    if len(actions) == 1:
        flipped = replace(artifact, y_mean=-artifact.y_mean, y_std=-artifact.y_std)
        assert DistilledScheduler(flipped).decide(state) != actions.pop()
    with pytest.raises(InputError, match="trained for depth 5"):
        DistilledScheduler(artifact).decide(replace(state, depth=4))
    with pytest.raises(ValueError, match="needs the ten signals"):
        DistilledScheduler(artifact).decide(replace(state, signals=None))


# Round trips, bit for bit -----------------------------------------------------------------------

ANY = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 0.1, 1 / 3, -1e300])


@st.composite
def artifacts(draw: st.DrawFn) -> SchedulerArtifact:
    """Artifacts of any depth, signals, layers and memory layout, with awkward numbers."""
    depth = draw(st.integers(1, 6))
    signals = draw(st.lists(st.sampled_from(SIGNALS), unique=True, max_size=4))
    sizes = [6 + depth + len(signals), *draw(st.lists(st.integers(1, 9), max_size=2)), 1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def array(*shape: int) -> np.ndarray:
        found = rng.normal(size=shape) * 10.0 ** rng.integers(-8, 8, shape)
        found.flat[rng.integers(found.size)] = draw(ANY)
        layout = draw(st.integers(0, 2))
        return (found, np.asfortranarray(found), np.repeat(found, 2, -1)[..., ::2])[layout]

    layers = range(len(sizes) - 1)
    texts = st.text(st.characters(codec="utf-8"), max_size=9)
    return SchedulerArtifact(
        depth=depth,
        selected_signals=tuple(signals),
        weights=tuple(array(sizes[i + 1], sizes[i]) for i in layers),
        biases=tuple(array(sizes[i + 1]) for i in layers),
        x_mean=array(sizes[0]),
        x_std=np.abs(array(sizes[0])),
        y_mean=draw(ANY),
        y_std=draw(ANY),
        metadata=draw(st.dictionaries(texts, st.integers() | texts | ANY, max_size=3)),
        trained=draw(FACTS),
    )


ENDS = st.tuples(st.floats(1e-3, 1e3), st.floats(1, 1e3)).map(lambda e: (e[0], e[0] * e[1]))
NAMES = st.text(st.sampled_from("aÄ|\\`<[日 -.{"), min_size=1, max_size=9)
FACTS = st.builds(
    Trained,
    st.just({}) | st.fixed_dictionaries(dict.fromkeys(WIDTHS, st.integers(1, 99))),
    st.lists(st.builds(Drafters, NAMES, NAMES, NAMES, NAMES), max_size=3).map(tuple),
    st.just({}) | st.fixed_dictionaries(dict.fromkeys(COSTS, ENDS)),
    st.dictionaries(NAMES, ANY | st.booleans() | NAMES, max_size=3),
)
MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def margins_of(artifact: SchedulerArtifact) -> bytes:
    """Return margins of random inputs, every bit of them."""
    with np.errstate(all="ignore"):
        return artifact.margins(inputs(artifact, 7)).tobytes()


@MANY
@given(artifact=artifacts())
def test_a_folder_gives_the_same_margins_bit_for_bit(
    tmp_path: Path, artifact: SchedulerArtifact
) -> None:
    artifact.save_pretrained(tmp_path / "a")
    loaded = SchedulerArtifact.from_pretrained(tmp_path / "a")
    assert_same(loaded, artifact)
    assert (loaded.metadata, loaded.trained) == (artifact.metadata, artifact.trained)
    assert margins_of(loaded) == margins_of(artifact)
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    loaded.save_pretrained(tmp_path / "a")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


@MANY
@given(artifact=artifacts())
def test_a_literal_gives_the_same_margins_bit_for_bit(
    tmp_path: Path, artifact: SchedulerArtifact
) -> None:
    """Ours, theirs, ours; and theirs, ours, theirs: the same file. Metadata is not in it."""
    artifact.save_literal(tmp_path / "a.py")
    loaded = SchedulerArtifact.from_pretrained(tmp_path / "a.py")
    assert_same(loaded, artifact)
    assert margins_of(loaded) == margins_of(artifact)
    assert (loaded.metadata, loaded.trained) == ({}, Trained())
    loaded.save_literal(tmp_path / "b.py")
    assert (tmp_path / "b.py").read_bytes() == (tmp_path / "a.py").read_bytes()
    loaded.save_pretrained(tmp_path / "a")
    again = SchedulerArtifact.from_pretrained(tmp_path / "a")
    again.save_literal(tmp_path / "b.py")
    assert (tmp_path / "b.py").read_bytes() == (tmp_path / "a.py").read_bytes()


@MANY
@given(artifact=artifacts())
def test_model_cards_have_valid_front_matter_and_whole_tables(artifact: SchedulerArtifact) -> None:
    """Whatever the names and figures are."""
    card = model_card(artifact, "you/a|b")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    cells: dict[int, int] = {}
    for block in body.split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("|"):
            counts = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}
            assert len(counts) == 1, block
            cells[len(lines)] = counts.pop()
    assert cells


def test_the_model_card_holds_the_artifacts_own_numbers() -> None:
    facts = Trained(
        dict(zip(WIDTHS, (11, 47, 6), strict=True)),
        (Drafters("suffix", "head", "a-pair", "0a1b2c"),),
        {"target_ms": (12.5, 99.0), "mid_ms": (3.25, 7.0), "ratio": (1.625, 17.75)},
        {"speed_after_rollouts": 1.4375, "texts_whole": True, "nested": {"left": "out"}},
    )
    about = {"tasks": ["math", "code"], "margin_unit": "mean rounds", "git_sha": "abc123"}
    card = model_card(replace(random_artifact(), trained=facts, metadata=about), "you/mine")
    for fact in ("3,265", "| W | 11 |", "| B_ver | 47 |", "| n_max | 6 |", "suffix", "head",
                 "a-pair", "0a1b2c", "1.625", "17.75", "1.438", "math, code", "mean rounds",
                 "abc123", 'from_pretrained("you/mine")', *PAPER_SIGNALS):  # fmt: skip
        assert fact in card, fact
    assert "left" not in card and "not checked" not in card
    bare = model_card(random_artifact(), "x")
    assert "Nobody noted its widths, drafters, costs: they are not checked." in bare
    load = card.split("```python\n")[1].split("```")[0]
    assert len(load.splitlines()) == 3
    names: dict[str, Any] = {}
    exec(load.splitlines()[0], names)
    assert {"DistilledScheduler", "TreeGraftDecoder"} <= set(names)


def old_folder(folder: Path, artifact: SchedulerArtifact) -> Path:
    """Write a folder as format 1 had it."""
    artifact.save(folder)
    header = json.loads((folder / "scheduler.json").read_text())
    names = ("depth", "selected_signals", "input_names", "parameters", "metadata")
    old = {"format": 1, **{name: header[name] for name in names}}
    (folder / "scheduler.json").write_text(json.dumps(old))
    return folder


def test_old_folders_load_and_a_warning_says_what_they_lack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = replace(random_artifact(), trained=Trained(dict.fromkeys(WIDTHS, 3)))
    loaded = load_scheduler(old_folder(tmp_path, artifact))
    assert_same(loaded, artifact)
    assert margins_of(loaded) == margins_of(artifact)
    assert (loaded.metadata, loaded.trained) == (artifact.metadata, Trained())
    fit_check._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        fit_check.check_fits(loaded, DraftingConfig(width=4), "any", "mid")
    assert "does not say what widths, drafters, costs" in caplog.text


def test_an_old_folder_with_signals_in_another_order_is_refused(tmp_path: Path) -> None:
    old_folder(tmp_path, random_artifact())
    edit_header(selected_signals=list(PAPER_SIGNALS[::-1]))(tmp_path)
    with pytest.raises(InputError, match=r"input_names\[11\]=depth_before where .* another order"):
        load_scheduler(tmp_path)


def test_a_card_that_is_there_is_written_anew_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("README.md", "config.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    random_artifact().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("---\nlicense: apache-2.0")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "notes.txt").read_text() == "old"


def test_arguments_of_an_upload_without_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="private: is of an upload only"):
        random_artifact().save_pretrained(tmp_path, private=True)
    random_artifact().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"revision=main: .* is not a repository on the hub"):
        SchedulerArtifact.from_pretrained(tmp_path, revision="main")


# Bad artifacts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected_signals": ("depth_before", "nonsense")}, "selected_signals=nonsense"),
        ({"depth": 4}, "16 inputs of depth 4"),
        ({"selected_signals": SIGNALS[:5]}, "16 inputs"),
        ({"x_mean": np.zeros(16)}, "layer shapes"),
        ({"x_std": np.zeros((17, 1))}, "layer shapes"),
        ({"weights": ()}, "layer shapes"),
        ({"x_mean": np.full(17, np.nan)}, "not finite"),
        ({"y_mean": math.nan}, "not finite"),
        ({"y_std": math.inf}, "not finite"),
    ],
)
def test_artifacts_that_cannot_work(change: dict[str, Any], message: str) -> None:
    """Wrong shapes, unknown signals and values that are not finite."""
    with pytest.raises(InputError, match=message):
        replace(random_artifact(), **change)


def test_transposed_or_missing_layers() -> None:
    """A weight is ``[out, in]``; the last layer has one output."""
    good = random_artifact()
    with pytest.raises(InputError, match="layer shapes"):
        replace(good, weights=tuple(w.T for w in good.weights))
    with pytest.raises(InputError, match="layer shapes"):
        replace(good, weights=good.weights[:2], biases=good.biases[:2])


def edit_header(**change: Any) -> Callable[[Path], None]:
    """Return a function that changes fields of ``scheduler.json``; None removes one."""

    def edit(folder: Path) -> None:
        path = folder / "scheduler.json"
        header = json.loads(path.read_text())
        for name, value in change.items():
            header.pop(name) if value is None else header.update({name: value})
        path.write_text(json.dumps(header))

    return edit


def edit_tensors(**change: torch.Tensor | None) -> Callable[[Path], None]:
    """Return a function that changes tensors of the folder; None removes one."""

    def edit(folder: Path) -> None:
        path = folder / "scheduler.safetensors"
        tensors = load_file(path)
        for name, value in change.items():
            key = name.replace("__", ".")
            tensors.pop(key) if value is None else tensors.update({key: value})
        save_file(tensors, path)
        edit_header(sha256=hashlib.sha256(path.read_bytes()).hexdigest())(folder)

    return edit


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    """Return a function that cuts a file of the folder."""

    def edit(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])

    return edit


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    """Return a function that overwrites a file of the folder."""
    return lambda folder: (folder / name).write_text(text) and None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no_header": lambda folder: (folder / "scheduler.json").unlink(),
    "no_tensors": lambda folder: (folder / "scheduler.safetensors").unlink(),
    "cut_header": truncate("scheduler.json", 0.5),
    "empty_header": truncate("scheduler.json", 0.0),
    "cut_tensors": truncate("scheduler.safetensors", 0.5),
    "cut_tensor_header": truncate("scheduler.safetensors", 0.001),
    "empty_tensors": truncate("scheduler.safetensors", 0.0),
    "header_is_a_list": overwrite("scheduler.json", "[1, 2]"),
    "header_is_a_number": overwrite("scheduler.json", "3"),
    "header_is_binary": lambda f: (f / "scheduler.json").write_bytes(b"\xff\xfe\x00") and None,
    "header_is_deep": overwrite("scheduler.json", "[" * 200_000),
    "tensors_are_a_pickle": lambda f: torch.save({"x": 1}, f / "scheduler.safetensors"),
    "no_depth": edit_header(depth=None),
    "depth_is_text": edit_header(depth="five"),
    "depth_is_infinite": edit_header(depth=math.inf),
    "wrong_depth": edit_header(depth=7),
    "no_signals": edit_header(selected_signals=None),
    "unknown_signal": edit_header(selected_signals=["__import__('os')"]),
    "signals_are_lists": edit_header(selected_signals=[[1], [2]]),
    "metadata_is_a_number": edit_header(metadata=3),
    "no_checksum": edit_header(sha256=None),
    "other_checksum": edit_header(sha256="0" * 64),
    "later_format": edit_header(format=3),
    "no_input_names": edit_header(input_names=None),
    "too_few_input_names": edit_header(input_names=list(context_names(5))),
    "signals_in_another_order": edit_header(selected_signals=list(PAPER_SIGNALS[::-1])),
    "a_signal_twice": edit_header(selected_signals=[SIGNALS[0]] * 6),
    "widths_are_text": edit_header(widths="10"),
    "costs_are_not_finite": edit_header(costs={name: [1.0, math.inf] for name in COSTS}),
    "tensors_of_another_export": lambda f: (
        random_artifact(seed=1).save(f / "x")
        or os.replace(f / "x" / "scheduler.safetensors", f / "scheduler.safetensors")
    ),
    "no_weight": edit_tensors(layers__1__weight=None),
    "no_bias": edit_tensors(layers__2__bias=None),
    "no_x_mean": edit_tensors(x_mean=None),
    "wrong_shape": edit_tensors(layers__0__weight=torch.zeros(64, 16)),
    "scalar_bias": edit_tensors(layers__0__bias=torch.zeros(())),
    "empty_y_std": edit_tensors(y_std=torch.zeros(0)),
    "not_finite": edit_tensors(x_std=torch.full((17,), math.nan)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_input_errors(tmp_path: Path, name: str) -> None:
    """Truncated, wrong and missing parts of a folder; the message says what to do."""
    random_artifact().save(tmp_path)
    assert load_scheduler(tmp_path).n_parameters == 3265
    DAMAGE[name](tmp_path)
    with pytest.raises(InputError):
        load_scheduler(tmp_path)


def test_missing_paths(tmp_path: Path) -> None:
    """No such folder, no such file."""
    with pytest.raises(InputError, match="stage=export"):
        load_scheduler(tmp_path / "none")
    with pytest.raises(InputError, match="stage=export"):
        load_scheduler(tmp_path / "none.py")


def literal_with(**scheduler: Any) -> str:
    """Return a literal module whose ``scheduler`` part has other values."""
    value = random_artifact().literal()
    value["scheduler"].update(scheduler)
    return f"SCHEDULER_ARTIFACTS = {value!r}\n"


WHOLE = literal_with()
BAD_LITERALS = {
    "empty": "",
    "not_python": "SCHEDULER_ARTIFACTS = {",
    "truncated": WHOLE[: len(WHOLE) // 2],
    "other_name": WHOLE.replace("SCHEDULER_ARTIFACTS", "ARTIFACTS"),
    "nested_name": "if True:\n    " + WHOLE,
    "a_number": "SCHEDULER_ARTIFACTS = 3\n",
    "no_layers": literal_with(layers=[]),
    "layers_is_text": literal_with(layers="weights"),
    "ragged": literal_with(layers=[{"weight": [[1.0], [1.0, 2.0]], "bias": [0.0]}]),
    "wrong_shape": literal_with(layers=[{"weight": [[1.0] * 3], "bias": [0.0]}]),
    "text_numbers": literal_with(x_mean=["one"] * 17),
    "complex_numbers": literal_with(x_mean=[1j] * 17),
    "huge_number": literal_with(x_mean=[10**400] * 17),
    "two_y_means": literal_with(y_mean=[1.0, 2.0]),
    "no_y_std": WHOLE.replace("'y_std'", "'other'"),
    "null_byte": WHOLE + "\0",
    "deep": "SCHEDULER_ARTIFACTS = " + "[" * 5000 + "]" * 5000,
    "deep_minus": "SCHEDULER_ARTIFACTS = " + "-" * 100_000 + "1",
    "not_finite": WHOLE.replace("-1.26", "1e999"),
}


@pytest.mark.parametrize("name", BAD_LITERALS)
def test_bad_literals_are_input_errors(tmp_path: Path, name: str) -> None:
    """Damaged modules, and modules that hold something else."""
    (tmp_path / "artifact.py").write_text(BAD_LITERALS[name])
    with pytest.raises(InputError):
        load_scheduler(tmp_path / "artifact.py")


def test_binary_rubbish_is_an_input_error(tmp_path: Path) -> None:
    """Not even text."""
    (tmp_path / "artifact.py").write_bytes(b"\xff\xfe\x00\x01" * 50)
    with pytest.raises(InputError):
        load_scheduler(tmp_path / "artifact.py")


PAYLOADS = [
    "SCHEDULER_ARTIFACTS = {code}",
    "SCHEDULER_ARTIFACTS = {{'metadata': {code}, 'scheduler': 1}}",
    "SCHEDULER_ARTIFACTS = [x for x in [{code}]]",
    'SCHEDULER_ARTIFACTS = f"""{{{code}}}"""',
    "{code}\nSCHEDULER_ARTIFACTS = 3",
    "SCHEDULER_ARTIFACTS = 3\n{code}",
    "SCHEDULER_ARTIFACTS = (lambda: {code})()",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_literals_execute_nothing(tmp_path: Path, payload: str) -> None:
    """A module with code in it is refused, and the code does not run."""
    proof = tmp_path / "proof"
    code = f"__import__('pathlib').Path({str(proof)!r}).touch()"
    text = payload.format(code=code)
    (tmp_path / "artifact.py").write_text(text)
    with pytest.raises(InputError):
        load_scheduler(tmp_path / "artifact.py")
    assert not proof.exists()
    exec(text, {})
    assert proof.exists()


def test_code_beside_a_good_literal_does_not_run(tmp_path: Path) -> None:
    """The literal is read; the rest of the module is not."""
    proof = tmp_path / "proof"
    code = f"__import__('pathlib').Path({str(proof)!r}).touch()\n"
    (tmp_path / "artifact.py").write_text(code + WHOLE + code)
    assert_same(load_scheduler(tmp_path / "artifact.py"), random_artifact())
    assert not proof.exists()


class Exploit:
    """Pickles to a call that touches a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_in_place_of_tensors_is_not_loaded(tmp_path: Path) -> None:
    """Tensors come from safetensors alone."""
    random_artifact().save(tmp_path)
    torch.save(Exploit(tmp_path / "proof"), tmp_path / "scheduler.safetensors")
    with pytest.raises(InputError):
        load_scheduler(tmp_path)
    assert not (tmp_path / "proof").exists()
    # The payload is live: unpickling the file would leave the proof.
    (tmp_path / "scheduler.safetensors").rename(tmp_path / "scheduler.pt")
    torch.load(tmp_path / "scheduler.pt", weights_only=False)
    assert (tmp_path / "proof").exists()


def test_saving_again_leaves_no_temporary_files(tmp_path: Path) -> None:
    """Atomic writes: the second artifact replaces the first."""
    random_artifact(seed=0).save(tmp_path)
    random_artifact(seed=1).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scheduler.json", "scheduler.safetensors"]
    assert_same(load_scheduler(tmp_path), random_artifact(seed=1))
