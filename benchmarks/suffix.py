"""Small drafters alone: accepted tokens of All Small, by kind of prompt, and time a step.

The target's own answers to the prompts of stage=evaluate are known, so no model drafts or verifies
here. With Arctic Inference installed (its suffix decoding cache, arXiv 2411.04975), that one is
measured beside, with one drafted tree a round, as it works::

    python -m benchmarks.suffix [OVERRIDES]
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipeline.engine import drafting_config, open_pair
from pipeline.report import table
from pipeline.run import CONF
from pipeline.small import small_drafter
from pipeline.tasks import load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import Context, DraftingConfig, DraftTree
from treegraft_core.drafting import accepted_path, prune, small_step
from treegraft_core.small import NGRAM

BUDGETS = (7, 63)
Drafted = Callable[[Text, int], tuple[list[int], float]]
"""A at each of `BUDGETS` with the token at a position as the root, and µs a drafting step."""


def by_rounds(text_of: Callable[[Text], Context], config: DraftingConfig) -> Drafted:
    """Return how one of this project's drafters does in a round of small steps."""

    def drafted(text: Text, root: int) -> tuple[list[int], float]:
        context, length = text_of(text), root + 1
        tree, frontier = DraftTree.from_root(text.tokens[root]), np.zeros(1, np.int64)
        started = time.perf_counter()
        for step in range(1, config.depth + 1):
            frontier = small_step(tree, frontier, context, step, config, length).frontier
        us = 1e6 * (time.perf_counter() - started) / config.depth
        known = text.tokens[length:]
        kept = [prune(tree, replace(config, verify_nodes=n)) for n in BUDGETS]
        return [len(accepted_path(tree, nodes, known)[0]) for nodes in kept], us

    return drafted


def by_arctic(library: Any, corpus: Sequence[Sequence[int]], depth: int) -> Drafted:
    """Return how Arctic's cache does; it reads a text from left to right."""
    cache = library.SuffixDecodingCache(max_tree_depth=64)
    for i, answer in enumerate(corpus):
        cache.start_request(("corpus", i), [])
        cache.add_active_response(("corpus", i), list(answer))
        cache.stop_request(("corpus", i))
    at: dict[str, Any] = {}

    def drafted(text: Text, root: int) -> tuple[list[int], float]:
        name = f"{text.task}/{text.prompt_id}/{text.turn}"
        if at.get("name") != name:
            if "name" in at:
                cache.stop_request(at["name"])
                cache.evict_cached_response(at["name"])
            cache.start_request(name, text.tokens[: text.prompt_tokens])
            at.update(name=name, end=text.prompt_tokens)
        cache.add_active_response(name, text.tokens[at["end"] : root + 1])
        at["end"] = root + 1
        accepted, spent = [], 0.0
        for most in BUDGETS:
            started = time.perf_counter()
            draft = cache.speculate(
                name,
                text.tokens[max(0, root - 63) : root + 1],
                max_spec_tokens=most,
                max_spec_factor=4.0,
                max_spec_offset=4.0,
                min_token_prob=0.0,
                use_tree_spec=True,
            )
            spent += time.perf_counter() - started
            children = {
                (parent, token): i
                for i, (token, parent) in enumerate(
                    zip(draft.token_ids, draft.parents, strict=True)
                )
            }
            node, n = -1, 0
            for token in text.tokens[root + 1 :]:
                if (node, token) not in children:
                    break
                node, n = children[node, token], n + 1
            accepted.append(n)
        return accepted, 1e6 * spent / len(BUDGETS) / depth

    return drafted


def measure(name: str, drafted: Drafted, texts: Sequence[Text]) -> dict[str, Any]:
    """Return one row: mean A by kind at each budget, and the median time a step."""
    accepted: dict[str, list[list[int]]] = defaultdict(list)
    times = []
    for text in texts:
        for root in text.roots():
            found, us = drafted(text, root)
            accepted[text.task].append(found)
            times.append(us)
    row: dict[str, Any] = {"small drafter": name}
    for task, values in sorted(accepted.items()):
        row[task] = " / ".join(f"{a:.2f}" for a in np.mean(values, axis=0))
    every = [a for values in accepted.values() for a in values]
    row["all"] = " / ".join(f"{a:.2f}" for a in np.mean(every, axis=0))
    return row | {"µs a step": f"{np.median(times):.0f}"}


def contexts(config: DraftingConfig) -> Callable[[Text], Context]:
    """Return a function from a text to its context, the last one kept."""
    kept: dict[str, Any] = {}

    def context_of(text: Text) -> Context:
        if kept.get("text") is not text:
            kept.update(text=text, context=text.context(config.max_ngram))
        found: Context = kept["context"]
        return found

    return context_of


def composed(small: str, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with another small drafter."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=["stage=evaluate", f"small={small}", *overrides])


def run(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Measure all small drafters on the configured prompts."""
    conf = composed("suffix_corpus", overrides)
    pair, widest = open_pair(conf), drafting_config(conf)
    prompts = load_prompts(conf, "evaluate", int(conf.evaluate.prompts_per_task))
    texts, _ = greedy_texts(
        pair,
        prompts,
        int(conf.evaluate.max_new_tokens),
        int(conf.collect.batch),
        widest,
        Path(conf.paths.cache) / "texts",
    )
    kinds = {
        "n-grams": replace(widest, small=NGRAM),
        "n-grams, n_max = 12": replace(widest, small=NGRAM, max_ngram=12),
        "suffix": replace(widest, small=small_drafter(composed("suffix", overrides))),
        "suffix, corpus": widest,
    }
    rows = [
        measure(name, by_rounds(contexts(config), config), texts) for name, config in kinds.items()
    ]
    try:
        library = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError:
        print("note: arctic_inference is not installed: left out")
        return rows
    corpus = small_drafter(conf).corpus.texts()  # type: ignore[attr-defined]
    for name, answers in (("Arctic", []), ("Arctic, corpus", corpus)):
        rows.append(measure(name, by_arctic(library, answers, widest.depth), texts))
    return rows


if __name__ == "__main__":
    print(table(run(sys.argv[1:]), "A of All Small at B_ver = 7 / 63"))
