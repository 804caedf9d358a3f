"""Tries read from Parquet files against tries built row by row, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import tries as reading
from pipeline.schema import SCHEMA
from pipeline.tries import (
    ARRAYS,
    COUNTS,
    NEVER,
    Tries,
    join,
    prefix_bits,
    prefix_steps,
    prefixes_of,
    read_tries,
    schedules,
)
from tests.pipeline.test_replay import random_tries
from tests.reference import offline as slow
from treegraft_core import SIGNALS, InputError

DEPTH = 3
PER_STATE = DEPTH << DEPTH


def random_rows(seed: int, states: int = 7) -> list[dict[str, Any]]:
    """Return rows whose every number differs, so that none can stand for another."""
    rng = np.random.default_rng(seed)
    rows = []
    for state in range(states):
        signals = {p: rng.normal(size=len(SIGNALS)).tolist() for p in slow.prefixes(DEPTH)}
        once = {
            "prompt_id": f"p{state // 2}",
            "turn": state % 2,
            "position": 3 + state,
            "state_id": f"{state // 2}/{state % 2}/{3 + state}",
            "prompt_tokens": 10 + state // 2,
            "context_tokens": 20 + state,
            "target_ms": 5.0 + state,
            "mid_ms": 2.0 + 0.1 * state,
        }
        mid = {p: rng.integers(0, 90, len(COUNTS)).tolist() for p in slow.prefixes(DEPTH)}
        for schedule in slow.schedules(DEPTH):
            accepted = int(rng.integers(0, 4))
            outcome = {
                "accepted": accepted,
                "committed": accepted + 1,
                "t_draft_ms": float(rng.uniform(1, 50)),
                "t_verify_ms": float(rng.uniform(5, 9)),
                "accepted_ranks": sorted(rng.choice(30, accepted, replace=False).tolist()),
                "tree_nodes": 40,
                "kept_nodes": int(rng.integers(1, 30)),
                "pool_nodes": 3,
                "earlier_picks": 0,
            }
            for k in range(1, DEPTH + 1):
                prefix, action = schedule[: k - 1], int(schedule[k - 1])
                counts = mid[prefix] if action else [0] * len(COUNTS)
                row = {"schedule": schedule, "step": k, "prefix": prefix, "action": action}
                row |= {"future": schedule[k:], "step_ms": 1.0}
                row |= dict(zip(SIGNALS, signals[prefix], strict=True))
                rows.append(once | outcome | row | dict(zip(COUNTS, counts, strict=True)))
    return rows


def write(folder: Path, parts: dict[str, list[dict[str, Any]]]) -> Path:
    """Write files of rows; a key is a path below the folder of the pair."""
    for name, rows in parts.items():
        path = folder / "pair=p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return folder / "pair=p"


def read(folder: Path, **more: Any) -> Tries:
    return read_tries(folder, "p", "words", DEPTH, **more)


def assert_same(ours: Tries, theirs: Tries) -> None:
    assert ours.depth == theirs.depth
    pd.testing.assert_frame_equal(ours.states[theirs.states.columns], theirs.states)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype, name


def test_tries_equal_those_built_row_by_row(tmp_path: Path) -> None:
    rows = random_rows(0)
    tries = read(write(tmp_path, {"task=words/part.parquet": rows}))
    frame = pd.DataFrame(rows)
    assert (len(tries), tries.rows, tries.pairs) == (7, len(rows), ("p",))
    for at, (_, row) in enumerate(tries.states.iterrows()):
        mine = frame[frame["state_id"] == row["state_id"]].to_dict("records")
        expected = slow.state_of(mine, DEPTH, SIGNALS, COUNTS)
        assert (row["pair"], row["task"]) == ("p", "words")
        assert {name: row[name] for name in slow.ONCE} == {n: expected[n] for n in slow.ONCE}
        assert tries.signals[at].tolist() == expected["signals"]
        assert tries.counts[at].tolist() == expected["counts"]
        assert tries.accepted[at].tolist() == expected["accepted"]
        assert tries.draft_ms[at].tolist() == expected["t_draft_ms"]
        assert tries.verify_ms[at].tolist() == expected["t_verify_ms"]
        assert tries.kept[at].tolist() == expected["kept_nodes"]
        ranks = [[r for r in row if r != NEVER] for row in tries.ranks[at].tolist()]
        assert ranks == expected["accepted_ranks"]
    assert tries.states["state_id"].tolist() == sorted(set(frame["state_id"]))


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_files_and_batches_changes_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(1)
    plain = read(write(tmp_path / "plain", {"task=words/part.parquet": rows}))
    rng = np.random.default_rng(seed)
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    edges = [0, *sorted(rng.choice(len(rows), 3, replace=False).tolist()), len(rows)]
    files = {
        f"task=words/{'a' if i % 2 else 'b/c'}/{i}.parquet": shuffled[low:high]
        for i, (low, high) in enumerate(pairwise(edges))
    }
    monkeypatch.setattr(reading, "BATCH_ROWS", 5 + 8 * seed)
    assert_same(read(write(tmp_path / "shuffled", files)), plain)


def test_the_task_is_that_of_the_folder_or_the_one_given(tmp_path: Path) -> None:
    rows = random_rows(2)
    folder = write(tmp_path, {"task=a%2Fb/x.parquet": rows, "y.parquet": rows})
    tries = read(folder)
    assert tries.states["task"].tolist() == ["a/b"] * 7 + ["words"] * 7
    np.testing.assert_array_equal(tries.signals[:7], tries.signals[7:])


def test_prefixes_and_schedules_are_numbered_as_the_text_says() -> None:
    for depth in range(1, 6):
        names, leaves = slow.prefixes(depth), slow.schedules(depth)
        assert prefix_steps(depth).tolist() == [len(name) + 1 for name in names]
        bits = [[int(b) for b in name.ljust(depth, "0")] for name in names]
        assert prefix_bits(depth).tolist() == bits
        assert schedules(depth).tolist() == [[int(b) for b in leaf] for leaf in leaves]
        before = [[names.index(leaf[:k]) for k in range(depth)] for leaf in leaves]
        assert prefixes_of(depth).tolist() == before


# --- refused --------------------------------------------------------------------------------------


def without(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[1:]


def twice(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows, rows[4]]


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows[1:], rows[4]]


def crowd(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many rows, each of another state."""
    return [row | {"state_id": f"s{i}"} for i, row in enumerate(rows)]


