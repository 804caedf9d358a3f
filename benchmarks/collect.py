"""Collecting all 2^D schedules of a state, four ways on the same states, records compared.

(a) each schedule alone, the whole tree read at every mid call, as the paper's runtime does;
(b) each schedule alone in our decoder, the tree's keys and values kept; (c) the shared enumeration
with its Arrow rows, as ``stage=collect`` does it; (d) the floor: only the mid passes of (c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from benchmarks.naive import CachedTree, WholeTree, first_difference
from benchmarks.shapes import flat_profile
from benchmarks.timing import Measured, cell, seconds, spread
from pipeline.engine import drafting_config, open_pair
from pipeline.rows import enumerate_text, pack_memory, sample_roots, state_rows
from pipeline.tasks import load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import DraftingConfig, Pair
from treegraft_core.enumeration import DEFAULT_MEMORY, Enumeration
from treegraft_core.models import CachedModel

WAYS = {
    "a": "(a) each schedule alone, tree read again at every mid call",
    "b": "(b) each schedule alone, tree cached",
    "c": "(c) shared enumeration, Arrow rows included",
    "d": "(d) only the mid passes of (c)",
}
WARM_UP = [(0, 0, 1), (1, 0, 1)]


class Recorder(CachedModel):
    """A model that notes every call, so that its passes can be run again without anything else."""

    def __init__(self, model: Any):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        super().__init__(model)

    def reset(self) -> None:
        """Forget the text."""
        self.calls.append(("reset", (), {}))
        super().reset()

    def run(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Run a pass."""
        self.calls.append(("run", arguments, named))
        return super().run(*arguments, **named)

    def keep(self, *arguments: Any) -> None:
        """Select cached tokens."""
        self.calls.append(("keep", arguments, {}))
        super().keep(*arguments)

    def replay(self, model: CachedModel) -> None:
        """Make the same calls on another model."""
        for name, arguments, named in self.calls:
            getattr(model, name)(*arguments, **named)


