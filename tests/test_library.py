"""The decoder as a library: opening, texts, many prompts, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from treegraft_core import (
    AS_DEFINED,
    DistilledScheduler,
    DraftingConfig,
    Generation,
    InputError,
    Pair,
    RandomSchedule,
    Sampling,
    SchedulerArtifact,
    SuffixDrafter,
    TreeGraftDecoder,
    all_mid,
    decode_plain,
)
from treegraft_core.library import open_scheduler
from treegraft_core.pair import fast_bfloat16
from treegraft_core.text_pieces import TextPieces
from treegraft_core.trained import Drafters, Trained

CHAT = "{% for m in messages %}w2 {{ m['content'] }} w3 {% endfor %}"


def artifact(depth: int = 3, trained: Trained | None = None) -> SchedulerArtifact:
    rng = np.random.default_rng(0)
    n = 6 + depth + 2
    return SchedulerArtifact(
        depth=depth,
        selected_signals=("depth_before", "frontier_before"),
        weights=(rng.normal(size=(4, n)), rng.normal(size=(1, 4))),
        biases=(rng.normal(size=4), np.zeros(1)),
        x_mean=np.zeros(n),
        x_std=np.ones(n),
        y_mean=0.0,
        y_std=1.0,
        trained=trained or Trained(),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return folders of a target and its mid drafter, each with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for i, name in enumerate(("target", "mid")):
        tiny_llama(i, dtype=torch.float32).save_pretrained(root / name)
        tokenizer = word_tokenizer()
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(root / name)
    return root / "target", root / "mid"


@pytest.fixture(scope="module")
def decoder(tiny_pair: Pair) -> TreeGraftDecoder:
    return TreeGraftDecoder.from_pretrained(
        tiny_pair.target, tiny_pair.mid, tokenizer=word_tokenizer(), runtime=AS_DEFINED
    )


# Opening --------------------------------------------------------------------------------------


def test_paths_and_loaded_models_give_the_same_decoder(folders: tuple[Path, Path]) -> None:
    target, mid = folders
    by_path = TreeGraftDecoder.from_pretrained(str(target), mid, "all_mid", dtype="float32")
    expected = by_path.generate([3, 4, 5], 12).tokens
    models = [tiny_llama(i, dtype=torch.float32) for i in (0, 1)]
    models[0].generation_config.top_k = 7
    tokenizer = word_tokenizer()
    loaded = [
        TreeGraftDecoder.from_pretrained(models[0], models[1], "1,1,1,1,1", tokenizer=tokenizer),
        TreeGraftDecoder.from_pretrained(models[0], str(mid), [1] * 5, tokenizer=tokenizer),
        TreeGraftDecoder.from_pretrained(target, models[1], all_mid(5), dtype="float32"),
    ]
    for decoder in loaded:
        assert decoder.generate([3, 4, 5], 12).tokens == expected
        assert decoder.pair.eos_token_ids == by_path.pair.eos_token_ids == (1,)
    assert loaded[0].pair.target is models[0] and loaded[0].pair.mid is models[1]
    assert models[0].generation_config.top_k == 7  # a loaded model stays as it is


def test_an_exported_scheduler_in_five_lines(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A folder, its profile beside it or none, and the paper's literal."""
    target, mid = map(str, folders)
    artifact().save(tmp_path / "scheduler")
    artifact().save_literal(tmp_path / "scheduler.py")
    found = TreeGraftDecoder.from_pretrained(target, mid, tmp_path / "scheduler", dtype="float32")
    assert isinstance(found.scheduler, DistilledScheduler) and found.config.depth == 3
    assert found.profile is not None and found.profile.meta["measured_by"] == "warm-up"
    assert found.profile.target_ms > 0 and found.profile.mid_ms > 0
    assert found.profile.meta["calls"] > 0
    assert found.generate([3, 4, 5], 12).tokens == decode_plain(found.pair, [3, 4, 5], 12).tokens
    found.profile.save(tmp_path / "scheduler" / "profile.json")
    for scheduler, profile in (
        (str(tmp_path / "scheduler"), None),
        (tmp_path / "scheduler.py", tmp_path / "scheduler" / "profile.json"),
        (artifact(), found.profile),
    ):
        again = TreeGraftDecoder.from_pretrained(
            target, mid, scheduler, profile=profile, dtype="float32", max_calls=2
        )
        assert again.profile == found.profile and again.scheduler.max_calls == 2
        x = np.linspace(-1, 1, 11)
        assert again.scheduler.artifact.margin(x) == found.scheduler.artifact.margin(x)


