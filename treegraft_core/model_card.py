"""The model card of a scheduler, written from its own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from treegraft_core.trained import COSTS, FAR, WIDTHS

if TYPE_CHECKING:
    from treegraft_core.artifact import SchedulerArtifact

FRONT = """---
license: apache-2.0
library_name: treegraft
tags:
- treegraft
- speculative-decoding
---
"""
LOAD = """```python
from treegraft_core import DistilledScheduler, LatencyProfile, SchedulerArtifact, TreeGraftDecoder
scheduler = DistilledScheduler(SchedulerArtifact.from_pretrained("{name}"))
decoder = TreeGraftDecoder(pair, scheduler, config, LatencyProfile.load("profile.json"))
```"""
SYMBOLS = dict(zip(WIDTHS, ("W", "B_ver", "n_max"), strict=True))
COST_NAMES = dict(zip(COSTS, ("T_tgt, ms", "T_mid, ms", "T_tgt / T_mid"), strict=True))
LONGEST = 120
NOT_NOTED = "not noted"


def model_card(artifact: SchedulerArtifact, name: str) -> str:
    """Return the card, Markdown with the hub's front matter.

    Parameters
    ----------
    artifact : SchedulerArtifact
        Every number on the card is one of its own.
    name : str
        The repository's or the folder's.
    """
    parts = [
        f"{FRONT}\n# {_text(name)}",
        "A scheduler for [TreeGraft](https://arxiv.org/abs/2608.26112), speculative decoding with "
        "two drafters that grow one tree: before each drafting step it decides whether the mid "
        f"drafter works. {artifact.n_parameters:,} parameters. Whatever it decides, the output is "
        "the target's own; only the speed depends on it.",
        "## Load it",
        LOAD.format(name=name),
        "`pair` is what `load_pair` returns, `config` a `DraftingConfig` as below, `profile.json` "
        "what `stage=profile` measured on this machine with this pair.",
        "## What it takes",
        _table(("", ""), _takes(artifact)),
        "## What it was fitted on",
        _table(("", ""), _fitted(artifact)),
        _table(("pair", "small", "mid", "weights of mid"), _drafters(artifact)),
        _table(("cost", "least", "most"), _costs(artifact)),
        "## Figures of the fit",
        "On held-out prompts of the data that it was fitted on, not on yours.",
        _table(("figure", "value"), _figures(artifact)),
        "## Limits",
        _limits(artifact),
        "## Licence",
        "Apache-2.0, for these numbers. The models that they were fitted on have licences of their "
        "own.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _takes(artifact: SchedulerArtifact) -> list[Sequence[Any]]:
    widths = artifact.trained.widths
    return [
        ("D, drafting steps a round", artifact.depth),
        *((SYMBOLS[name], widths.get(name, NOT_NOTED)) for name in WIDTHS),
        ("signals, in order", ", ".join(artifact.selected_signals) or "none"),
        ("margin in", artifact.metadata.get("margin_unit", NOT_NOTED)),
    ]


def _fitted(artifact: SchedulerArtifact) -> list[Sequence[Any]]:
    about = artifact.metadata
    rows = [("tasks", "tasks"), ("machines", "hardware"), ("tokens of η", "numerator")]
    found = [(title, about[key]) for title, key in rows if key in about]
    hardware = about.get("hardware")
    if isinstance(hardware, dict):
        found = [(t, hardware.get("name", v) if v is hardware else v) for t, v in found]
    return [*found, ("commit of the code", about.get("git_sha", NOT_NOTED))]


def _drafters(artifact: SchedulerArtifact) -> list[Sequence[Any]]:
    found = artifact.trained.drafters
    return [(d.pair, d.small, d.mid, d.identity or NOT_NOTED) for d in found]


def _costs(artifact: SchedulerArtifact) -> list[Sequence[Any]]:
    return [(COST_NAMES[name], *ends) for name, ends in artifact.trained.costs.items()]


def _figures(artifact: SchedulerArtifact) -> list[Sequence[Any]]:
    found = artifact.trained.metrics.items()
    return [(name, value) for name, value in found if isinstance(value, (bool, int, float, str))]


def _limits(artifact: SchedulerArtifact) -> str:
    known = artifact.trained
    lines = [f"Another depth than {artifact.depth} is refused."]
    if known.widths:
        lines.append(
            "Another W or n_max, or a larger B_ver, is refused: they change the trees, or what a "
            "tree brings. A smaller B_ver changes neither trees nor signals and is taken, with a "
            "warning; a scheduler of its own follows from the same trajectories."
        )
    if known.drafters:
        families = sorted({f"{each.small} + {each.mid}" for each in known.drafters})
        lines.append(f"Drafters of other families than {', '.join(families)} are refused.")
    if known.costs:
        low, high = (_text(end) for end in known.costs["ratio"])
        lines.append(
            f"T_tgt / T_mid was {low} to {high}; more than {FAR:g} times outside, the decoder "
            "warns."
        )
    if known.missing:
        lines.append(f"Nobody noted its {', '.join(known.missing)}: they are not checked.")
    return "\n".join(f"- {line}" for line in lines)


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [" | ".join(_text(cell) for cell in row) for row in rows]
    if not lines:
        return ""
    return "\n".join(
        f"| {line} |" for line in [" | ".join(titles), "|".join("---" for _ in titles), *lines]
    )


def _text(value: Any) -> str:
    """Return a value as text that stays in its cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    text = "".join(c if c.isprintable() else " " for c in str(value)[:LONGEST])
    return "".join(f"\\{c}" if c in "|<>[]`*\\" else c for c in text)
