"""The rows that `benchmarks.scale` writes are trajectories like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.scale import DEPTH, PAIR, ROWS_A_STATE, TURN_STATES, TURNS_A_FILE, write_rows
from pipeline.replay import texts_of
from pipeline.tries import NEVER, read_tries


def test_the_rows_are_whole_texts_of_complete_states(tmp_path: Path) -> None:
    written = write_rows(tmp_path, 1)
    folder = tmp_path / "trajectories" / "collect" / f"pair={PAIR}"
    tries = read_tries(folder, PAIR, "none", DEPTH)
    assert len(tries) == TURNS_A_FILE * TURN_STATES == written // ROWS_A_STATE
    assert texts_of(tries).whole
    assert ((tries.ranks < NEVER).sum(-1) == tries.accepted).all()
    assert len(np.unique(tries.accepted)) > 3


def test_more_rows_are_more_files_of_the_same(tmp_path: Path) -> None:
    once = write_rows(tmp_path / "a", 1)
    twice = write_rows(tmp_path / "b", once + 1)
    assert twice == 2 * once
    first, again = (
        next((tmp_path / name).rglob("part-0.parquet")).read_bytes() for name in ("a", "b")
    )
    assert first == again
