"""``model.generate`` with TreeGraft against ``model.generate`` alone, argument by argument."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from treegraft_core import (
    AS_DEFINED,
    DraftingConfig,
    InputError,
    TreeGraftDecoder,
    decode_plain,
    write_custom_generate,
)
from treegraft_core.stepping import Steps

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKL"
ONE = torch.tensor([[3, 4, 5, 3, 4]])
BATCH = torch.tensor([[3, 4, 5, 3, 4], [1, 1, 7, 8, 9], [1, 1, 1, 1, 30]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single characters."""
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b")


def open_decoder(**options: Any) -> TreeGraftDecoder:
    target, mid = tiny_llama(0), tiny_llama(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in mid.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    options = {"runtime": AS_DEFINED, "drafting": DraftingConfig(5, 4, 16)} | options
    return TreeGraftDecoder.from_pretrained(target, mid, tokenizer=letters(), **options)


@pytest.fixture(scope="module")
def decoder() -> TreeGraftDecoder:
    return open_decoder()


class Recorder:
    """A streamer that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def outcome(
    decoder: TreeGraftDecoder, ours: bool, make: Callable[[], dict[str, Any]] | None, **values: Any
) -> Any:
    """Return what ``generate`` returned or raised, what it streamed, and what it warned of."""
    streamer = Recorder()
    custom = {"custom_generate": decoder.custom_generate} if ours else {}
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = decoder.pair.target.generate(
                **values, **(make() if make else {}), streamer=streamer, **custom
            )
        except (ValueError, RuntimeError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
    text = found.tolist() if isinstance(found, Tensor) else found
    return text, streamer.calls, [str(w.message) for w in caught]


def same(decoder: TreeGraftDecoder, make: Any = None, **values: Any) -> Any:
    """Check that both methods do the same; return the tokens."""
    stock = outcome(decoder, False, make, **values)
    assert outcome(decoder, True, make, **values) == stock
    return stock[0]


class Recording(LogitsProcessor):
    """Notes what it is called with, and changes scores by its own count of calls."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.tolist())
        self.scores.append(scores.clone())
        scores = scores.clone()
        scores[:, len(self.seen) % 5 :: 5] -= 3.0
        return scores


class Nothing(LogitsProcessor):
    """Leaves no token from its n-th call on."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        return scores if self.left > 0 else torch.full_like(scores, -torch.inf)


class StopAfter(StoppingCriteria):
    """Stops row i after ``counts[i]`` calls; notes the calls."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.seen: list[tuple[list[list[int]], bool]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), scores is None))
        counts = (self.counts * len(input_ids))[: len(input_ids)]
        return torch.tensor([len(self.seen) >= count for count in counts])


SETTINGS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {},
    "max_length": {"max_new_tokens": None, "max_length": 17},
    "default length": {"max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "no tokens": {"max_new_tokens": 0},
    "prompt at max_length": {"max_new_tokens": None, "max_length": 5},
    "eos list": {"eos_token_id": [9, 33, 47]},
    "no eos": {"eos_token_id": None, "pad_token_id": None},
    "min_new_tokens": {"eos_token_id": [20, 19], "min_new_tokens": 6},
    "min_length": {"eos_token_id": [20, 19], "min_length": 9},
    "min above max": {"min_new_tokens": 30},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "bad_words_ids": {"bad_words_ids": [[20], [46, 35], [3, 31]]},
    "suppress_tokens": {"suppress_tokens": [20, 46], "begin_suppress_tokens": [43]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[20], -4.0], [[46, 7], 6.0]]},
    "forced_eos": {"forced_eos_token_id": 1, "eos_token_id": 1},
    "decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "guidance": {"guidance_scale": 1.5},
    "max_time": {"max_time": 0.0},
    "stop_strings": {"stop_strings": ["ii", "J"]},
    "use_cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "sampling": {"do_sample": True},
    "warpers": {"do_sample": True, "temperature": 1.3, "top_k": 12, "top_p": 0.9},
    "more warpers": {"do_sample": True, "min_p": 0.02, "typical_p": 0.9, "top_k": 0},
    "sampled penalties": {"do_sample": True, "repetition_penalty": 1.3, "eos_token_id": [9, 33]},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "several greedy answers": {"num_return_sequences": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_gives_the_stock_methods_output(decoder: TreeGraftDecoder, name: str) -> None:
    """One row and a padded batch: tokens, streamer calls, warnings and errors are the same."""
    values = {"max_new_tokens": 18, "tokenizer": letters()} | SETTINGS[name]
    same(decoder, input_ids=ONE, **copy.deepcopy(values))
    same(decoder, input_ids=BATCH, attention_mask=MASK, **copy.deepcopy(values))


@settings(max_examples=20, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    eos=st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)),
    values=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 16)},
        optional={
            "min_new_tokens": st.integers(1, 12),
            "repetition_penalty": st.floats(1.05, 2.0),
            "no_repeat_ngram_size": st.integers(1, 3),
            "bad_words_ids": st.lists(
                st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), min_size=1, max_size=9
            ),
            "suppress_tokens": st.lists(st.integers(0, VOCAB - 1), max_size=5),
            "do_sample": st.booleans(),
            "temperature": st.floats(0.5, 2.0),
        },
    ),
    stop=st.integers(1, 20),
)
def test_settings_together_give_the_stock_methods_output(
    decoder: TreeGraftDecoder,
    prompt: list[int],
    eos: list[int] | None,
    values: dict[str, Any],
    stop: int,
) -> None:
    def make() -> dict[str, Any]:
        return {
            "stopping_criteria": StoppingCriteriaList([StopAfter(stop)]),
            "generation_config": GenerationConfig(eos_token_id=eos, pad_token_id=0, **values),
        }

    ids = torch.tensor([prompt])
    same(decoder, make, input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_is_called_once_a_step_in_order(
    decoder: TreeGraftDecoder, do_sample: bool
) -> None:
    """A processor with a state of its own sees the stock method's calls, and none more."""
    for inputs in ({"input_ids": ONE}, {"input_ids": BATCH, "attention_mask": MASK}):
        made: list[Recording] = []

        def make(made: list[Recording] = made) -> dict[str, Any]:
            made.append(Recording())
            return {"logits_processor": LogitsProcessorList([made[-1]])}

        tokens = same(decoder, make, max_new_tokens=20, do_sample=do_sample, **inputs)
        stock, ours = made
        assert stock.seen == ours.seen and len(ours.seen) == len(tokens[0]) - 5
        # A row that has ended is padding, which nobody decodes here.
        for theirs, mine, seen in zip(stock.scores, ours.scores, stock.seen, strict=True):
            for row, text in enumerate(seen):
                if 1 not in text[5:]:
                    torch.testing.assert_close(mine[row], theirs[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", range(1, 14))
def test_a_criterion_cuts_within_a_round(decoder: TreeGraftDecoder, count: int) -> None:
    """The output ends at the token that stops it, and the next request finds right caches."""
    made: list[StopAfter] = []

    def make() -> dict[str, Any]:
        made.append(StopAfter(count))
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    (tokens,) = same(decoder, make, input_ids=ONE, max_new_tokens=30)
    assert len(tokens) == 5 + count and made[0].seen == made[1].seen
    assert decoder.last[0].tokens == tokens[5:] and decoder.last[0].stopped == "criteria"
    assert sum(r.committed for r in decoder.last[0].rounds) == count - 1
    assert all(r.committed == r.accepted + 1 for r in decoder.last[0].rounds)
    (longer,) = same(decoder, input_ids=torch.tensor([tokens]), max_new_tokens=9)
    assert decoder.generate(tokens, 9).tokens == longer[len(tokens) :]


def test_rows_end_apart_with_and_without_eos(decoder: TreeGraftDecoder) -> None:
    """Without EOS, rows whose criteria are met go on until all are; with it, they are padded."""
    for eos, pad in ((None, None), (1, 0)):
        tokens = same(
            decoder,
            lambda: {"stopping_criteria": StoppingCriteriaList([StopAfter(2, 7, 4)])},
            input_ids=BATCH,
            attention_mask=MASK,
            max_new_tokens=20,
            generation_config=None,
            eos_token_id=eos,
            pad_token_id=pad,
        )
        assert [len(row) for row in tokens] == [12] * 3
        lengths = [len(generation.tokens) for generation in decoder.last]
        assert lengths == ([7, 7, 7] if eos is None else [2, 7, 4])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("step", [1, 4])
def test_a_processor_that_leaves_nothing(
    decoder: TreeGraftDecoder, step: int, do_sample: bool
) -> None:
    """Greedily that is token 0, as in the stock method; sampling raises its error."""
    found = same(
        decoder,
        lambda: {"logits_processor": LogitsProcessorList([Nothing(step)])},
        input_ids=ONE,
        max_new_tokens=8,
        do_sample=do_sample,
    )
    assert found.startswith("RuntimeError") if do_sample else found[0][4 + step] == 0
    assert (
        decoder.generate([3, 4], 6).tokens
        == same(decoder, input_ids=torch.tensor([[3, 4]]), max_new_tokens=6)[0][2:]
    )


def test_beyond_the_models_positions(decoder: TreeGraftDecoder) -> None:
    """Rotary embeddings go on, and so does the output, plainly; so do prompts beyond them."""
    ids = torch.tensor([[(5 * i + 3) % VOCAB for i in range(247)]])
    same(decoder, input_ids=ids, max_new_tokens=20, eos_token_id=None, pad_token_id=None)
    assert decoder.last[0].plain_steps >= 20 - (256 - 247) and decoder.last[0].rounds
    ids = torch.tensor([[(5 * i + 3) % VOCAB for i in range(260)]])
    same(decoder, input_ids=ids, max_new_tokens=4, eos_token_id=None, pad_token_id=None)


def test_allowed_tokens_know_their_row(decoder: TreeGraftDecoder) -> None:
    def allowed(row: int, text: Tensor) -> list[int]:
        return [(3 * row + len(text)) % VOCAB, 10 + row, 20 + row]

    tokens = same(
        decoder,
        input_ids=BATCH,
        attention_mask=MASK,
        max_new_tokens=9,
        prefix_allowed_tokens_fn=allowed,
    )
    assert all(t in allowed(1, torch.zeros(5 + i)) for i, t in enumerate(tokens[1][5:]))


def test_scores_and_logits_of_one_row(decoder: TreeGraftDecoder) -> None:
    target = decoder.pair.target
    values = {
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    stock = target.generate(ONE, **values)
    ours = target.generate(ONE, **values, custom_generate=decoder.custom_generate)
    assert type(ours) is type(stock) is GenerateDecoderOnlyOutput
    assert ours.sequences.tolist() == stock.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(stock, name)
        assert len(mine) == len(theirs) == 12
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=1e-4, atol=1e-4)
    transitions = [
        target.compute_transition_scores(each.sequences, each.scores) for each in (ours, stock)
    ]
    torch.testing.assert_close(*transitions, rtol=1e-4, atol=1e-4)
    bare = target.generate(
        BATCH,
        attention_mask=MASK,
        max_new_tokens=4,
        return_dict_in_generate=True,
        custom_generate=decoder.custom_generate,
    )
    assert bare.scores is None and bare.sequences.shape == (3, 9)


def test_statistics_and_speculation(decoder: TreeGraftDecoder) -> None:
    """The tokens come from trees: several of them a round."""
    same(decoder, input_ids=ONE, max_new_tokens=30, eos_token_id=None, pad_token_id=None)
    (found,) = decoder.last
    assert found.stopped == "length" and len(found.tokens) == 30 and found.plain_steps == 0
    assert sum(r.committed for r in found.rounds) == 29
    assert found.mean_accepted > 0.5 and len(found.rounds) < 20
    assert all(r.ms["verify"] > 0 for r in found.rounds) and found.decode_ms > 0
    alone = decoder.generate([3, 4, 5, 3, 4], 30, ())
    assert alone.tokens == found.tokens
    assert [r.accepted for r in alone.rounds][:-1] == [r.accepted for r in found.rounds][:-1]


def test_the_guard_changes_no_token() -> None:
    guarded = open_decoder(runtime=None, scheduler="all_small")
    for _ in range(3):
        same(guarded, input_ids=BATCH, attention_mask=MASK, max_new_tokens=25)
        # The second row's decoder is new, and has yet to learn what a plain step costs.
        assert guarded.last[1].plain_steps > 0 and guarded.last[1].decisions[0].mode == "plain"


def test_a_text_streamer_gets_its_end(decoder: TreeGraftDecoder) -> None:
    texts = []
    for custom in ({}, {"custom_generate": decoder.custom_generate}):
        streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=5.0)
        decoder.pair.target.generate(ONE, max_new_tokens=15, streamer=streamer, **custom)
        texts.append(list(streamer))
    assert texts[0] == texts[1] and len("".join(texts[0])) == 15


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "force_words_ids": {"force_words_ids": [[4]], "num_beams": 1},
    "dola_layers": {"dola_layers": "high"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True, "input_ids": BATCH},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 3, 9]])},
    "attention_mask": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(decoder: TreeGraftDecoder, name: str) -> None:
    """In one line that names the argument, before anything is decoded."""
    begun = decoder.requests
    values = {"input_ids": ONE, "max_new_tokens": 5} | REFUSED[name]
    with pytest.raises(InputError, match=f"^{name}") as caught:
        decoder.pair.target.generate(**values, custom_generate=decoder.custom_generate)
    assert "\n" not in str(caught.value) and decoder.requests == begun


