"""The only entry point: ``python -m pipeline.run stage=NAME [overrides]``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from treegraft_core import InputError

CONF = Path(__file__).resolve().parent.parent / "conf"
USAGE_STATUS = 2


def one_line(error: BaseException) -> str:
    """Return the first informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def config_error(error: BaseException) -> str:
    """Turn a Hydra error into one line that names the key or the choice."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text.replace(
        "See https://hydra.cc/docs/1.2/upgrades/1.0_to_1.1/automatic_schema_matching for migration instructions.",
        "",
    )
    if "Could not find" in text and "Available options" in text:
        head, _, options = text.partition("Available options")
        name = head.split("'")[1] if "'" in head else head
        group, _, choice = name.partition("/")
        listed = ", ".join(
            o.strip()
            for o in options.split(":", 1)[1].split("Config search")[0].split()
            if o.strip()
        )
        return f"{group}={choice}: no such choice; choose one of {listed.replace(',,', ',')}"
    if "is not in struct" in text and "Could not override" in text:
        key = text.split("'")[1]
        return f"{key}: no such config key; run with --cfg job to see the keys that exist"
    return text[:300]


def check_config(overrides: list[str]) -> None:
    """Compose the configuration once, so that mistakes in it give one line."""
    plain = [o for o in overrides if not o.startswith("-")]
    if any("," in o.partition("=")[2] and "[" not in o for o in plain) and {
        "-m",
        "--multirun",
    } & set(overrides):
        return
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="check"):
        conf = compose("config", overrides=plain)
        missing = sorted(OmegaConf.missing_keys(conf))
        if missing:
            raise InputError(
                f"{missing[0]}: missing; give it on the command line, such as stage=collect"
            )
        OmegaConf.to_container(conf, resolve=True)


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run(conf: DictConfig) -> None:
    """Run the stage that ``conf.stage`` names."""
    try:
        hydra.utils.call(conf.stage.run, conf, _recursive_=False)
    except InputError as error:
        raise SystemExit(fail(str(error))) from error


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