def changed(name: str, value: Any, at: int = 9) -> Any:
    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new = value(rows[at]) if callable(value) else value
        return [row | {name: new} if i == at else row for i, row in enumerate(rows)]

    return change


def flipped(name: str) -> Any:
    """Return a change of the first bit of a text that has one."""
    rows = random_rows(3)
    at = next(i for i, row in enumerate(rows) if row[name])
    return changed(name, lambda row: str(1 - int(row[name][0])) + row[name][1:], at)


BAD: dict[str, tuple[Any, str]] = {
    "a row is missing": (without, r"have 23 rows \(23 distinct\) of state .*24 combinations"),
    "a row is there twice": (twice, r"have 25 rows \(24 distinct\) of state"),
    "a row for another": (swapped, r"\(23 distinct\) of state"),
    "more states than rows allow": (crowd, r"hold 168 rows of more than 7 states"),
    "NaN": (changed("score_before", float("nan")), "not finite"),
    "infinite": (changed("t_draft_ms", float("inf")), "not finite"),
    "null": (changed("accepted", None), "missing values"),
    "no time": (changed("t_verify_ms", 0.0), "0 ms or less"),
    "negative time": (changed("mid_ms", -1.0), "0 ms or less"),
    "another action": (changed("action", lambda row: 1 - row["action"]), r"prefix \+ action"),
    "another prefix": (flipped("prefix"), r"prefix \+ action"),
    "another future": (flipped("future"), r"prefix \+ action"),
    "a longer prefix": (changed("prefix", lambda row: row["prefix"] + "0"), r"prefix \+ action"),
    "a shorter future": (changed("future", lambda row: row["future"][1:], 0), r"prefix \+ act"),
    "no bits": (changed("future", "2x", 0), r"prefix \+ action"),
    "no bits in the schedule": (changed("schedule", "0a0"), r"prefix \+ action"),
    "step 0": (changed("step", 0), r"prefix \+ action"),
    "a step too many": (changed("step", DEPTH + 1), r"prefix \+ action"),
    "another depth": (changed("schedule", "00000"), r"drafting\.depth=3: .* schedules of"),
    "too few ranks": (changed("accepted_ranks", [1, 2, 3, 4, 5], 0), "accepted_ranks of another"),
    "no rows": (lambda rows: [], "hold no rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_unsound_rows_are_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    folder = write(tmp_path, {"task=words/part.parquet": change(random_rows(3))})
    with pytest.raises(InputError, match=message) as error:
        read(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_column_and_another_depth_and_version(tmp_path: Path) -> None:
    folder = write(tmp_path, {"task=words/part.parquet": random_rows(4)})
    with pytest.raises(InputError, match=r"depth=5: .* schedules of 3 steps; give .*depth=3"):
        read_tries(folder, "p", "words", 5)
    path = folder / "task=words" / "part.parquet"
    table = pq.ParquetFile(path).read()
    pq.write_table(table.drop_columns(["leaf_ratio_before"]), path)
    with pytest.raises(InputError, match=r"part\.parquet: damaged .*no column leaf_ratio_before"):
        read(folder)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(InputError, match="schema version none"):
        read(folder)


def test_no_folder_and_no_files(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="stage=collect first"):
            read(folder)


# --- a smaller budget, parts ----------------------------------------------------------------------

cases = st.tuples(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 25))


@settings(max_examples=40, deadline=None)
@given(cases)
def test_within_counts_the_accepted_nodes_that_a_budget_keeps(case: tuple[int, int, int]) -> None:
    seed, depth, budget = case
    tries = random_tries(np.random.default_rng(seed), depth, [2, 3])
    accepted, kept = tries.within(budget)
    for state in range(len(tries)):
        for leaf in range(1 << depth):
            ranks = [r for r in tries.ranks[state, leaf].tolist() if r != NEVER]
            assert accepted[state, leaf] == sum(rank < budget for rank in ranks)
            assert kept[state, leaf] == min(budget, int(tries.kept[state, leaf]))
    whole, _ = tries.within(NEVER)
    assert whole.tolist() == tries.accepted.tolist()


def test_taking_and_joining_give_back_the_same() -> None:
    tries = random_tries(np.random.default_rng(5), 3, [4, 5, 6])
    odd = np.arange(len(tries)) % 2 == 1
    some = tries.take(odd)
    assert_same(some, tries.take(np.flatnonzero(odd)))
    assert some.states["state_id"].tolist() == tries.states["state_id"][odd].tolist()
    np.testing.assert_array_equal(some.signals, tries.signals[odd])
    assert_same(join([some, tries.take(~odd)]), tries)
    assert_same(join([tries.take(~odd), some]), tries)


def test_joining_widens_the_ranks_and_refuses_other_depths() -> None:
    tries = random_tries(np.random.default_rng(6), 2, [5])
    last = tries.take([4])
    short = Tries(
        2, last.states, **{n: getattr(last, n) for n in ARRAYS if n != "ranks"},
        ranks=last.ranks[..., :2],
    )  # fmt: skip
    joined = join([short, tries.take([0, 1, 2, 3])])
    assert joined.ranks.shape == tries.ranks.shape
    assert (joined.ranks[4, :, 2:] == NEVER).all()
    np.testing.assert_array_equal(joined.ranks[:4], tries.ranks[:4])
    with pytest.raises(ValueError, match="depths"):
        join([tries, random_tries(np.random.default_rng(0), 3, [2])])