def test_other_models_and_inputs_are_refused(decoder: TreeGraftDecoder) -> None:
    target, custom = decoder.pair.target, decoder.custom_generate
    begun = decoder.requests

    def refused(pattern: str, model: Any = target, **values: Any) -> None:
        with pytest.raises(InputError, match=pattern):
            model.generate(**values, max_new_tokens=5, custom_generate=custom)

    refused("^model=Llama.*not the object", tiny_llama(0), input_ids=ONE)
    refused("^assistant_model=Llama", input_ids=ONE, assistant_model=decoder.pair.mid)
    refused("^inputs_embeds", inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))
    refused("^input_ids: token ids are 0", input_ids=torch.tensor([[3, VOCAB]]))
    refused("^attention_mask", input_ids=BATCH, attention_mask=MASK.flip(1))
    refused("^attention_mask", input_ids=ONE, attention_mask=torch.zeros_like(ONE))
    cache = target.generate(
        ONE, max_new_tokens=2, return_dict_in_generate=True
    ).cache  # a stock cache that a caller may want to go on with
    refused("^cache=DynamicCache", input_ids=ONE, cache=cache)
    assert decoder.requests == begun


def test_a_second_request_within_one_is_found(decoder: TreeGraftDecoder) -> None:
    """Both would share the caches; rows of one batch have caches of their own."""

    class Meddler(Recorder):
        def put(self, value: Tensor) -> None:
            if value.shape == (1,):
                decoder.generate([3, 4], 2)

    with pytest.raises(RuntimeError, match="another request has begun"):
        decoder.pair.target.generate(
            ONE, max_new_tokens=9, streamer=Meddler(), custom_generate=decoder.custom_generate
        )
    same(decoder, input_ids=ONE, max_new_tokens=9)


