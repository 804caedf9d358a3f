"""The only entry point: ``python -m pipeline.run stage=NAME [overrides]``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from treegraft_core import InputError

CONF = Path(__file__).resolve().parent.parent / "conf"
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130
MANY = 10**9
RANGES = {
    "seed": (0, 2**32 - 1),
    "drafting.depth": (1, 12),
    "drafting.width": (1, MANY),
    "drafting.verify_nodes": (1, MANY),
    "drafting.max_ngram": (1, 64),
    "profile.repeats": (1, MANY),
    "profile.warmup_prompts": (1, MANY),
    "profile.warmup_tokens": (2, MANY),
    "collect.max_new_tokens": (2, MANY),
    "collect.states_per_turn": (0, MANY),
    "collect.prompts_per_task": (0, MANY),
    "collect.batch": (1, MANY),
    "collect.memory_gb": (0.001, MANY),
    "collect.pack": (0, MANY),
    "collect.replay_rounds": (0, MANY),
    "select.signals": (1, 10),
    "select.folds": (2, MANY),
    "select.states": (0, MANY),
    "select.seeds": (1, MANY),
    "hardware.profiles": (0, MANY),
    "hardware.logged_share": (0, 1),
    "value.ensemble": (1, MANY),
    "value.block_states": (1, MANY),
    "label.block_states": (1, MANY),
    "label.settings_per_state": (1, MANY),
    "distill.block_states": (1, MANY),
    "distill.rollout_epochs": (0, MANY),
    "distill.label_noise": (0, MANY),
    "distill.prompt_noise": (0, MANY),
    "evaluate.prompts_per_task": (0, MANY),
    "evaluate.max_new_tokens": (2, MANY),
    "evaluate.decode_prompts_per_task": (0, MANY),
    "evaluate.warmup_prompts": (1, MANY),
    "evaluate.warmup_tokens": (2, MANY),
    "evaluate.bootstrap": (20, MANY),
    "check.states": (0, MANY),
    "check.prompts_per_task": (0, MANY),
    "check.max_new_tokens": (2, MANY),
    "check.lossless_tokens": (0, MANY),
}
"""Least and most of the numbers that a user sets; the schedules are 2^D, hence depth's limit."""


def config_error(error: BaseException) -> str:
    """Turn a Hydra error into one line that names the key or the choice."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.partition("/")
        options = ", ".join(sorted(error.options or []))
        return f"{group}={choice}: no such choice; choose one of {options}"
    if "Could not override '" in text or ("is not in struct" in text and "'" in text):
        return unknown_key(text.split("'")[1])
    if "You must specify 'stage'" in text:
        return f"stage: missing; give one, such as stage=collect ({text.partition('options: ')[2]})"
    return text.split(" See https://")[0][:300]


def unknown_key(key: str) -> str:
    """Return the line for a key that the configuration does not have."""
    return f"{key}: no such config key; --cfg job prints the keys that exist"


def check_config(overrides: list[str]) -> None:
    """Compose the configuration once, so that mistakes in it give one line.

    Raises
    ------
    InputError
        If a key is missing, unknown (also one appended with ``+``, which nothing would read), or
        of another type than its default.
    """
    plain = [o for o in overrides if not o.startswith("-")]
    for o in plain:
        if o.startswith("+") and not o.startswith("+experiment="):
            raise InputError(unknown_key(o.lstrip("+").partition("=")[0]))
    if {"-m", "--multirun"} & set(overrides):
        return  # a sweep's values are lists of choices; each job is composed by Hydra itself
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="check"):
        conf = compose("config", overrides=plain)
        groups = [o for o in plain if (CONF / o.lstrip("+").partition("=")[0]).is_dir()]
        defaults = compose("config", overrides=groups)
        missing = sorted(OmegaConf.missing_keys(conf))
        if missing:
            raise InputError(f"{missing[0]}: missing; give it on the command line")
        check_types(conf, defaults, "")
        check_ranges(conf)
        OmegaConf.to_container(conf, resolve=True)


def check_ranges(conf: DictConfig) -> None:
    """Check the numbers that would fail late, after work was done."""
    for name, (low, high) in RANGES.items():
        value = OmegaConf.select(conf, name)
        if not low <= value <= high:
            raise InputError(f"{name}={value}: must be from {low} to {high}")


def check_types(conf: DictConfig, defaults: DictConfig, prefix: str) -> None:
    """Compare the type of every value with that of its default."""
    for name in map(str, conf):
        if OmegaConf.is_missing(defaults, name) or OmegaConf.is_interpolation(defaults, name):
            continue
        value, default = conf[name], defaults[name]
        if isinstance(default, DictConfig) and isinstance(value, DictConfig):
            check_types(value, default, f"{prefix}{name}.")
            continue
        allowed = {kind(default)}
        if isinstance(default, float):
            allowed.add(kind(1))
        if default is not None and kind(value) not in allowed:
            raise InputError(f"{prefix}{name}={value}: must be {kind(default)}, such as {default}")


def kind(value: object) -> str:
    """Return what a value is, in words."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        type(None): "nothing",
        ListConfig: "a list",
        DictConfig: "a group",
    }
    return names.get(type(value), type(value).__name__)


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run(conf: DictConfig) -> None:
    """Run the stage that ``conf.stage`` names."""
    try:
        hydra.utils.get_method(conf.stage.run._target_)(conf)
    except InputError as error:
        raise SystemExit(fail(str(error))) from error
    except KeyboardInterrupt:
        print("\nstopped; what was written stays", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED_STATUS) from None
    except OSError as error:
        if error.filename is None:
            raise
        raise SystemExit(
            fail(f"{error.filename}: {error.strerror}; check the path and its permissions")
        ) from error


def fail(message: str) -> int:
    """Print one line to stderr and return the status of a usage error."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return USAGE_STATUS


def main() -> int:
    """Run the command line; return the exit status."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    arguments = sys.argv[1:]
    if not {"--help", "-h", "--cfg", "--hydra-help", "--info"} & set(arguments):
        try:
            check_config(arguments)
        except InputError as error:
            return fail(str(error))
        except (HydraException, OmegaConfBaseException) as error:
            return fail(config_error(error))
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
