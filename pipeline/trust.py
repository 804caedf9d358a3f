"""What a configuration may name: a stage of this project, nothing else that runs.

A configuration can come from someone else (``--config-dir``). Hydra imports and calls what
``_target_``, a logging class or a callback names, so every composed configuration passes
`check_trust` before Hydra instantiates anything of it, those of a sweep's jobs included.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from treegraft_core import InputError

STAGE = re.compile(r"pipeline\.[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
PLUGIN = re.compile(r"(hydra\._internal\.core_plugins|hydra_plugins)(\.[A-Za-z]\w*)+")
"""Hydra itself takes only classes of its plugins that are installed."""
RESOLVERS = {"hydra", "now", "oc.env", "oc.select"}
"""Not ``oc.create`` and ``oc.decode``: they make groups from texts, out of sight of the checks."""
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
LOG_CLASSES = {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler"}
LOG_STREAMS = {"ext://sys.stdout", "ext://sys.stderr"}
LOG_FILE = re.compile(
    r"(\$\{hydra\.runtime\.output_dir\}/|hydra-)?(\$\{hydra\.job\.name\}|[\w.-]+)\.log"
)
COMMANDS = (
    "hydra.job.env_set",
    "hydra.launcher.setup",
    "hydra.launcher.python",
    "hydra.launcher.srun_args",
    "hydra.launcher.additional_parameters",
)
"""Environment and shell commands: from the command line only, whose author runs them anyway."""
MOST_FILES, MOST_BYTES, MOST_NODES, MOST_DEPTH = 500, 200_000, 100_000, 50


def stage_function(target: str) -> Callable[[DictConfig], None]:
    """Return the stage function that ``stage.run._target_`` names.

    Raises
    ------
    InputError
        If it is not a function that a module of ``pipeline`` defines.
    """
    check_target("stage.run._target_", target)
    module, _, name = target.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise refused("stage.run._target_", target) from error
    if not inspect.isfunction(function) or function.__module__ != module:
        raise refused("stage.run._target_", target)  # such as a module that it imports
    found: Callable[[DictConfig], None] = function
    return found


def check_target(key: str, target: Any) -> None:
    """Raise unless ``target`` has the form of a stage's name."""
    if not isinstance(target, str) or not STAGE.fullmatch(target):
        raise refused(key, target)


def refused(key: str, target: Any) -> InputError:
    """Return the error for a name that may not be called."""
    return InputError(
        f"{key}={str(target)[:200]}: would run code that is no stage of this project; give "
        "pipeline.MODULE.FUNCTION, as in conf/stage"
    )


def check_trust(conf: DictConfig) -> None:
    """Check a composed configuration before anything of it is called.

    Parameters
    ----------
    conf : DictConfig
        With Hydra's own node ``hydra``, if it has one; need not resolve yet.

    Raises
    ------
    InputError
        If something in it would run code, set the environment, or cannot be checked.
    """
    plain = OmegaConf.to_container(conf, resolve=False)
    assert isinstance(plain, dict)
    own = plain.pop("hydra", None)
    for key, value in walk(plain, "", 0):
        if key.rpartition(".")[2] == "_target_":
            check_target(key, value)
    if own is not None:
        check_hydra(own)


def check_hydra(own: Any) -> None:
    """Check Hydra's own node: plugins, callbacks, logging, sweeps, environment."""
    if not isinstance(own, dict):
        raise InputError("hydra: must be a group; leave it to the project's config.yaml")
    for key, value in walk(own, "hydra.", 1):
        if key.rpartition(".")[2] != "_target_":
            continue
        plugin = key in ("hydra.launcher._target_", "hydra.sweeper._target_")
        if not plugin or not isinstance(value, str) or not PLUGIN.fullmatch(value):
            raise InputError(f"{key}={str(value)[:200]}: only installed plugins of Hydra may run")
    if own.get("callbacks"):
        raise InputError("hydra.callbacks: would run code; leave it empty")
    if own.get("output_subdir"):
        raise InputError(
            "hydra.output_subdir: Hydra would save the config with its secrets; leave it null, "
            "provenance.json holds the config without them"
        )
    if own.get("searchpath"):
        raise InputError("hydra.searchpath: not supported; give --config-dir DIR")
    for name in ("job_logging", "hydra_logging"):
        check_logging(own.get(name), f"hydra.{name}")
    sweeper = own.get("sweeper")
    params = sweeper.get("params") if isinstance(sweeper, dict) else None
    if not isinstance(sweeper, dict) or not (params is None or isinstance(params, dict)):
        raise InputError("hydra.sweeper: must be a group; choose hydra/sweeper=basic")
    for key in params or {}:
        if str(key).lstrip("+~ ").startswith("hydra"):
            raise InputError(f"hydra.sweeper.params.{key}: a sweep goes over the project's keys")
    if not isinstance(own.get("launcher"), dict):
        raise InputError("hydra.launcher: must be a group; choose hydra/launcher=basic")
    name = select(own, ["job", "name"])
    if name is not None and not re.fullmatch(r"[\w.-]+", str(name)):
        raise InputError(f"hydra.job.name={name}: use letters, digits, dots, dashes, underscores")
    given = [str(line).lstrip("+") for line in (own.get("overrides") or {}).get("hydra") or []]
    for key in COMMANDS:
        if select(own, key.split(".")[1:]) and not any(g.startswith(key) for g in given):
            raise InputError(
                f"{key}: runs commands or sets the environment; give it yourself, "
                "on the command line"
            )