def test_steps_want_their_order(decoder: TreeGraftDecoder) -> None:
    """Whoever chooses asks for logits before each token, and may stop anywhere."""
    steps = Steps(decoder, [3, 4, 5, 3, 4], 30)
    expected = decode_plain(decoder.pair, [3, 4, 5, 3, 4], 9, ()).tokens
    for token in expected[:7]:
        assert int(steps.logits().argmax()) == int(steps.logits().argmax()) == token
        steps.commit(token)
    while steps.open:
        token = int(steps.logits().argmax())
        steps.commit(token)
    with pytest.raises(ValueError, match="ask for its logits first"):
        steps.commit(token)
    steps.close("length")
    assert decoder.generate([3, 4, 5, 3, 4], 9, ()).tokens == expected


def test_other_functions_are_called_as_before(decoder: TreeGraftDecoder) -> None:
    """Only TreeGraft's calls are handed the streamer; the class is untouched."""
    target, seen = decoder.pair.target, []
    assert decoder.custom_generate.decoder is decoder

    def other(model: Any, input_ids: Tensor, note: str = "", **values: Any) -> Tensor:
        seen.append((note, sorted(values)))
        return input_ids

    for model in (target, tiny_llama(0)):
        model.generate(ONE, max_new_tokens=3, custom_generate=other, note="x", streamer=Recorder())
    assert seen[0] == seen[1] and seen[0][0] == "x"
    assert "_extract_generation_mode_kwargs" not in tiny_llama(0).__dict__
    copied = copy.deepcopy(target)
    assert (
        copied.generate(ONE, max_new_tokens=6).tolist()
        == target.generate(ONE, max_new_tokens=6).tolist()
    )


