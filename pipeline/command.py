"""Composing and checking a configuration, and running the stage that it names."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.run import CONF, closed, fail, interrupted
from pipeline.secrets import redact, redact_logs
from pipeline.trust import check_folder, check_target, check_trust, select, stage_function
from treegraft_core import InputError, StageError
from treegraft_core.files import write_text

FAILED_STATUS = 1
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
    "collect.shards": (1, MANY),
    "collect.failures": (0, 1),
    "engine.threads": (0, MANY),
    "engine.retries": (0, MANY),
    "engine.unit_timeout_s": (0, MANY),
    "verify.states": (0, MANY),
    "status.watch": (0, MANY),
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
    text = text.split(" See https://")[0]
    if isinstance(error, OverrideParseException):
        text = f"{error.override}: not readable as KEY=VALUE; put the value in quotes, KEY='VALUE'"
    return text[:300]


def unknown_key(key: str) -> str:
    """Return the line for a key that the configuration does not have."""
    return f"{key}: no such config key; --cfg job prints the keys that exist"


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader; every configuration that it composes is checked before Hydra uses it.

    A sweep's jobs have configurations of their own, which exist only while it runs.
    """

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """Compose and check; a refusal ends the process with its line."""
        conf = super().load_configuration(*args, **kwargs)
        try:
            check_trust(conf)
        except InputError as error:
            raise SystemExit(fail(str(error))) from error  # Hydra reports other errors itself
        return conf


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """Return the command line as Hydra reads it.

    Raises
    ------
    InputError
        If it is none, or has a flag that would take code or a whole configuration from elsewhere.
    """

    def fault(message: str) -> None:
        raise InputError(f"command line: {message}; give flags first, then every key=value")

    parser = get_args_parser()
    parser.error = fault
    flags: argparse.Namespace = parser.parse_args(arguments)
    if flags.experimental_rerun is not None:
        raise InputError(
            "--experimental-rerun: reads a pickle, which can run code; give the overrides again"
        )
    for name in ("config_path", "config_name"):
        if getattr(flags, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')}={getattr(flags, name)}: the configuration is conf/; "
                "add files with --config-dir DIR and overrides"
            )
    return flags


def parse_overrides(lines: list[str]) -> list[Override]:
    """Return the overrides; raise `InputError` for one that nothing would read."""
    try:
        given: list[Override] = OverridesParser.create().parse_overrides(lines)
    except RecursionError:
        raise InputError("command line: brackets nested too deep; make the value flat") from None
    for o in given:
        key = o.get_key_element().lstrip("+~")
        if key == "hydra.searchpath":
            raise InputError("hydra.searchpath: not supported; give --config-dir DIR")
        if o.is_delete():
            raise InputError(f"~{key}: every key is read; set it to another value instead")
        if (o.is_add() or o.is_force_add()) and key != "experiment":
            raise InputError(unknown_key(key))
    return given


def open_loader(config_dir: str | None) -> ConfigLoaderImpl:
    """Return Hydra's loader of ``conf/`` and, after it, the user's own folder."""
    setup_globals()
    JobRuntime().set("name", "run")
    path = create_config_search_path(str(CONF))
    if config_dir is not None:
        path.prepend(
            provider="command-line",
            path=f"file://{os.path.abspath(config_dir)}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return ConfigLoaderImpl(path)


def load(config_dir: str | None, lines: tuple[str, ...]) -> DictConfig:
    """Compose; with Hydra's own node."""
    return open_loader(config_dir).load_configuration("config", list(lines), RunMode.RUN)


def plain(conf: DictConfig) -> dict[Any, Any]:
    """Return the project's part of a configuration as plain data, interpolations as texts."""
    values = OmegaConf.to_container(conf, resolve=False)
    assert isinstance(values, dict)
    return {key: value for key, value in values.items() if key != "hydra"}


@lru_cache(maxsize=16)
def load_project(lines: tuple[str, ...]) -> tuple[DictConfig, dict[Any, Any]]:
    """As `load`, of ``conf/`` alone, whose files do not change while a process runs."""
    conf = load(None, lines)
    return conf, plain(conf)


@dataclass(frozen=True)
class Composed:
    """A configuration, and what the types of its values are compared with.

    Attributes
    ----------
    conf : DictConfig
        As Hydra will compose it.
    chosen : dict
        The same with the defaults of the choices made.
    project : dict
        The same without experiments and without choices from the user's own folder.
    """

    conf: DictConfig
    chosen: dict[Any, Any]
    project: dict[Any, Any]


def compose(config_dir: str | None, given: list[Override]) -> Composed:
    """Return the configuration of these overrides."""
    groups = open_loader(config_dir).repository
    values = [o for o in given if o.package is None and not groups.group_exists(o.key_or_group)]
    choices = [o for o in given if o not in values]
    lines = tuple(str(o.input_line) for o in choices)
    if config_dir is None:
        loaded, chosen = load_project(lines)
    else:
        loaded = load(config_dir, lines)
        chosen = plain(loaded)
    own = tuple(str(o.input_line) for o in choices if in_project(o))
    if not any(line.startswith("stage=") for line in own):
        own = ("stage=check", *own)
    conf = OmegaConf.merge(loaded)  # a copy
    assert isinstance(conf, DictConfig)
    ConfigLoaderImpl.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=True)
    ConfigLoaderImpl._apply_overrides_to_config(values, conf)
    return Composed(conf, chosen, load_project(own)[1])


