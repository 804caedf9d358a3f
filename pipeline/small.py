"""The configured small drafter, and the texts it may look up suffixes in."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file

from treegraft_core import InputError
from treegraft_core.pair import load_tokenizer, resolve_path
from treegraft_core.small import NGRAM, SmallDrafter
from treegraft_core.suffix import SuffixDrafter

CORPUS = (
    "give a .safetensors file of stage=corpus, a .jsonl file with text or turns, or a .txt file"
)


def small_drafter(conf: DictConfig) -> SmallDrafter:
    """Return the drafter that ``small`` configures.

    Raises
    ------
    InputError
        If there is none of that name, or its corpus or its code cannot be read.
    """
    values: Any = OmegaConf.to_container(conf.small, resolve=True)
    name = values.pop("name")
    if name == "ngram":
        return NGRAM
    if name == "suffix":
        path = values.pop("corpus")
        corpus = read_corpus(conf, Path(path)) if path is not None else []
        return SuffixDrafter(corpus=corpus, **values)
    if name == "python":
        return own_drafter(str(conf.small.drafter), values["settings"], values["trust_python"])
    raise InputError(f"small.name={name}: choose small=ngram, small=suffix or small=python")


def own_drafter(spec: str, settings: dict[str, Any], trusted: bool) -> SmallDrafter:
    """Return the drafter of ``package.module:Class``; import it only if trusted."""
    if not trusted:
        raise InputError(
            f"small.drafter={spec}: imports and runs that module; set small.trust_python=true if "
            "you trust it"
        )
    module, _, attribute = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)(**settings)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(
            f"small.drafter={spec}: {error}; give package.module:Class, importable from here, and "
            "its arguments as small.settings"
        ) from error
    if not isinstance(found, SmallDrafter):
        raise InputError(f"small.drafter={spec}: is no treegraft_core.SmallDrafter; derive it")
    return found


def read_corpus(conf: DictConfig, path: Path) -> list[list[int]]:
    """Return the texts of a corpus as token ids of the target's tokenizer."""
    if not path.is_file():
        raise InputError(f"small.corpus={path}: no such file; {CORPUS}")
    target = resolve_path(str(conf.pair.target.path), Path(conf.paths.cache) / "models")
    trusted = bool(conf.engine.trust_remote_code)
    return _read_corpus(path, path.stat().st_mtime_ns, target, trusted)


@lru_cache(maxsize=2)
def _read_corpus(path: Path, changed: int, target: str, trusted: bool) -> list[list[int]]:
    if path.suffix == ".safetensors":
        return read_tokens(path)
    tokenizer = load_tokenizer(target, "target", trusted)
    texts = read_texts(path)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def read_tokens(path: Path) -> list[list[int]]:
    """Return the texts of a file of stage=corpus."""
    try:
        found = load_file(path)
        parts = found["tokens"].split(found["length"].tolist())
        texts = [part.tolist() for part in parts]
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"small.corpus={path}: not a corpus ({str(error)[:120]}); {CORPUS}"
        ) from error
    if any(text and min(text) < 0 for text in texts):
        raise InputError(f"small.corpus={path}: holds negative token ids; make it again")
    return texts


def read_texts(path: Path) -> list[str]:
    """Return the texts of a .jsonl or .txt file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"small.corpus={path}: not UTF-8 text ({error.reason})") from error
    if path.suffix == ".txt":
        return [text]
    if path.suffix != ".jsonl":
        raise InputError(f"small.corpus={path}: unknown kind of file; {CORPUS}")
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            parts = row["turns"] if "turns" in row else [row["text"]]
            found += [str(part) for part in parts]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"small.corpus={path}, line {number}: no JSON object with text or turns "
                f"({type(error).__name__})"
            ) from error
    return found