class Ways:
    """The four ways on one pair, each with models of its own that stay allocated."""

    def __init__(
        self, pair: Pair, config: DraftingConfig, memory: int = DEFAULT_MEMORY, pack: int = 0
    ):
        self.pair, self.config, self.memory, self.pack = pair, config, memory, pack
        self.naive, self.cached = WholeTree(pair, config), CachedTree(pair, config)
        self.model, self.floor = CachedModel(pair.mid), CachedModel(pair.mid)
        self.profile = flat_profile()

    def shared(self, text: Text, roots: Sequence[int], model: CachedModel) -> Enumeration:
        """Run (c)."""
        found = enumerate_text(self.pair, model, text, roots, self.config, self.memory, self.pack)
        state_rows(text, roots, found, self.profile)
        return found

    def record(self, text: Text, roots: Sequence[int]) -> tuple[Recorder, Enumeration]:
        """Run (c) untimed and note its passes."""
        recorder = Recorder(self.pair.mid)
        return recorder, self.shared(text, roots, recorder)

    def repeat(
        self, text: Text, roots: Sequence[int], at: int, backwards: bool
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Run all four alternately: (a), (b) at state ``at``, (c), (d) at all.

        Returns
        -------
        seconds : dict
            Of each way, a state.
        outputs : dict
            The records of (a), (b) and (c) at ``at``; paths, passes and (a)'s mid calls.
        """
        recorder, _ = self.record(text, roots)
        out: dict[str, Any] = {}

        def keep(name: str, call: Callable[[], Any]) -> None:
            out[name] = call()

        calls = {
            "a": lambda: keep("a", lambda: self.naive.outcomes(text, roots[at])),
            "b": lambda: keep("b", lambda: self.cached.outcomes(text, roots[at])),
            "c": lambda: keep("c", lambda: self.shared(text, roots, self.model)),
            "d": lambda: recorder.replay(self.floor),
        }
        for name in "cd":
            calls[name]()
        times = {n: seconds(calls[n]) for n in (reversed(calls) if backwards else calls)}
        found: Enumeration = out["c"]
        out["c"] = found.outcomes(at)
        out["paths"], out["passes"] = found.paths / len(roots), found.passes / len(roots)
        return times | {n: times[n] / len(roots) for n in "cd"}, out


def measure(ways: Ways, texts: Sequence[Text], states: int, repeats: int, seed: int) -> Measured:
    """Time ``repeats`` texts in turn, ``states`` states each, and compare the records."""
    rng = np.random.default_rng(seed)
    texts = [t for t in texts if len(t.roots())]
    config = ways.config
    schedules = [tuple(b[k % 3] for k in range(config.depth)) for b in WARM_UP]
    for slow in (ways.naive, ways.cached):
        slow.outcomes(texts[0], texts[0].roots()[0], schedules)
    rows, differences, packed = [], [], []
    for r in range(repeats):
        text = texts[r % len(texts)]
        roots = sample_roots(text, states, rng)
        at = int(rng.integers(len(roots)))
        times, out = ways.repeat(text, roots, at, backwards=r % 2 == 1)
        where = f"{text.task}/{text.prompt_id} root {roots[at]}"
        for way in "ab":
            difference = first_difference(out[way], out["c"])
            if difference:
                differences.append(f"({way}) and (c) at {where}: {difference}")
        packed.append(len(roots))
        rows.append({**times, "state": where, "paths": out["paths"], "passes": out["passes"]})
    return summarise(rows, differences, packed, ways)


def summarise(
    rows: list[dict[str, Any]], differences: list[str], packed: list[int], ways: Ways
) -> Measured:
    """Return tables, ratios and, unless the dtype rounds coarsely, what differs as failures."""
    s = {name: np.array([row[name] for row in rows]) for name in "abcd"}
    table = [
        {
            "way": title,
            "ms a state": cell(1e3 * s[name]),
            "states/s": float(np.median(1 / s[name])),
            "× (c)": cell(s[name] / s["c"]),
        }
        for name, title in WAYS.items()
    ]
    compared = 2 * len(rows)
    counts = {
        "states of a text together": float(np.mean(packed)),
        "paths a state": float(np.mean([row["paths"] for row in rows])),
        "passes a state": float(np.mean([row["passes"] for row in rows])),
    }
    done = Measured(
        values={
            "ways": WAYS,
            "repeats": rows,
            "a_over_c": spread(s["a"] / s["c"]),
            "b_over_c": spread(s["b"] / s["c"]),
            "c_over_d": spread(s["c"] / s["d"]),
            "states_per_s": {n: spread(1 / s[n]) for n in "abcd"},
            **counts,
            "compared": compared,
            "differences": differences,
        },
        tables={
            f"{2**ways.config.depth} schedules a state, median (quartiles) of {len(rows)}": table,
            "the shared enumeration": [counts],
        },
        notes=[f"identical records: {compared - len(differences)} of {compared} comparisons"],
    )
    dtype = ways.pair.target.dtype
    if dtype in (torch.bfloat16, torch.float16):
        done.notes += [f"differs, as passes round in {dtype}: {d}" for d in differences[:1]]
    else:
        done.failures = differences[:1]
    return done


def run(conf: DictConfig, states: int | None, repeats: int) -> Measured:
    """Measure the configured pair on the collecting prompts, one of each kind."""
    config = drafting_config(conf)
    pair = open_pair(conf)
    prompts = load_prompts(conf, "collect", 1)
    new_tokens, batch = int(conf.collect.max_new_tokens), int(conf.collect.batch)
    texts: list[Text] = []

    def decode() -> None:
        texts[:] = greedy_texts(pair, prompts, new_tokens, batch, config)[0]

    states = int(conf.collect.states_per_turn) if states is None else states
    text_s = seconds(decode)
    ways = Ways(pair, config, pack_memory(conf), int(conf.collect.pack))
    done = measure(ways, texts, states, repeats, int(conf.seed))
    sampled = sum(min(states or len(t.roots()), len(t.roots())) for t in texts)
    done.values["text_s_per_state"] = text_s / sampled
    done.notes.append(
        f"decoding the texts beforehand: {1e3 * text_s / sampled:.4g} ms a sampled state "
        f"({len(texts)} texts of {new_tokens} tokens in batches of up to {batch}, {sampled} states)"
    )
    return done
