"""The benchmarks on one GPU, without files or network: random weights in the shapes of real pairs.

Called by ``benchmarks/gpu.sh``. A random target takes almost none of a random drafter's tokens, so
nothing here says what a schedule is worth; passes, bookkeeping and collecting cost what they cost.
Without a GPU the same code runs at tiny sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from benchmarks import collect, overhead
from benchmarks.shapes import flat_profile, random_model, random_text
from benchmarks.timing import Measured, alternate, cell
from pipeline.texts import Text, reach
from treegraft_core import (
    AS_DEFINED,
    Context,
    DraftingConfig,
    Pair,
    TreeGraftDecoder,
    decode_plain,
)
from treegraft_core.models import CachedModel
from treegraft_core.verify import token_log_p

# The one place that names the ways in which passes run; benchmarks/gpu.sh gives each its minutes.
RUNTIMES = {"eager": AS_DEFINED, "compiled": replace(AS_DEFINED, compile=True)}


def sized(
    kind: type[PretrainedConfig], hidden: int, inner: int, layers: int, heads: int,
    kv_heads: int, head: int, vocab: int,
) -> PretrainedConfig:  # fmt: skip
    """Return a config; heads are untied, since a random tied one repeats its input."""
    return kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


REAL = {
    "Qwen3-8B / 0.6B": (
        sized(Qwen3Config, 4096, 12288, 36, 32, 8, 128, 151936),
        sized(Qwen3Config, 1024, 3072, 28, 16, 8, 128, 151936),
    ),
    "Llama-3-8B / 1B": (
        sized(LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128256),
        sized(LlamaConfig, 2048, 8192, 16, 32, 8, 64, 128256),
    ),
}
TINY = {
    "tiny Qwen3": (
        sized(Qwen3Config, 64, 128, 2, 4, 2, 16, 512),
        sized(Qwen3Config, 32, 64, 1, 4, 2, 8, 512),
    ),
    "tiny Llama": (
        sized(LlamaConfig, 64, 128, 2, 4, 2, 16, 512),
        sized(LlamaConfig, 32, 64, 1, 4, 2, 8, 512),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    device: str
    dtype: torch.dtype
    prompt: int
    states: int
    repeats: int
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    drafting: DraftingConfig


LARGE = Sizes("cuda", torch.bfloat16, 256, 8, 5, (64, 511), (256, 2048), DraftingConfig())
SMALL = Sizes("cpu", torch.float32, 24, 2, 1, (16,), (40,), DraftingConfig(3, 4, 15))


def random_pair(name: str, configs: tuple[Any, Any], sizes: Sizes) -> Pair:
    """Create a pair of random models on the device."""
    target, mid = (
        random_model(config, sizes.dtype, sizes.device, seed) for seed, config in enumerate(configs)
    )
    return Pair(name, target, mid, tokenizer=None)  # type: ignore[arg-type]


def greedy_text(pair: Pair, sizes: Sizes) -> Text:
    """Return a random prompt and the target's own greedy continuation."""
    answer = 2 * sizes.states
    prompt, _ = random_text(sizes.prompt, min(pair.target_vocab, 8192))
    new = decode_plain(pair, prompt, answer + reach(sizes.drafting)).tokens
    tokens = [*prompt, *new]
    logits = CachedModel(pair.target).run(tokens, np.arange(len(tokens)))
    log_p = token_log_p(logits[:-1], tokens[1:], sizes.drafting.width)
    return Text("random", pair.name, 0, tokens, len(prompt), answer, [0.0, *log_p])


def measure_rounds(
    pair: Pair, text: Text, sizes: Sizes, runtimes: Sequence[str], schedule: str
) -> Measured:
    """Time rounds of one schedule under each runtime, and plain steps, alternately."""
    config, root = sizes.drafting, text.prompt_tokens
    tokens, log_p = text.tokens[: root + 1], text.log_p[: root + 1]
    plain = CachedModel(pair.target)
    plain.run(tokens[:-1], np.arange(root), rows=np.zeros(0, np.int64))

    def step() -> None:
        plain.keep(root)
        plain.run(tokens[-1:], [root]).argmax().item()

    def one_round(decoder: TreeGraftDecoder) -> None:
        decoder.rewind(root)
        decoder.round(Context(tokens, log_p, config.max_ngram), root)

    calls = {"plain step": step}
    for runtime in runtimes:
        scheduler = overhead.schedules(config.depth)[schedule]
        decoder = TreeGraftDecoder(
            pair, scheduler, config, flat_profile(), runtime=RUNTIMES[runtime]
        )
        decoder.resume(tokens)
        calls[f"round, {runtime} passes"] = partial(one_round, decoder)
    times = alternate(calls, 4 * sizes.repeats)
    rows = [
        {
            "what": name,
            "ms": cell(1e3 * s),
            "a second": float(np.median(1 / s)),
            "plain steps": cell(s / times["plain step"]),
        }
        for name, s in times.items()
    ]
    return Measured({"rounds": rows}, {f"{schedule} at context {root + 1}, {pair.name}": rows})


def measure_pair(pair: Pair, sizes: Sizes, runtime: str) -> Iterator[tuple[str, Measured]]:
    """Measure everything in eager mode; with ``compiled`` only rounds, beside eager ones."""
    text = greedy_text(pair, sizes)
    runtimes = ["eager"] if runtime == "eager" else list(RUNTIMES)
    for schedule in list(overhead.schedules(sizes.drafting.depth))[:3]:
        yield f"rounds {schedule}", measure_rounds(pair, text, sizes, runtimes, schedule)
    if runtime != "eager":
        return
    yield (
        "overhead",
        overhead.measure(pair, sizes.drafting, sizes.repeats, sizes.nodes, sizes.contexts),
    )
    ways = collect.Ways(pair, sizes.drafting)
    yield "collect", collect.measure(ways, [text], sizes.states, sizes.repeats, seed=0)


def main(arguments: list[str] | None = None) -> int:
    """Run on the GPU if there is one; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("runtime", choices=list(RUNTIMES))
    parser.add_argument("--out", type=Path, default=Path("data/bench"))
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    there = torch.cuda.is_available()
    sizes, pairs = (LARGE, REAL) if there else (SMALL, TINY)
    if not there:
        print("no GPU: the same code at tiny sizes on the CPU; its times mean nothing")
        if options.runtime == "compiled":
            print("compiled passes: left out on the CPU, where one shape takes a minute")
            return 0
    everything = Measured()
    path = options.out / f"gpu-{options.runtime}.json"
    for name, configs in pairs.items():
        started = time.monotonic()
        pair = random_pair(name, configs, sizes)
        print(f"\n== {name}: random weights, {sizes.dtype}, {time.monotonic() - started:.1f} s ==")
        for part, done in measure_pair(pair, sizes, options.runtime):
            done.show()
            everything.values.setdefault(name, {})[part] = done.values
            everything.failures += done.failures
            everything.write(path, ["benchmarks/gpu.sh", options.runtime])
        del pair
    print(f"wrote {path}")
    return int(bool(everything.failures))


if __name__ == "__main__":
    sys.exit(main())