def check_logging(node: Any, key: str) -> None:
    """Check what `logging.config.dictConfig` would import, call or write."""
    if node is None:
        return
    if not isinstance(node, dict):
        raise InputError(f"{key}: must be a group; choose stdout, default, none or disabled")
    for path, value in walk(node, f"{key}.", 1):
        name = path.rpartition(".")[2]
        text = value if isinstance(value, str) else ""
        if name == "class":
            fine = text in LOG_CLASSES
        elif name == "filename":
            fine = LOG_FILE.fullmatch(text) is not None
        else:
            fine = text in LOG_STREAMS or not ("://" in text or "${" in text)
        if not fine or name in ("()", "") or path.endswith(".()"):
            raise InputError(
                f"{path}={str(value)[:200]}: not allowed in logging; only levels, formats, the "
                "console and a file in the job's folder are"
            )


def select(node: Any, path: list[str]) -> Any:
    """Return a value in nested dicts; None if it is not there."""
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def walk(node: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of everything that is no container; check interpolations.

    The value of a ``_target_``, a ``()`` or a ``class`` is yielded whatever it is.
    """
    if depth > MOST_DEPTH:
        raise InputError(f"{prefix[:200]}: more than {MOST_DEPTH} groups in each other")
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in items:
        key = f"{prefix}{name}"
        if isinstance(value, (dict, list)):
            if name in ("_target_", "()", "class"):
                yield key, value
            yield from walk(value, f"{key}.", depth + 1)
            continue
        if isinstance(value, str) and "${" in value:
            check_interpolation(key, value)
        yield key, value


def check_interpolation(key: str, text: str) -> None:
    """Raise if ``text`` calls a resolver that could hide what it returns."""
    rest = text
    while found := INNERMOST.search(rest):
        name, colon, _ = found[1].partition(":")
        if colon and name.strip() not in RESOLVERS:
            raise InputError(
                f"{key}={text[:200]}: ${{{name.strip()}:…}} is not supported; write the value, "
                f"or use one of {', '.join(sorted(RESOLVERS))}"
            )
        rest = rest[: found.start()] + "x" + rest[found.end() :]
    if "${" in rest:
        raise InputError(f"{key}={text[:200]}: braces that do not close or are quoted")


def check_folder(folder: Path) -> None:
    """Check the files of ``--config-dir`` before Hydra reads any.

    Raises
    ------
    InputError
        If there is no such folder, it has settings of Hydra's own, or a file is not YAML or too
        large to expand.
    """
    flag = f"--config-dir={folder}"
    if not folder.is_dir():
        raise InputError(f"{flag}: no such folder; give one laid out like conf/")
    if (folder / "hydra").exists():
        raise InputError(f"{flag}: has Hydra's own group hydra; give those on the command line")
    count = 0
    for home, _, names in os.walk(folder):
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise InputError(
                    f"{flag}: holds more than {MOST_FILES} files; give a folder of configs only"
                )
            if name.endswith((".yaml", ".yml")):
                check_yaml(Path(home) / name)


def check_yaml(path: Path) -> None:
    """Raise `InputError` if a file is not YAML or grows too large when its anchors expand."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path}: not a file of at most {MOST_BYTES:,} bytes; make it smaller")
    try:
        text = path.read_text(encoding="utf-8")
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            expanded(document, {}, 0)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{path}: not a configuration ({reason[0][:160]}); repair it") from error


def expanded(node: Any, sizes: dict[int, int], depth: int) -> int:
    """Return how many nodes a YAML node stands for, aliases counted each time."""
    if depth > MOST_DEPTH:
        raise ValueError(f"more than {MOST_DEPTH} groups in each other")
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = MOST_NODES + 1  # until it is known: an anchor inside itself never ends
    parts = node.value
    if isinstance(node, yaml.MappingNode):
        parts = [each for pair in node.value for each in pair]
    size = 1 + sum(expanded(part, sizes, depth + 1) for part in parts)
    if size > MOST_NODES:
        raise ValueError(f"its anchors expand to more than {MOST_NODES:,} values")
    sizes[id(node)] = size
    return size
