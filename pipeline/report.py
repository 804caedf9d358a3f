"""What every stage leaves beside its output: metrics, provenance, a table, a tracker run."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from pipeline.secrets import redact
from treegraft_core.files import write_json, write_text

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "lightning", "scikit-learn", "pandas", "pyarrow", "numpy")


def git_sha() -> str:
    """Return the commit of the working tree, with ``-dirty`` if it has changes, or ``unknown``."""
    try:
        here = Path(__file__).parent
        sha = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return sha + ("-dirty" if dirty else "")


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Return what a timing depends on: processor, cores, accelerator, threads."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": platform.system(),
    }


def provenance(conf: DictConfig) -> dict[str, Any]:
    """Return where an output came from: commit, versions, machine, config, command line.

    Secrets in the config and on the command line are masked.
    """
    found: dict[str, Any] = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_sha": git_sha(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": machine(),
        "pair": str(conf.pair.name),
        "command": ["python", "-m", "pipeline.run", *sys.argv[1:]],
        "config": OmegaConf.to_container(conf, resolve=True),
    }
    masked: dict[str, Any] = redact(found)
    return masked


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return rows as an aligned text table; floats with four significant digits, no secrets."""
    if not rows:
        return f"{title}\n  (nothing)"
    rows, title = redact(list(rows)), redact(title)
    names = list(rows[0])
    cells = [names] + [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = [
        "  "
        + "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    rule = "  " + "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*([title] if title else []), lines[0], rule, *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def peak_memory_gib() -> float:
    """Return the most resident memory that this process has had, GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if platform.system() == "Darwin" else 1024
    return round(peak * unit / 2**30, 2)


class Stage:
    """One run of a stage: what it read, what it wrote, its figures.

    Parameters
    ----------
    conf : DictConfig
        The composed configuration.
    name : str
        The stage.
    folder : Path
        Where ``metrics.json`` and ``provenance.json`` go.
    """

    def __init__(self, conf: DictConfig, name: str, folder: Path):
        self.conf, self.name, self.folder = conf, name, folder
        self.metrics: dict[str, Any] = {}
        self.tables: list[tuple[str, list[dict[str, Any]]]] = []
        self.figures: dict[str, Path] = {}
        self._read: list[str] = []
        self._wrote: list[str] = []
        self._tracker: Any = None

    def read(self, path: Path | str, what: str = "") -> None:
        """Note an input."""
        self._read.append(redact(f"{path}{f' ({what})' if what else ''}"))

    def wrote(self, path: Path | str, what: str = "") -> None:
        """Note an output."""
        self._wrote.append(redact(f"{path}{f' ({what})' if what else ''}"))

    def write_tables(self) -> None:
        """Write the tables shown so far to ``tables.txt``."""
        path = self.folder / "tables.txt"
        write_text(path, "\n\n".join(table(rows, title) for title, rows in self.tables) + "\n")
        self.wrote(path)

    def show(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a table now and send it to the tracker at the end."""
        self.tables.append((redact(title), [redact(row) for row in rows]))
        print("\n" + table(rows, title), flush=True)

    def picture(self, name: str, path: Path) -> None:
        """Note a picture to send to the tracker."""
        self.figures[name] = path
        self.wrote(path)

    @property
    def tracker(self) -> Any:
        """The W&B run, opened on first use; None when tracking is disabled.

        It is opened late so that a stage that fails on bad input leaves no file behind. W&B's own
        record of the command line, of git and of the console is off, as secrets may be in it;
        the config that is sent is the masked one.
        """
        if self._tracker is None and self.conf.tracker.mode != "disabled":
            import wandb

            os.environ.setdefault("WANDB_SILENT", "true")
            Path(self.conf.tracker.folder).mkdir(parents=True, exist_ok=True)
            self._tracker = wandb.init(
                project=self.conf.tracker.project,
                mode=self.conf.tracker.mode,
                dir=self.conf.tracker.folder,
                job_type=self.name,
                name=f"{self.name}-{self.conf.pair.name}",
                config=dict(provenance(self.conf)["config"]),
                settings=wandb.Settings(
                    x_disable_meta=True, disable_git=True, save_code=False, console="off"
                ),
            )
        return self._tracker

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Send figures to the tracker while the stage runs."""
        if self.tracker is not None:
            self.tracker.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Close the tracker run, if one was opened."""
        if self._tracker is not None:
            self._tracker.finish(exit_code=int(failed))

    def finish(self) -> None:
        """Write metrics and provenance, print what was read and written, close the tracker run."""
        self.metrics = redact(self.metrics)
        write_json(self.folder / "metrics.json", self.metrics)
        write_json(self.folder / "provenance.json", provenance(self.conf))
        self.wrote(self.folder / "metrics.json")
        self.wrote(self.folder / "provenance.json")
        rows = [
            {"figure": k, "value": v}
            for k, v in self.metrics.items()
            if not isinstance(v, (dict, list, tuple))
        ]
        print("\n" + table(rows, f"stage={self.name}"))
        for verb, paths in (("read", self._read), ("wrote", self._wrote)):
            for path in paths:
                print(f"  {verb:5} {path}")
        sys.stdout.flush()
        if self.tracker is not None:
            import wandb

            for title, rows_ in self.tables:
                names = list(rows_[0]) if rows_ else []
                data = [[_plain(row.get(n)) for n in names] for row in rows_]
                self.tracker.log({title: wandb.Table(columns=names, data=data)})
            for name, picture in self.figures.items():
                self.tracker.log({name: wandb.Image(str(picture))})
            self.tracker.summary.update(self.metrics)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


@contextmanager
def stage_run(conf: DictConfig, name: str, folder: Path | str) -> Iterator[Stage]:
    """Open a stage's run; on success write its metrics and provenance."""
    stage = Stage(conf, name, Path(folder))
    print(f"\n== stage={name}  pair={conf.pair.name}  task={conf.task.name} ==", flush=True)
    try:
        started = time.monotonic()
        yield stage
        stage.metrics["seconds"] = round(time.monotonic() - started, 2)
        stage.metrics["peak_memory_gib"] = peak_memory_gib()
        stage.finish()
    except BaseException:
        stage.close(failed=True)
        raise
    stage.close(failed=False)
