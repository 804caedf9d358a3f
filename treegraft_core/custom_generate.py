"""``model.generate(..., custom_generate=decoder.custom_generate)``: TreeGraft in ``transformers``.

``generate`` prepares everything as for its own method (``GenerationConfig``, processors, stopping
criteria, padding) and then calls the function given as ``custom_generate`` in place of
``GenerationMixin._sample``. `CustomGenerate` follows that method step by step: the same processors
called with the same arguments in the same order, the same draw, the same criteria, the same calls
of the streamer. Only the logits come otherwise: from verified draft trees, several tokens a pass.

Examples
--------
>>> decoder = TreeGraftDecoder.from_pretrained(  # doctest: +SKIP
...     model, "path/to/mid", scheduler="path/to/scheduler", tokenizer=tokenizer
... )
>>> model.generate(**inputs, custom_generate=decoder.custom_generate)  # doctest: +SKIP
>>> [generation.mean_accepted for generation in decoder.last]  # doctest: +SKIP
"""

from __future__ import annotations

import pprint
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.files import write_text
from treegraft_core.guard import RuntimeConfig
from treegraft_core.pair import load_tokenizer
from treegraft_core.small import NGRAM
from treegraft_core.stepping import Steps

if TYPE_CHECKING:
    from treegraft_core.decoder import TreeGraftDecoder

HOOK = "_extract_generation_mode_kwargs"
"""The method of ``generate`` that decides which of its arguments a function gets."""

UNUSED = {"use_cache", "logits_to_keep", "tokenizer", "assistant_tokenizer", "inputs_tensor"}
"""Arguments that change no token here. The decoder keeps its own caches."""