def test_the_default_is_the_papers_fixed_schedule(decoder: TreeGraftDecoder) -> None:
    assert decoder.scheduler.bits == (1, 0, 1, 0, 1) and decoder.config == DraftingConfig()
    config = DraftingConfig(4)
    assert open_scheduler(None, config).bits == (1, 0, 1, 0)
    assert open_scheduler("all_small", config).bits == (0,) * 4
    assert open_scheduler("101", config).bits == (1, 0, 1)
    other = RandomSchedule(3)
    assert open_scheduler(other, config) is other


def test_widths_of_the_training_are_the_default(tiny_pair: Pair) -> None:
    """What the scheduler was trained with, where its folder says so; another small drafter."""
    widths = {"width": 4, "verify_nodes": 12, "max_ngram": 3}
    trained = Trained(widths=widths, drafters=(Drafters("suffix", "causal_lm"),))
    models = (tiny_pair.target, tiny_pair.mid)
    suffix = SuffixDrafter()
    found = TreeGraftDecoder.from_pretrained(
        *models, artifact(3, trained), tokenizer=word_tokenizer(), small=suffix
    )
    assert found.config == DraftingConfig(3, 4, 12, 3, small=suffix)
    with pytest.raises(InputError, match="suffix"):
        TreeGraftDecoder.from_pretrained(*models, artifact(3, trained), tokenizer=word_tokenizer())
    forced = TreeGraftDecoder.from_pretrained(
        *models, artifact(3, trained), tokenizer=word_tokenizer(), allow=["drafters"]
    )
    assert forced.generate([3, 4], 5).tokens == decode_plain(tiny_pair, [3, 4], 5).tokens


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("^tokenizer=None", {"tokenizer": None}),
        ("^device=cpu", {"device": "cpu"}),
        ("^dtype=float32", {"dtype": "float32"}),
        ("^scheduler=float", {"scheduler": 1.5}),
        ("^scheduler=nowhere.py", {"scheduler": "nowhere.py"}),
        ("^schedule=", {"scheduler": [1, 2]}),
        ("^drafting.depth=5", {"scheduler": [1, 0], "drafting": DraftingConfig()}),
        ("^max_calls=1", {"max_calls": 1}),
        ("^allow=", {"allow": ["drafters"]}),
        ("^mid=int", {"mid": 3}),
        ("^mid=Llama.*eval", {"mid": "training"}),
        ("^profile=nowhere", {"profile": "nowhere"}),
    ],
)
def test_what_does_not_fit_is_named(tiny_pair: Pair, pattern: str, values: dict[str, Any]) -> None:
    values = {"mid": tiny_pair.mid, "tokenizer": word_tokenizer()} | values
    if values["mid"] == "training":
        values["mid"] = tiny_llama(3).train()
    with pytest.raises(InputError, match=pattern) as caught:
        TreeGraftDecoder.from_pretrained(tiny_pair.target, **values)
    assert "\n" not in str(caught.value)


# Texts and prompts ----------------------------------------------------------------------------


def test_texts_are_tokenized_as_said(folders: tuple[Path, Path]) -> None:
    target, mid = map(str, folders)
    decoder = TreeGraftDecoder.from_pretrained(target, mid, dtype="float32", runtime=AS_DEFINED)
    plain = decoder.generate("w4 w9", 9, chat=False).tokens
    assert plain == decoder.generate([4, 9], 9).tokens
    templated = decoder.generate("w4 w9", 9, chat=True).tokens
    assert templated == decoder.generate([2, 4, 9, 3], 9).tokens
    assert [t for new in decoder.stream("w4 w9", 9, chat=True) for t in new] == templated
    for text, chat, pattern in (
        ("w4", None, "^chat=None"),
        ([4], True, "^chat=True"),
        (" \n", False, "^prompt_ids=''"),
        ("\ud800", False, "^prompt_ids"),
    ):
        with pytest.raises(InputError, match=pattern):
            decoder.generate(text, 5, chat=chat)
    decoder.pair.tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat=True: the tokenizer has no chat template"):
        decoder.generate("w4", 5, chat=True)


