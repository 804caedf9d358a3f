"""A scheduler that does not fit its decoder is refused in one line, or taken with a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_artifact import random_artifact
from tests.test_inputs import GRID, profile
from treegraft_core import (
    DistilledScheduler,
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    SchedulerArtifact,
    TreeGraftDecoder,
    fit_check,
    load_scheduler,
)
from treegraft_core.fit_check import check_fits, families
from treegraft_core.signals import PAPER_SIGNALS
from treegraft_core.small import NGRAM, SmallDrafter
from treegraft_core.student import DraftVocabulary
from treegraft_core.trained import FAR, Drafters, Trained

CONFIG = DraftingConfig()
PROFILE = profile(verify=GRID)
RATIO = PROFILE.target_ms / PROFILE.mid_ms


def trained(**changes: Any) -> Trained:
    """Return the facts of a scheduler that fits `CONFIG`, `PROFILE`, n-grams and a causal LM."""
    facts: dict[str, Any] = {
        "widths": {"width": 10, "verify_nodes": 63, "max_ngram": 5},
        "drafters": (Drafters("ngram", "causal_lm", "tiny", "0a1b"),),
        "costs": {
            "target_ms": (1.0, 100.0),
            "mid_ms": (1.0, 50.0),
            "ratio": (0.9 * RATIO, 1.1 * RATIO),
        },
        "metrics": {"r2": 0.5, "texts_whole": True},
    }
    return Trained(**{**facts, **changes})


def artifact(**changes: Any) -> SchedulerArtifact:
    return replace(random_artifact(), trained=trained(**changes))


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Each warning is given once in a process: forget them."""
    fit_check._tell.cache_clear()
    caplog.set_level(logging.WARNING, logger="treegraft_core.fit_check")
    yield caplog
    fit_check._tell.cache_clear()


def test_what_fits_is_silent(warned: pytest.LogCaptureFixture) -> None:
    check_fits(artifact(), CONFIG, "ngram", "causal_lm", PROFILE)
    assert warned.messages == []


REFUSED: dict[str, tuple[DraftingConfig, tuple[str, str], str]] = {
    "depth": (
        replace(CONFIG, depth=4),
        ("ngram", "causal_lm"),
        r"drafting\.depth=4: the scheduler was trained for depth 5; decode with that or train",
    ),
    "width": (
        replace(CONFIG, width=8),
        ("ngram", "causal_lm"),
        r"drafting\.width=8: the scheduler was trained with 10; give drafting\.width=10 or train",
    ),
    "verify_nodes": (
        replace(CONFIG, verify_nodes=64),
        ("ngram", "causal_lm"),
        r"drafting\.verify_nodes=64: the scheduler was trained with 63; give",
    ),
    "max_ngram": (
        replace(CONFIG, max_ngram=4),
        ("ngram", "causal_lm"),
        r"drafting\.max_ngram=4: the scheduler was trained with 5; give",
    ),
    "small": (
        CONFIG,
        ("suffix", "causal_lm"),
        r"small=suffix, mid=causal_lm: the scheduler was trained with ngram and causal_lm; decode",
    ),
    "mid": (CONFIG, ("ngram", "head"), r"small=ngram, mid=head: the scheduler was trained with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, warned: pytest.LogCaptureFixture) -> None:
    config, (small, mid), message = REFUSED[name]
    with pytest.raises(InputError, match=message) as caught:
        check_fits(artifact(), config, small, mid, PROFILE)
    assert len(str(caught.value).splitlines()) == 1
    assert warned.messages == []


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "depth"])
def test_allowed_with_a_warning(name: str, warned: pytest.LogCaptureFixture) -> None:
    config, (small, mid), _ = REFUSED[name]
    allow = name if name in ("width", "verify_nodes", "max_ngram") else "drafters"
    check_fits(artifact(), config, small, mid, PROFILE, (allow,))
    (line,) = warned.messages
    assert line.endswith(f"allow={allow} takes it")
    others = {"width", "verify_nodes", "max_ngram", "drafters"} - {allow}
    with pytest.raises(InputError, match="was trained with"):
        check_fits(artifact(), config, small, mid, PROFILE, tuple(others))


@pytest.mark.parametrize("name", ["depth", "signals", "everything"])
def test_inputs_cannot_be_allowed(name: str) -> None:
    with pytest.raises(InputError, match=f"allow={name}: choose of drafters, width"):
        check_fits(artifact(), CONFIG, "ngram", "causal_lm", PROFILE, (name,))


def test_a_smaller_budget_is_taken_with_a_warning(warned: pytest.LogCaptureFixture) -> None:
    """Trees and signals do not depend on B_ver."""
    check_fits(artifact(), replace(CONFIG, verify_nodes=20), "ngram", "causal_lm", PROFILE)
    (line,) = warned.messages
    assert "drafting.verify_nodes=20: the scheduler was trained with 63" in line


def test_one_of_several_pairs_of_drafters(warned: pytest.LogCaptureFixture) -> None:
    """Those that were together in a pair; not one of the one and one of the other."""
    both = artifact(drafters=(Drafters("ngram", "student"), Drafters("suffix", "head")))
    for small, mid in (("ngram", "student"), ("suffix", "head")):
        check_fits(both, CONFIG, small, mid, PROFILE)
    assert warned.messages == []
    with pytest.raises(InputError, match="trained with ngram and student or suffix and head"):
        check_fits(both, CONFIG, "suffix", "student", PROFILE)