class CustomGenerate:
    """What ``generate`` calls in place of its own method; made by ``decoder.custom_generate``.

    Everything that ``generate`` takes for greedy decoding and sampling holds exactly as in the
    stock method, for one row and for batches: the rows go on token by token together, each with
    caches of its own, so that processors and criteria see the batches that they would see there. A
    row that has ended shows them its last logits again. With the same ``torch`` seed sampling
    draws the stock method's tokens, up to rounding of the logits. Rows share no passes: batches
    save no time over one request after another.

    Ignored, since they change no token: ``use_cache``, ``cache_implementation`` and what belongs
    to it, ``compile_config``, ``prefill_chunk_size``. The ``cache`` of
    ``return_dict_in_generate`` is None.

    Parameters
    ----------
    decoder : TreeGraftDecoder
        ``model`` must be the very object that is its target.
    """

    def __init__(self, decoder: TreeGraftDecoder):
        self.decoder = decoder

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        handed_over: bool = False,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Decode; arguments and result are those of ``GenerationMixin._sample``.

        ``decoder.last`` then holds one `Generation` a row, with the statistics of its rounds.

        Raises
        ------
        InputError
            If an argument cannot be honoured. Nothing has been decoded then.
        """
        if model is not self.decoder.pair.target or not handed_over:
            raise InputError(
                f"model={type(model).__name__}: not the object that the decoder has as its "
                "target; give that object to TreeGraftDecoder.from_pretrained(model, mid, "
                "tokenizer=tokenizer), or call decoder.pair.target.generate"
            )
        check_config(generation_config, len(input_ids))
        prompts = check_inputs(input_ids, model_kwargs, model.get_input_embeddings().weight)
        limit = getattr(generation_config, "max_length", None) or input_ids.shape[1] + 1
        steps: list[Steps] = []
        for row, prompt in enumerate(prompts):
            decoder = self.decoder if row == 0 else self.decoder.sibling()
            steps.append(Steps(decoder, prompt, limit - input_ids.shape[1]))
        self.decoder.last = [step.result for step in steps]
        return sample(
            steps, input_ids, logits_processor, stopping_criteria, generation_config, streamer
        )


def hand_over(model: PreTrainedModel) -> None:
    """Let ``model.generate`` pass ``streamer`` and ``tokenizer`` on to a `CustomGenerate`.

    transformers 5.24 drops both when ``custom_generate`` is a function: a streamer would get the
    prompt and never its end, and ``stop_strings`` would miss the tokenizer. Only calls with a
    `CustomGenerate` change; the model's class is left alone.
    """
    if not hasattr(type(model), HOOK):
        raise InputError(
            f"model={type(model).__name__}: this version of transformers has no {HOOK}; use "
            "transformers 5.24, or decoder.generate"
        )
    if not isinstance(model.__dict__.get(HOOK), partial):
        setattr(model, HOOK, partial(_mode_arguments, model))


def _mode_arguments(
    model: PreTrainedModel,
    custom_generate: Callable[..., Any] | str | None,
    kwargs: dict[str, Any],
    synced_gpus: bool | None,
    assistant_model: PreTrainedModel | None,
    streamer: BaseStreamer | None,
) -> dict[str, Any]:
    stock = partial(getattr(type(model), HOOK), model)
    if not isinstance(custom_generate, CustomGenerate):
        found: dict[str, Any] = stock(
            custom_generate, kwargs, synced_gpus, assistant_model, streamer
        )
        return found
    if assistant_model is not None:
        raise _refused("assistant_model", type(assistant_model).__name__, "the drafters assist")
    found = stock(None, kwargs, synced_gpus, None, streamer)
    if found.pop("synced_gpus", False):
        raise _refused("synced_gpus", True, "the decoder runs on one device")
    return found | {"handed_over": True}


def _refused(name: str, value: object, why: str) -> InputError:
    shown = str(value).splitlines()[0][:60]
    return InputError(
        f"{name}={shown}: not with custom_generate=TreeGraft ({why}); leave it out, or leave "
        "custom_generate out"
    )


def check_config(config: GenerationConfig, rows: int) -> None:
    """Raise `InputError` for the first setting that cannot be honoured; names it."""

    def given(name: str) -> Any:
        return getattr(config, name, None)

    if (given("num_beams") or 1) > 1:
        raise _refused("num_beams", config.num_beams, "no beam search")
    other = "it is another way of decoding"
    for name in ("constraints", "force_words_ids", "use_mtp", "dola_layers"):
        if given(name):
            raise _refused(name, given(name), other)
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if given(name) is not None:
            raise _refused(name, given(name), "the drafters assist")
    contrastive = not config.do_sample and (given("top_k") or 0) > 1
    if contrastive and (given("penalty_alpha") or 0) > 0:
        raise _refused("penalty_alpha", config.penalty_alpha, other)
    for name in ("output_attentions", "output_hidden_states"):
        if given(name):
            raise _refused(name, True, "passes over a tree hold more than the committed tokens")
    for name in ("output_scores", "output_logits"):
        if given(name) and config.return_dict_in_generate and rows > 1:
            raise _refused(name, True, f"for one row only, and there are {rows}")


def check_inputs(
    input_ids: Tensor, model_kwargs: dict[str, Any], embeddings: Tensor
) -> list[list[int]]:
    """Return each row's tokens without its padding.

    Parameters
    ----------
    input_ids : Tensor, shape ``[rows, tokens]``
        Prompts, padded on the left.
    model_kwargs : dict
        What ``generate`` prepared for the model.
    embeddings : Tensor, shape ``[vocabulary, hidden]``
        The target's.

    Raises
    ------
    InputError
        If the padding is not on the left, or something else would reach the model.
    """
    others = dict(model_kwargs)
    mask, positions = others.pop("attention_mask", None), others.pop("position_ids", None)
    for name in ("cache", "past_key_values"):
        cache = others.pop(name, None)
        if getattr(cache, "_is_user_defined", False):
            raise _refused(name, type(cache).__name__, "the decoder keeps its own caches")
    for name, value in others.items():
        if name not in UNUSED and value is not None:
            raise _refused(name, type(value).__name__, "the decoder reads token ids alone")
    real = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    if real.shape != input_ids.shape or not input_ids.shape[1] or not bool(real[:, -1].all()):
        raise _mask_error(real, input_ids)
    if bool((real.diff(dim=1) < 0).any()):
        raise _mask_error(real, input_ids)
    counted = (real.cumsum(-1) - 1).to(input_ids.device)
    if positions is not None and bool(((positions != counted) & (real != 0)).any()):
        raise _refused("position_ids", positions.tolist()[0], "tokens stand in their order")
    vocabulary = len(embeddings)
    if bool(((input_ids < 0) | (input_ids >= vocabulary)).any()):
        raise InputError(f"input_ids: token ids are 0 … {vocabulary - 1}; check the tokenizer")
    kept = zip(input_ids, real.bool(), strict=True)
    return [row[seen.to(row.device)].tolist() for row, seen in kept]


def _mask_error(mask: Tensor, input_ids: Tensor) -> InputError:
    return InputError(
        f"attention_mask, shape {list(mask.shape)}, of input_ids, shape {list(input_ids.shape)}: "
        "every row must hold tokens, with padding to their left alone; set "
        "tokenizer.padding_side='left'"
    )


def sample(
    steps: Sequence[Steps],
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None = None,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Follow ``GenerationMixin._sample``, with logits from `Steps`, one for each row."""
    wants = config.return_dict_in_generate
    scores: tuple[Tensor, ...] | None = () if wants and config.output_scores else None
    raw: tuple[Tensor, ...] | None = () if wants and config.output_logits else None
    ends = [c.eos_token_id for c in stopping_criteria if hasattr(c, "eos_token_id")]
    unfinished = torch.ones(len(steps), dtype=torch.long, device=input_ids.device)
    going = [True] * len(steps)
    rows: list[Tensor] = [torch.empty(0)] * len(steps)
    while any(going):
        # A row that met EOS is filled with padding; without EOS, finished rows go on as others.
        active = [b for b in range(len(steps)) if going[b] or not ends]
        for b in active:
            rows[b] = steps[b].logits()
        logits = torch.stack(rows).to(dtype=torch.float32, device=input_ids.device)
        processed = logits_processor(input_ids, logits)
        if scores is not None:
            scores += (processed,)
        if raw is not None:
            raw += (logits,)
        tokens = choose(processed, config.do_sample)
        if ends:
            pad: Any = config._pad_token_tensor
            pad = pad if pad is None else pad.to(input_ids.device)
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~stopping_criteria(input_ids, scores)
        shown = tokens.cpu()
        if streamer is not None:
            streamer.put(shown)
        chosen = shown.tolist()
        for b in active:
            steps[b].commit(chosen[b])
        still = [bool(row) for row in unfinished.tolist()]
        for b in range(len(steps)):
            over = not any(still) if not ends else going[b] and not still[b]
            if over:
                length, most = input_ids.shape[1], stopping_criteria.max_length
                steps[b].close(_reason(chosen[b], ends, most is not None and length >= most))
        going = still
    if streamer is not None:
        streamer.end()
    if not wants:
        return input_ids
    return GenerateDecoderOnlyOutput(sequences=input_ids, scores=scores, logits=raw)


