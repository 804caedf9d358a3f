"""``make bench``: shared enumeration against running each schedule alone, and a round's overhead.

Machines are shared and noisy, so nothing here asserts a time: it prints ratios, medians of
repeats timed alternately in one process, with their spread, and writes them as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir

from pipeline.collect import enumerate_text
from pipeline.engine import drafting_config, open_pair
from pipeline.evaluate import schedule_bits
from pipeline.report import git_sha, machine, table
from pipeline.run import CONF, fail
from pipeline.tasks import load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import (
    Context,
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    TreeGraftDecoder,
)
from treegraft_core.files import write_json
from treegraft_core.models import CachedModel


def alone(pair: Pair, text: Text, root: int, config: DraftingConfig) -> list[int]:
    """Run each of the 2^D schedules alone through the decoder; return their A."""
    decoder = TreeGraftDecoder(pair, FixedSchedule([0] * config.depth), config, log_signals=True)
    start = decoder.resume(text.tokens[: root + 1])
    accepted = []
    for number in range(1 << config.depth):
        decoder.scheduler = FixedSchedule(schedule_bits(number, config.depth))
        decoder.rewind(root)
        context = Context(start.tokens[: root + 1], start.log_p[: root + 1], config.max_ngram)
        accepted.append(decoder.round(context, text.prompt_tokens)[0].accepted)
    return accepted


def timed(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    """Return wall time in ms and the result."""
    started = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - started), result


def main() -> int:
    """Time both ways on the same states; fail if an A differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=5, help="decoding states, at least 5")
    parser.add_argument("--out", type=Path, default=Path("data/bench/collect.json"))
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as engine=float32")
    arguments = parser.parse_args()
    try:
        if arguments.states < 5:
            raise InputError(f"--states={arguments.states}: must be at least 5")
        with initialize_config_dir(str(CONF), version_base="1.3"):
            conf = compose("config", ["stage=collect", *arguments.overrides])
        config = drafting_config(conf)
        pair = open_pair(conf)
        prompts = load_prompts(conf, "collect", 1)
        texts, _ = greedy_texts(pair, prompts, 32, 8, config)
        rows = measure(pair, [t for t in texts if len(t.roots())], config, arguments.states)
    except InputError as error:
        return fail(str(error))
    ratios = np.array([row["alone ms"] / row["shared ms"] for row in rows])
    low, median, high = np.percentile(ratios, [25, 50, 75])
    print(table(rows, "one state, all schedules: each alone in the decoder, and shared"))
    print(f"alone / shared: median {median:.1f}, quartiles {low:.1f} … {high:.1f}")
    write_json(
        arguments.out,
        {
            "rows": rows,
            "alone_over_shared": {"median": median, "q25": low, "q75": high},
            "machine": machine(),
            "git_sha": git_sha(),
        },
    )
    return 0


def measure(pair: Pair, texts: list[Text], config: DraftingConfig, states: int) -> list[dict]:
    """Time ``states`` states both ways, alternately."""
    model = CachedModel(pair.mid)
    rows = []
    for i in range(states):
        text = texts[i % len(texts)]
        root = text.roots()[(7 * i) % len(text.roots())]
        alone_ms, expected = timed(lambda text=text, root=root: alone(pair, text, root, config))
        shared_ms, found = timed(
            lambda text=text, root=root: [
                o.accepted for o in enumerate_text(pair, model, text, [root], config, 1)[0][0]
            ]
        )
        if found != expected:
            raise InputError(f"state {text.task}/{root}: A differs: {expected} and {found}")
        rows.append({"state": f"{text.task}/{root}", "alone ms": alone_ms, "shared ms": shared_ms})
    return rows


if __name__ == "__main__":
    sys.exit(main())
