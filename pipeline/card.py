"""The card of a dataset of trajectories: what it is, where it comes from, how to open it.

It lies in the dataset's folder as ``_README.md``: with another name, pandas and pyarrow would take
it for a Parquet file when they open the folder. In a repository on the hub it is ``README.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig

from pipeline.columns import MEANINGS
from pipeline.dataset import alone
from pipeline.manifest import Manifest, read_manifest
from pipeline.schema import SCHEMA
from pipeline.secrets import redact
from pipeline.store import Store

CARD = "_README.md"
FILES = "task=*/*.parquet"
MOST_CELL = 160
READERS = """```python
pandas.read_parquet(".", ignore_prefixes=[".", "_", "README"])
polars.read_parquet("task=*/*.parquet", hive_partitioning=True)
duckdb.sql("FROM read_parquet('task=*/*.parquet', hive_partitioning=true)")
datasets.load_dataset("parquet", data_files="task=*/*.parquet", split="train")
```"""


def write_card(conf: DictConfig, store: Store) -> None:
    """Write the card of what is in a dataset now; nothing if it has not begun.

    Of shards that end together, the last to write knows what all have collected.
    """
    with alone(store) if int(conf.collect.shards) > 1 else nullcontext():
        manifest = read_manifest(store)
        if manifest.header is not None:
            store.write(CARD, redact(dataset_card(conf, manifest)).encode())


def dataset_card(conf: DictConfig, manifest: Manifest) -> str:
    """Return the card, Markdown with the hub's front matter.

    Parameters
    ----------
    conf : DictConfig
        Where the paths of the models are from; all else is from the manifest.
    manifest : Manifest
        Of a dataset that has begun.
    """
    header = manifest.header
    assert header is not None, "nothing to write a card of"
    done = [record for record in manifest.units.values() if record["status"] == "done"]
    rows = sum(record["rows"] for record in done)
    front = yaml.safe_dump(front_matter(header["config"], done), sort_keys=False, width=1000)
    parts = [
        f"---\n{front}---",
        f"# TreeGraft trajectories: {_text(header['config'].get('pair.name'))}",
        "Every schedule of two drafters at real decoding states, for "
        "[TreeGraft](https://arxiv.org/abs/2608.26112): one row for each step of each of the 2^D "
        f"schedules at each state. {len(done):,} prompts, {rows:,} rows. It holds ids, counts, "
        "scores and times, no text of prompts or answers.",
        "## Open it",
        READERS,
        "Each in this folder. `task` is the name of a folder: pandas, polars and DuckDB make a "
        "column of it; datasets does not, there `state_id` begins with it, and each task is a "
        "configuration of its own on the hub.",
        "## Where it comes from",
        _table(("", ""), list(provenance(conf, header).items())),
        "## What is in it",
        _table(("task", "prompts", "states", "rows", *MEANS.values()), by_task(done)),
        "A: mean accepted draft tokens a round.",
        "## Columns",
        f"Schema version {header['config'].get('schema_version')}. Times are what the runtime "
        "would have spent, from the latency profile in `_manifest`.",
        _table(("column", "type", "meaning"), columns()),
        "## Publish it",
        "Upload the folder and name this file `README.md` there: "
        f'`HfApi().upload_folder(repo_id=…, repo_type="dataset", folder_path=".", '
        f'allow_patterns="{FILES}")`, then `HfApi().upload_file(repo_id=…, repo_type="dataset", '
        f'path_or_fileobj="{CARD}", path_in_repo="README.md")`. The licence is yours to choose, '
        "within those of the models and of the prompts.",
    ]
    return "\n\n".join(parts) + "\n"


MEANS = {"A small": "A All Small", "A mid": "A All Mid", "A best": "A best schedule"}
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
LARGER = ((10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"))


def front_matter(config: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the hub reads: configurations, features, size."""
    folders = sorted({str(record["file"]).partition("/")[0] for record in done})
    configs = {"default": FILES}
    for folder in folders:
        configs.setdefault(folder.removeprefix("task="), f"{folder}/*.parquet")
    return {
        "pretty_name": f"TreeGraft trajectories of {_text(config.get('pair.name'))}",
        "tags": ["treegraft", "speculative-decoding"],
        "size_categories": [size_category(sum(record["rows"] for record in done))],
        "configs": [
            {"config_name": name, "data_files": [{"split": "train", "path": path}]}
            for name, path in configs.items()
        ],
        "dataset_info": [
            {"config_name": "default", "features": [feature(each) for each in SCHEMA]}
        ],
    }


def size_category(rows: int) -> str:
    """Return the hub's name for so many rows."""
    return next((name for most, name in (*SIZES, *LARGER) if rows < most), "n>1T")


def feature(field: pa.Field) -> dict[str, Any]:
    """Return a column as the hub describes it."""
    if pa.types.is_list(field.type):
        return {"name": field.name, "list": _dtype(field.type.value_type)}
    return {"name": field.name, "dtype": _dtype(field.type)}


def _dtype(kind: pa.DataType) -> str:
    return "float64" if pa.types.is_float64(kind) else str(kind)


def columns() -> list[Sequence[Any]]:
    """Return name, type and meaning of every column of the schema."""
    return [(f"`{each.name}`", str(each.type), MEANINGS.get(each.name, "")) for each in SCHEMA]


def by_task(done: Sequence[Mapping[str, Any]]) -> list[Sequence[Any]]:
    """Return counts and means by task."""
    found: list[Sequence[Any]] = []
    for task in sorted({record["task"] for record in done}):
        mine = [record for record in done if record["task"] == task]
        states = sum(record["states"] for record in mine)
        means = [sum(record[name] for record in mine) / states for name in MEANS]
        found.append((task, len(mine), states, sum(record["rows"] for record in mine), *means))
    return found


def provenance(conf: DictConfig, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a dataset comes from, by title."""
    config, profile = header["config"], header.get("profile", {})
    machine = profile.get("meta", {}).get("machine", {})
    rules = {n.removeprefix("drafting."): v for n, v in config.items() if n.startswith("drafting.")}
    small = rules.pop("small", "ngram")
    split, dtype = config.get("collect.split"), config.get("models.dtype")
    return {
        "target": f"{model_name(conf.pair.target.path)}, weights {config.get('models.target')}",
        "mid drafter": f"{model_name(conf.pair.mid.path)}, {config.get('models.mid_family')}, "
        f"weights {config.get('models.mid')}",
        "small drafter": small,
        "dtype": dtype,
        "seed": str(config.get("seed")),
        "split": split,
        "new tokens an answer, at most": config.get("collect.max_new_tokens"),
        "states a turn": config.get("collect.states_per_turn") or "all",
        "drafting": ", ".join(f"{name} {value}" for name, value in rules.items()),
        "hardware": ", ".join(f"{name} {value}" for name, value in machine.items()) or "not noted",
        "T_tgt, T_mid": f"{profile.get('target_ms', 0):.4g} ms, {profile.get('mid_ms', 0):.4g} ms",
        "commit of the code": header.get("code", "unknown"),
        "begun": header.get("created", "unknown"),
    }


def model_name(path: Any) -> str:
    """Return a hub id, or the name of a local folder without where it is."""
    text = str(path)
    return Path(text).resolve().name if Path(text).exists() or Path(text).is_absolute() else text


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    """Return a value as text that stays in its cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = "".join(c if c.isprintable() else " " for c in str(value)[:MOST_CELL])
    return text.replace("|", "\\|")
