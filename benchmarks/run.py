"""``make bench``: what the parts cost, as ratios of things timed alternately in one process.

Machines are shared and noisy, so nothing here asserts a time. Exit status 1 means that records
differ or that memory exceeds its budget, 2 that the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from transformers.utils import logging as transformers_logging

from benchmarks import collect, decode, growth, overhead
from benchmarks.timing import Measured
from pipeline.command import check_config, config_error
from pipeline.run import CONF, fail
from treegraft_core import InputError

BENCHMARKS: dict[str, Callable[[DictConfig, int | None, int], Measured]] = {
    "collect": collect.run,
    "growth": growth.run,
    "overhead": overhead.run,
    "decode": decode.run,
}
FEWEST_REPEATS = 5
DEFAULTS = ("stage=collect", "engine=float32")
"""In float32 records and outputs are comparable; an override may say otherwise."""


class Parser(argparse.ArgumentParser):
    """Argument errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` prints."""
        raise InputError(f"{message}; see python -m benchmarks.run --help")


def parse(arguments: Sequence[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Return the names of the benchmarks, the Hydra overrides, and the options."""
    parser = Parser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="collect|growth|overhead|decode|all",
        help="what to measure (default all), and Hydra overrides such as drafting=cpu",
    )
    parser.add_argument("--states", type=int, help="states of a text (collect) or a row (growth)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=FEWEST_REPEATS,
        help="repeats of every time, and prompts of each kind to decode; at least 5",
    )
    parser.add_argument("--out", type=Path, default=Path("data/bench"), help="folder of the JSON")
    options = parser.parse_intermixed_args(arguments)
    names = [word for word in options.words if "=" not in word] or ["all"]
    overrides = [word for word in options.words if "=" in word]
    for name in names:
        if name not in (*BENCHMARKS, "all"):
            raise InputError(
                f"benchmark={name}: choose one of {', '.join(BENCHMARKS)}, all; "
                "Hydra overrides are key=value"
            )
    if options.states is not None and options.states < 1:
        raise InputError(f"--states={options.states}: must be at least 1")
    if options.repeats < FEWEST_REPEATS:
        raise InputError(f"--repeats={options.repeats}: must be at least {FEWEST_REPEATS}")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out={options.out}: is a file; give a folder")
    return list(BENCHMARKS) if "all" in names else names, overrides, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        names, overrides, options = parse(words)
        check_config([*DEFAULTS, *overrides])
        with initialize_config_dir(str(CONF), version_base="1.3"):
            conf = compose("config", [*DEFAULTS, *overrides])
        if "decode" in names:
            decode.check(conf)
        status = 0
        for name in names:
            print(
                f"\n== {name}: pair {conf.pair.name}, {conf.engine.dtype}, {torch.__version__} =="
            )
            done = BENCHMARKS[name](conf, options.states, options.repeats)
            done.show()
            path = options.out / f"{name}.json"
            done.write(path, ["python", "-m", "benchmarks.run", *words])
            print(f"wrote {path}", flush=True)
            status |= bool(done.failures)
    except InputError as error:
        return fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return fail(config_error(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
