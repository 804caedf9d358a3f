"""Families of models: lossless with trees, or refused by name; the table says what was found."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures import (
    ATTENTION,
    DEPTH,
    FAMILIES,
    PAGE,
    REFUSED,
    TEXTS,
    WINDOW,
    Found,
    config_of,
    found,
    offered,
    page,
    refused_config,
    refused_line,
    tiny_model,
    tree_gap,
    without_version,
)
from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from treegraft_core import InputError, load_pair
from treegraft_core.architectures import class_name, refusal
from treegraft_core.models import CachedModel, check_tree_attention

COMBINATIONS = [(f, a) for f in FAMILIES for a in ATTENTION if offered(f, a)]


@pytest.mark.parametrize(("family", "attention"), COMBINATIONS)
def test_a_family_is_lossless(family: str, attention: str) -> None:
    """Trees are read as their branches alone, and decoding gives the tokens of ``generate``."""
    result = found(family, attention)
    assert result.gap < 1e-4
    assert result.lossless
    assert result.accepted > 0


def test_only_what_transformers_refuses_is_left_out() -> None:
    """Gemma 2 caps its attention scores, which sdpa cannot."""
    left = [(f, a) for f in FAMILIES for a in ATTENTION if not offered(f, a)]
    assert left == [("gemma2", "sdpa")]
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        tiny_model("gemma2", "sdpa")


WINDOWS = [family for family, extra in FAMILIES.items() if extra.get("sliding_window")]


@pytest.mark.parametrize("family", WINDOWS)
def test_the_window_matters_in_these_texts(family: str) -> None:
    """With a window longer than the text its logits are others: what is checked has one."""
    model = tiny_model(family, "eager")
    wide = AutoModelForCausalLM.from_config(
        config_of(family, sliding_window=200), dtype=torch.float32, attn_implementation="eager"
    )
    wide.eval().load_state_dict(model.state_dict())
    text = torch.arange(2, 2 + TEXTS[1])[None]
    with torch.no_grad():
        gap = model(text).logits[0, -1] - wide(text).logits[0, -1]
    assert gap.abs().max() > 1e-2
    assert TEXTS[0] < WINDOW < TEXTS[0] + DEPTH + 1


def test_a_tree_that_is_read_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is causal, so that branches see each other, is far from branches alone."""
    model = tiny_llama(0)
    assert tree_gap(model, 6) < 1e-9
    run = CachedModel.run
    monkeypatch.setattr(CachedModel, "run", lambda self, t, p, v=None, rows=None: run(self, t, p))
    assert tree_gap(model, 6) > 0.01


def write_config(family: str, folder: Path) -> Path:
    """Write a configuration and no weights."""
    config = refused_config(family)
    config.architectures = None
    config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its configuration alone, as target and as mid; no model is loaded."""

    def load(*_: object, **__: object) -> NoReturn:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    sound, odd = tmp_path / "sound", write_config(family, tmp_path / "odd")
    tiny_llama(0).config.save_pretrained(sound)
    word_tokenizer().save_pretrained(sound)
    for role, pair in (("target", (odd, sound)), ("mid", (sound, odd))):
        with pytest.raises(InputError) as refused:
            load_pair(*map(str, pair))
        line = str(refused.value)
        assert f"pair.{role}={class_name(refused_config(family))}: the family {family} " in line
        assert str(refusal(refused_config(family))) in line and len(line.splitlines()) == 1
    assert refused_line(family) is not None


BY_RUNNING: dict[str, dict[str, object]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["local"], 2]],
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", BY_RUNNING)
def test_what_is_refused_by_name_is_refused_by_running(family: str) -> None:
    """The names are no prejudice: the model itself fails the check of two branches."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, initializer_range=0.4, **BY_RUNNING[family]
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with pytest.raises(InputError, match=r"pair\.mid=|model="):
        check_tree_attention(model, "mid")


def test_a_variant_without_such_layers_is_not_refused() -> None:
    """GPT-Neo with global attention alone, Falcon with rotary positions."""
    glob = AutoConfig.for_model("gpt_neo", num_layers=2, attention_types=[[["global"], 2]])
    assert refusal(glob) is None
    assert refusal(AutoConfig.for_model("falcon", alibi=False)) is None


def test_the_page_says_what_was_found() -> None:
    """``make architectures`` writes it."""
    assert without_version(PAGE.read_text(encoding="utf-8")) == without_version(page())


def test_the_page_follows_the_findings() -> None:
    """A family that fails is one that the page would not call lossless."""
    good, bad = Found(0.0, True, 3), Found(0.0, False, 3)
    assert not bad.passes and not Found(0.1, True, 3).passes and not Found(0.0, True, 0).passes
    written = page(lambda family, attention: bad if family == "olmo2" else good, "1.2.3")
    assert "| olmo2 | Olmo2ForCausalLM | full_attention | fails | fails |" in written
    assert written.count(" lossless |") == len(COMBINATIONS) - len(ATTENTION)
    assert "transformers 1.2.3" in written and "1.2.3" not in without_version(written)
