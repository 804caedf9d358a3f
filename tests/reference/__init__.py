"""The slow, obvious implementation that the fast core is checked against."""

from tests.reference.twin import (
    Counts,
    Node,
    Tree,
    accepted,
    context_table,
    matches,
    mid_step,
    prune,
    run_round,
    signals,
    small_step,
    verify_greedy,
)

__all__ = [
    "Counts",
    "Node",
    "Tree",
    "accepted",
    "context_table",
    "matches",
    "mid_step",
    "prune",
    "run_round",
    "signals",
    "small_step",
    "verify_greedy",
]
