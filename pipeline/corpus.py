"""stage=corpus: the target's own answers to the training prompts, for the suffix drafter.

The answers are those that the mid drafters are trained on (stage=drafter), generated if they are
not there yet; no prompt of collect or evaluate is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from pipeline.drafter import read_train_prompts
from pipeline.report import stage_run
from pipeline.sequences import Sequences, generate, generations_key
from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path
from treegraft_core.pair import eos_tokens, load_target


def answers(data: Sequences) -> list[Tensor]:
    """Return the answers alone, without their prompts."""
    pairs = zip(data.tokens, data.prompt_length, strict=True)
    return [tokens[prompt:] for tokens, prompt in pairs]


def save_corpus(path: Path, texts: Sequence[Tensor]) -> None:
    """Write texts as safetensors: ``tokens`` (int32, one after the other) and ``length``."""
    tensors = {
        "tokens": torch.cat(list(texts)).to(torch.int32),
        "length": torch.tensor([len(text) for text in texts], dtype=torch.int32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def run(conf: DictConfig) -> None:
    """Write the corpus of the configured target to ``paths.corpus``."""
    path, recipe = Path(conf.paths.corpus), conf.drafter
    if path.suffix != ".safetensors":
        raise InputError(f"paths.corpus={path}: must end in .safetensors")
    prompts = read_train_prompts(conf)
    with stage_run(conf, "corpus", path.parent) as stage:
        stage.read(recipe.prompts, f"{len(prompts)} prompts")
        target, tokenizer = load_target(
            str(conf.pair.target.path),
            str(conf.engine.device),
            "float32",
            Path(conf.paths.cache) / "models",
            bool(conf.engine.trust_remote_code),
        )
        key = generations_key(recipe, prompts, str(conf.pair.target.path), target, tokenizer)
        folder = Path(conf.paths.cache) / "drafter" / f"generations-{key}"
        eos = set(eos_tokens(target, tokenizer))
        texts = answers(generate(target, tokenizer, prompts, eos, folder, recipe)[1])
        save_corpus(path, texts)
        stage.metrics |= {"texts": len(texts), "tokens": sum(len(text) for text in texts)}
        stage.wrote(path)