@pytest.mark.parametrize(("factor", "far"), [(1.0, False), (0.99 * FAR, False), (1.01 * FAR, True)])
@pytest.mark.parametrize("above", [True, False])
def test_a_far_cost_ratio(
    factor: float, far: bool, above: bool, warned: pytest.LogCaptureFixture
) -> None:
    """Warned of, with the numbers; nothing is refused."""
    low, high = trained().costs["ratio"]
    ratio = high * factor if above else low / factor
    here = replace(PROFILE, target_ms=ratio * PROFILE.mid_ms)
    check_fits(artifact(), CONFIG, "ngram", "causal_lm", here)
    assert len(warned.messages) == far
    if far:
        (line,) = warned.messages
        numbers = (ratio, here.target_ms, here.mid_ms, low, high, FAR)
        assert all(f"{number:.4g}" in line for number in numbers), line


def test_missing_facts_are_not_checked_and_said_once(warned: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        config = replace(CONFIG, width=3, verify_nodes=200)
        check_fits(random_artifact(), config, "suffix", "mine", PROFILE)
    (line,) = warned.messages
    assert "does not say what widths, drafters, costs" in line and "not checked" in line
    with pytest.raises(InputError, match="was trained for depth 5"):
        check_fits(random_artifact(), replace(CONFIG, depth=3), "ngram", "causal_lm")


# Decoders -------------------------------------------------------------------------------------


def built(pair: Pair, scheduler: Any, config: DraftingConfig = CONFIG) -> TreeGraftDecoder:
    return TreeGraftDecoder(pair, scheduler, config, PROFILE)


def test_a_decoder_refuses_what_does_not_fit(
    tiny_pair: Pair, warned: pytest.LogCaptureFixture
) -> None:
    """As it is built; one that fits, and schedulers without an artifact, are taken."""
    built(tiny_pair, DistilledScheduler(artifact()))
    built(tiny_pair, FixedSchedule([1, 0]), replace(CONFIG, depth=2, width=3))
    assert warned.messages == []
    other = DistilledScheduler(artifact(drafters=(Drafters("suffix", "head"),)))
    with pytest.raises(InputError, match="small=ngram, mid=causal_lm: the scheduler was trained"):
        built(tiny_pair, other)
    with pytest.raises(InputError, match=r"drafting\.width=4"):
        built(tiny_pair, DistilledScheduler(artifact()), replace(CONFIG, width=4))
    taken = built(tiny_pair, DistilledScheduler(other.artifact, allow=("drafters",)))
    assert len(taken.generate([3, 4, 5], 8).tokens) == 8
    assert len(warned.messages) == 1


class Mine(SmallDrafter):
    name = "mine"

    def propose(self, context: Any, path: Any, length: int) -> list[Any]:
        return []


def test_families(tiny_pair: Pair) -> None:
    config = replace(CONFIG, small=NGRAM)
    assert families(tiny_pair, config) == ("ngram", "causal_lm")
    vocabulary = DraftVocabulary(tokens=SimpleNamespace(), floor_log_p=-9.0)  # type: ignore[arg-type]
    assert families(replace(tiny_pair, vocabulary=vocabulary), config) == ("ngram", "student")
    own = SimpleNamespace(mid=SimpleNamespace(family="head"), vocabulary=None)
    assert families(own, replace(CONFIG, small=Mine())) == ("mine", "head")
    assert families(SimpleNamespace(mid=Mine(), vocabulary=None), config) == ("ngram", "Mine")


# Folders --------------------------------------------------------------------------------------


def test_facts_survive_a_folder(tmp_path: Path) -> None:
    artifact().save_pretrained(tmp_path)
    assert SchedulerArtifact.from_pretrained(tmp_path).trained == trained()


def test_a_literal_keeps_depth_and_signals_only(tmp_path: Path) -> None:
    artifact().save_literal(tmp_path / "a.py")
    loaded = load_scheduler(tmp_path / "a.py")
    assert (loaded.depth, loaded.selected_signals) == (5, PAPER_SIGNALS)
    assert (loaded.trained, loaded.metadata) == (Trained(), {})


@pytest.mark.parametrize(
    "facts",
    [
        {"widths": {"width": 10}},
        {"widths": {"width": 0, "verify_nodes": 1, "max_ngram": 1}},
        {"widths": {"width": True, "verify_nodes": 1, "max_ngram": 1}},
        {"widths": [10]},
        {"drafters": {"small": "ngram", "mid": "head"}},
        {"drafters": [{"small": "ngram"}]},
        {"drafters": [{"small": "ngram", "mid": 3}]},
        {"drafters": [{"small": "ngram", "mid": "a\nb"}]},
        {"drafters": [{"small": "ngram", "mid": "m", "token": "x"}]},
        {"costs": {"ratio": [1.0, 2.0]}},
        {"costs": {"target_ms": [2.0, 1.0], "mid_ms": [1.0, 2.0], "ratio": [1.0, 2.0]}},
        {"costs": {"target_ms": [1.0], "mid_ms": [1.0, 2.0], "ratio": [1.0, 2.0]}},
        {"costs": {"target_ms": [0.0, 1.0], "mid_ms": [1.0, 2.0], "ratio": [1.0, 2.0]}},
        {"metrics": [1]},
    ],
)
def test_facts_that_cannot_be(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(facts))):
        Trained.from_dict(facts)