def in_project(choice: Override) -> bool:
    """Whether a choice's file is one of ``conf/``, and not an experiment."""
    group, value = choice.key_or_group, choice.value()
    names = value if isinstance(value, list) else [value]
    return group != "experiment" and all(
        isinstance(name, str) and (CONF / group / f"{name}.yaml").is_file() for name in names
    )


def check_config(arguments: list[str]) -> None:
    """Compose the configuration once, so that mistakes in it give one line.

    Parameters
    ----------
    arguments : list of str
        The command line after the module's name.

    Raises
    ------
    InputError
        If a flag is refused, a key is missing, unknown (also one appended with ``+``, which nothing
        would read), or of another type than its default, or something in it would run code.
    """
    flags = parse_flags(arguments)
    if flags.config_dir is not None:
        check_folder(Path(flags.config_dir))
    if flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
        return  # Hydra prints what it composes, by a `CheckedLoader`
    try:
        given = parse_overrides(flags.overrides)
        if flags.multirun:
            return  # a sweep's values are lists of choices; each job is composed by Hydra itself
        composed = compose(flags.config_dir, given)
    except InputError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(config_error(error)) from error
    except Exception as error:  # Hydra, YAML and the disk raise many classes on odd input
        raise InputError(
            f"configuration: cannot be composed ({type(error).__name__}: {str(error)[:200]}); "
            "check the command line and the files of --config-dir"
        ) from error
    try:
        check_composed(composed)
    except OmegaConfBaseException as error:
        raise InputError(config_error(error)) from error
    except RecursionError as error:
        raise InputError("configuration: refers to itself; give the values") from error


def check_composed(composed: Composed) -> None:
    """Check keys, types, ranges and that nothing in a configuration would run code."""
    conf = composed.conf
    check_trust(conf)
    check_target("stage.run._target_", OmegaConf.select(conf, "stage.run._target_"))
    with open_dict(conf):
        del conf["hydra"]
    missing = sorted(OmegaConf.missing_keys(conf))
    if missing:
        raise InputError(f"{missing[0]}: missing; give it on the command line")
    values = OmegaConf.to_container(conf, resolve=True)
    assert isinstance(values, dict)
    check_types(values, composed.chosen, "")
    check_types(values, composed.project, "")
    check_ranges(values)


def check_ranges(values: dict[Any, Any]) -> None:
    """Check the numbers that would fail late, after work was done."""
    for name, (low, high) in RANGES.items():
        value = select(values, name.split("."))
        if type(value) not in (int, float) or not low <= value <= high:
            raise InputError(f"{name}={value}: must be from {low} to {high}")


def check_types(values: dict[Any, Any], defaults: dict[Any, Any], prefix: str) -> None:
    """Compare the type of every value with that of its default."""
    for name, value in values.items():
        default = defaults.get(name)
        if default is None or (isinstance(default, str) and ("${" in default or default == "???")):
            continue  # nothing, what follows from other keys, missing, or of another choice
        if isinstance(default, dict) and isinstance(value, dict):
            check_types(value, default, f"{prefix}{name}.")
            continue
        allowed = {kind(default)}
        if isinstance(default, float):
            allowed.add(kind(1))
        if kind(value) not in allowed:
            raise InputError(f"{prefix}{name}={value}: must be {kind(default)}, such as {default}")


def kind(value: object) -> str:
    """Return what a value is, in words."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        type(None): "nothing",
        list: "a list",
        dict: "a group",
    }
    return names.get(type(value), type(value).__name__)


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run(conf: DictConfig) -> None:
    """Run the stage that ``conf.stage`` names; what it raises becomes a line and a status."""
    redact_logs()  # a sweep's job may begin here, in a process of a launcher
    mask_sweep()
    try:
        stage_function(str(conf.stage.run._target_))(conf)
    except InputError as error:
        raise SystemExit(fail(str(error))) from error
    except StageError as error:
        raise SystemExit(fail(str(error), FAILED_STATUS)) from error
    except KeyboardInterrupt:
        raise SystemExit(interrupted()) from None
    except BrokenPipeError as error:
        raise SystemExit(closed()) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            place = error.filename or "a disk that this stage writes to"
            raise SystemExit(
                fail(f"{place}: no space left; free some and run it again", FAILED_STATUS)
            ) from error
        if error.filename is None:
            raise SystemExit(unexpected()) from error
        raise SystemExit(
            fail(f"{error.filename}: {error.strerror}; check the path and its permissions")
        ) from error
    except Exception as error:
        raise SystemExit(unexpected()) from error


def mask_sweep() -> None:
    """Take secrets out of the file in which Hydra keeps a sweep's configuration."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    path = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if redact(text) != text:
            write_text(path, redact(text))


def unexpected() -> int:
    """Print the traceback of an error that is a fault of this project, without secrets."""
    print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    return FAILED_STATUS


def run_hydra() -> int:
    """Check the command line, then let Hydra compose and run it; return the exit status."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    redact_logs()
    try:
        check_config(sys.argv[1:])
    except InputError as error:
        return fail(str(error))
    hydra_internal.ConfigLoaderImpl = CheckedLoader
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:  # such as of --help without a stage
        return fail(config_error(error))
    return 0