def choose(scores: Tensor, do_sample: bool | None) -> Tensor:
    """Return one token a row of processed logits, as the stock method does."""
    if do_sample:
        return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
    return scores.argmax(-1)


def _reason(token: int, ends: Sequence[Any], full: bool) -> str:
    if any(bool((torch.as_tensor(end) == token).any()) for end in ends):
        return "eos"
    return "length" if full else "criteria"


# The folder form -------------------------------------------------------------------------------

OPENED = "_treegraft_decoders"
"""Attribute of a model: its decoders by their settings, so that each is opened once."""


def write_custom_generate(
    folder: Path | str,
    mid: Path | str,
    scheduler: Path | str | Sequence[int] | None = None,
    drafting: DraftingConfig | None = None,
    tokenizer: Path | str | None = None,
    profile: Path | str | None = None,
    runtime: RuntimeConfig | None = None,
) -> Path:
    """Write a folder for ``model.generate(..., custom_generate=folder, trust_remote_code=True)``.

    ``custom_generate/generate.py`` in it holds these settings and one call of
    `generate_with`. transformers copies that one file elsewhere before it imports it, so paths of
    this machine are written in full: write the folder anew when they move.

    Parameters
    ----------
    folder : path
        Made if it is not there; a model's own folder will do.
    mid, scheduler, profile
        As for `TreeGraftDecoder.from_pretrained`, as paths, hub ids or bits.
    drafting : DraftingConfig, optional
        With the n-gram small drafter.
    tokenizer : path or str, optional
        The target's (default: where the model was loaded from).
    runtime : RuntimeConfig, optional
        As for the decoder.

    Returns
    -------
    Path
        The written file.

    Examples
    --------
    >>> write_custom_generate("treegraft", "path/to/mid", "path/to/scheduler")  # doctest: +SKIP
    >>> model.generate(  # doctest: +SKIP
    ...     **inputs, custom_generate="treegraft", trust_remote_code=True
    ... )
    """
    if drafting is not None and drafting.small is not NGRAM:
        raise InputError(
            f"drafting.small={drafting.small.name}: a folder can only name the n-gram drafter; use "
            "decoder.custom_generate"
        )
    settings: dict[str, Any] = {
        "mid": _full(mid),
        "scheduler": _full(scheduler) if isinstance(scheduler, (str, Path)) else scheduler,
        "tokenizer": None if tokenizer is None else _full(tokenizer),
        "profile": None if profile is None else _full(profile),
        "drafting": None,
        "runtime": None if runtime is None else asdict(runtime),
    }
    if isinstance(settings["scheduler"], Sequence) and not isinstance(scheduler, (str, Path)):
        settings["scheduler"] = [int(bit) for bit in settings["scheduler"]]
    if drafting is not None:
        names = (f.name for f in fields(drafting) if f.name != "small")
        settings["drafting"] = {name: getattr(drafting, name) for name in names}
    path = Path(folder) / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = pprint.pformat(settings, sort_dicts=False)
    write_text(path, GENERATE_PY.format(settings=shown))
    return path