def test_many_prompts_in_order(decoder: TreeGraftDecoder) -> None:
    """Each as alone; samples by seeds that follow on; nothing is decoded if one is bad."""
    prompts: list[Any] = ["w3 w4 w5", "w7", "w3 w4 w5", "w9 w9 w2"]
    found = decoder.generate_many(prompts, 14, chat=False)
    assert [g.tokens for g in found] == [
        decoder.generate(prompt, 14, chat=False).tokens for prompt in prompts
    ]
    sampling = Sampling(temperature=1.0, seed=5)
    ids = [[3, 4], [3, 4], [9]]
    samples = [g.tokens for g in decoder.generate_many(ids, 9, (), sampling)]
    alone = [
        decode_plain(decoder.pair, p, 9, (), Sampling(temperature=1.0, seed=5 + i)).tokens
        for i, p in enumerate(ids)
    ]
    assert samples == alone and samples[0] != samples[1]
    assert decoder.generate_many([], 5) == []
    begun = decoder.requests
    for bad, pattern in (
        ([[3], []], r"^prompts\[1\]: prompt_ids"),
        ([[3], [VOCAB]], r"^prompts\[1\]"),
        ("w3", "^prompts: is one text"),
        (["w3"], r"^prompts\[0\]: chat=None"),
    ):
        with pytest.raises(InputError, match=pattern):
            decoder.generate_many(bad, 5)
    assert decoder.requests == begun


def test_streamed_text_is_the_text(decoder: TreeGraftDecoder) -> None:
    result = Generation()
    pieces = list(decoder.stream_text("w3 w4 w5", 20, chat=False, result=result))
    assert len(pieces) > 3 and result.tokens == decoder.generate([3, 4, 5], 20).tokens
    assert "".join(pieces) == decoder.pair.tokenizer.decode(result.tokens)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, like the rare characters of most models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return one with byte fallback and word marks, as SentencePiece models have."""
    words = ["▁", "▁a", "b", "é", *(f"<0x{i:02X}>" for i in range(256)), "<s>"]
    tokenizer = Tokenizer(BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int], sizes: list[int]) -> list[str]:
    text, pieces, at = TextPieces(tokenizer), [], 0
    for size in [*sizes, len(tokens)]:
        pieces.append(text.add(tokens[at : at + size]))
        at += size
    return [*pieces, text.end()]


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(
        st.sampled_from("a b é漢字🙂👩\u200d🚀ü\n,.!\ufffd") | st.characters(codec="utf-8"),
        min_size=1,
        max_size=25,
    ),
    sizes=st.lists(st.integers(0, 7), max_size=40),
)
def test_pieces_never_split_a_character(text: str, sizes: list[int]) -> None:
    """However the bytes come, pieces are whole characters and together the text."""
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())
    pieces = pieces_of(tokenizer, tokens, sizes)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 3]) | st.integers(4, 259), min_size=1, max_size=30),
    sizes=st.lists(st.integers(0, 7), max_size=40),
)
def test_pieces_of_any_tokens_are_the_decoded_text(tokens: list[int], sizes: list[int]) -> None:
    """Bytes that are no character come out as the whole decoding has them, in the end."""
    bytes_only = [token % 256 for token in tokens]
    tokenizer = byte_tokenizer()
    assert "".join(pieces_of(tokenizer, bytes_only, sizes)) == tokenizer.decode(bytes_only)
    words = [t if t < 4 else 4 + ord("a") + t % 20 for t in tokens]
    tokenizer = fallback_tokenizer()
    assert "".join(pieces_of(tokenizer, words, sizes)) == tokenizer.decode(words)


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a🙂", add_special_tokens=False)["input_ids"]
    assert pieces_of(tokenizer, tokens, [1, 1, 1, 1, 1])[:5] == ["a", "", "", "", "🙂"]
    assert pieces_of(tokenizer, tokens[:3], [1, 1, 1]) == ["a", "", "", "", "\ufffd"]
    fallback = fallback_tokenizer()
    smile = [4 + b for b in "🙂".encode()]
    assert pieces_of(fallback, [1, *smile, 1], [1] * 6) == ["a", "", "", "", "🙂", " a", "", ""]


def test_the_dtype_follows_the_machine(folders: tuple[Path, Path]) -> None:
    decoder = TreeGraftDecoder.from_pretrained(*map(str, folders), device="cpu")
    assert decoder.pair.target.dtype == (torch.bfloat16 if fast_bfloat16("cpu") else torch.float32)