def test_a_folder_is_a_custom_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder holds the settings; streamer, criteria and processors go through it, too."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    target, mid = tiny_llama(0), tmp_path / "mid"
    tiny_llama(0).save_pretrained(mid)
    word_tokenizer().save_pretrained(mid)
    folder = tmp_path / "treegraft"
    config = DraftingConfig(3, 4, 12)
    written = write_custom_generate(folder, mid, [1, 0, 1], config, mid, runtime=AS_DEFINED)
    assert "pickle" not in written.read_text() and str(mid) in written.read_text()
    calls = []
    for custom in ({}, {"custom_generate": str(folder), "trust_remote_code": True}):
        streamer = Recorder()
        found = target.generate(
            input_ids=ONE,
            max_new_tokens=14,
            repetition_penalty=1.2,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([StopAfter(11)]),
            **custom,
        )
        calls.append((found.tolist(), streamer.calls))
    assert calls[0] == calls[1] and len(calls[0][0][0]) == 16
    (opened,) = target._treegraft_decoders.values()
    assert opened.config == config and opened.last[0].tokens == calls[1][0][0][5:]
    target.generate(ONE, max_new_tokens=3, custom_generate=str(folder), trust_remote_code=True)
    assert list(target._treegraft_decoders.values()) == [opened]