GENERATE_PY = '''"""TreeGraft for model.generate(custom_generate=FOLDER, trust_remote_code=True)."""

from treegraft_core.custom_generate import generate_with

SETTINGS = {settings}


def generate(model, **arguments):
    """Decode with a TreeGraft decoder of these settings."""
    return generate_with(model, SETTINGS, **arguments)
'''


def _full(place: Path | str) -> str:
    path = Path(place).expanduser()
    return str(path.resolve() if path.exists() else place)


def generate_with(model: PreTrainedModel, settings: dict[str, Any], **arguments: Any) -> Any:
    """Call ``model.generate(**arguments)`` with a decoder of what `write_custom_generate` wrote.

    The decoder is opened at the first call and kept with the model.
    """
    from treegraft_core.decoder import TreeGraftDecoder

    opened: dict[str, TreeGraftDecoder] = model.__dict__.setdefault(OPENED, {})
    key = repr(settings)
    if key not in opened:
        drafting, runtime = settings["drafting"], settings["runtime"]
        opened[key] = TreeGraftDecoder.from_pretrained(
            model,
            settings["mid"],
            settings["scheduler"],
            drafting=None if drafting is None else DraftingConfig(**drafting),
            profile=settings["profile"],
            runtime=None if runtime is None else RuntimeConfig(**runtime),
            tokenizer=load_tokenizer(settings["tokenizer"] or model.name_or_path, "target"),
        )
    return model.generate(custom_generate=opened[key].custom_generate, **arguments)
