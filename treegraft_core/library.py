"""The decoder as a library: opened in one call, fed texts, used from ``model.generate``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treegraft_core.artifact import SchedulerArtifact
from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.fit_check import check_scheduler
from treegraft_core.guard import RuntimeConfig
from treegraft_core.head import TrainedHead
from treegraft_core.latency import LatencyProfile
from treegraft_core.models import check_tree_attention
from treegraft_core.packed import pack_linears
from treegraft_core.pair import (
    Pair,
    eos_tokens,
    load_mid,
    load_pair,
    load_target,
    plain_generation,
)
from treegraft_core.prompts import chat_ids, check_text
from treegraft_core.sampling import GREEDY, Sampling
from treegraft_core.schedulers import DistilledScheduler, FixedSchedule, Scheduler
from treegraft_core.small import SmallDrafter
from treegraft_core.text_pieces import TextPieces
from treegraft_core.warm_up import warm_up_profile

if TYPE_CHECKING:
    from treegraft_core.custom_generate import CustomGenerate
    from treegraft_core.decoder import TreeGraftDecoder
    from treegraft_core.rounds import Generation

PROFILE_FILE = "profile.json"


class Library:
    """What a decoder offers to programs; `TreeGraftDecoder` is its only heir.

    Attributes
    ----------
    last : list of Generation
        Statistics of the last ``model.generate(..., custom_generate=...)``, one a row.
    """

    pair: Pair
    last: Sequence[Generation] = ()

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel,
        mid: Any,
        scheduler: Any = None,
        drafting: DraftingConfig | None = None,
        profile: LatencyProfile | str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        runtime: RuntimeConfig | None = None,
        cache: Path | str | None = None,
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_calls: int | None = None,
        small: SmallDrafter | None = None,
        allow: Sequence[str] = (),
        **options: Any,
    ) -> TreeGraftDecoder:
        """Open a pair and a scheduler; return a decoder that is ready.

        Parameters
        ----------
        target : str, path or PreTrainedModel
            Local folder, hub id, ``embedded:smollm2-135m-instruct``, or a loaded model, which
            stays as it is and keeps its ``generation_config``.
        mid : str, path, PreTrainedModel or another mid drafter
            Folder or hub id of the mid drafter, or one that is loaded
            (:mod:`treegraft_core.mid`).
        scheduler : optional
            A folder of ``stage=export``, a ``.py`` literal or a hub id, a `SchedulerArtifact`, any
            `Scheduler`, ``"all_small"``, ``"all_mid"``, or bits: ``"1,0,1,0,1"``, ``[1, 0, 1]``.
            Default: the mid and the small drafter by turns, mid first; the paper's fixed schedule.
        drafting : DraftingConfig, optional
            Default: depth and widths that the scheduler was trained with, else the paper's.
        profile : LatencyProfile or path, optional
            From ``stage=profile``. Default: ``profile.json`` in the scheduler's folder; else a
            distilled scheduler gets what a warm-up of a second or so measures (`warm_up_profile`).
        device, dtype, cache, trust_remote_code
            As for :func:`treegraft_core.load_pair`. A loaded target says device and dtype itself.
        runtime : RuntimeConfig, optional
            As for the decoder.
        tokenizer : PreTrainedTokenizerBase, optional
            Of a loaded target, which brings none.
        max_calls, allow
            Of a distilled scheduler: see `DistilledScheduler`.
        small : SmallDrafter, optional
            In place of ``drafting.small``.
        **options
            Other arguments of `TreeGraftDecoder`.

        Raises
        ------
        InputError
            If something cannot be loaded or does not fit; the message names it.

        Examples
        --------
        >>> from treegraft_core import TreeGraftDecoder  # doctest: +SKIP
        >>> decoder = TreeGraftDecoder.from_pretrained(  # doctest: +SKIP
        ...     "embedded:smollm2-135m-instruct",
        ...     "data/drafters/smollm2-135m-4l",
        ...     scheduler="path/to/scheduler",
        ... )
        >>> for piece in decoder.stream_text("What is a tree?", 64, chat=True):  # doctest: +SKIP
        ...     print(piece, end="", flush=True)
        """
        chosen = open_scheduler(scheduler, drafting or DraftingConfig(), max_calls, allow)
        drafting = fitting(chosen, drafting)
        drafting = drafting if small is None else replace(drafting, small=small)
        if profile is None and isinstance(scheduler, (str, Path)):
            beside = Path(scheduler) / PROFILE_FILE
            profile = beside if beside.is_file() else None
        if isinstance(profile, (str, Path)):
            profile = LatencyProfile.load(profile)
        pair = open_pair(target, mid, tokenizer, device, dtype, cache, trust_remote_code)
        if profile is None and chosen.reads_signals:
            check_scheduler(chosen, pair, drafting, None)
            profile = warm_up_profile(cls, pair, drafting)
        make: Any = cls
        decoder: TreeGraftDecoder = make(
            pair, chosen, drafting, profile, runtime=runtime, **options
        )
        return decoder

    @property
    def custom_generate(self) -> CustomGenerate:
        """What ``model.generate`` takes as ``custom_generate``.

        ``model`` is the decoder's target, the same object. See
        :mod:`treegraft_core.custom_generate`, also for what this does to that object.

        Examples
        --------
        >>> model.generate(**inputs, custom_generate=decoder.custom_generate)  # doctest: +SKIP
        """
        from treegraft_core.custom_generate import CustomGenerate, hand_over

        hand_over(self.pair.target)
        return CustomGenerate(self)  # type: ignore[arg-type]

    def prompt_ids(self, prompt: Sequence[int] | str, chat: bool | None = None) -> Sequence[int]:
        """Return a prompt's token ids; ``chat`` says how a text becomes tokens (see `generate`).

        Raises
        ------
        InputError
            If a text comes without ``chat``, token ids with it, or the text is empty.
        """
        if not isinstance(prompt, str):
            if chat is not None:
                raise InputError(f"chat={chat}: is for a text; the prompt is token ids already")
            return prompt
        if chat is None:
            raise InputError(
                "chat=None: say how the text becomes tokens: chat=True for the tokenizer's chat "
                "template, chat=False to tokenize it as it stands"
            )
        check_text(prompt, "prompt_ids")
        if not prompt.strip():
            raise InputError("prompt_ids='': empty prompt; give a text")
        if not chat:
            return list(self.pair.tokenizer(prompt)["input_ids"])
        if not self.pair.tokenizer.chat_template:
            raise InputError("chat=True: the tokenizer has no chat template; give chat=False")
        return chat_ids(self.pair.tokenizer, [{"role": "user", "content": prompt}])

    def generate_many(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        chat: bool | None = None,
    ) -> list[Generation]:
        """Generate for each prompt, one after another over the same caches.

        Arguments are as for `generate`; with sampling, prompt i takes ``sampling.seed + i``.

        Returns
        -------
        list of Generation
            In the order of ``prompts``.

        Raises
        ------
        InputError
            If a prompt is bad; all are checked before the first one is decoded.
        """
        decoder: TreeGraftDecoder = self  # type: ignore[assignment]
        if isinstance(prompts, str):
            raise InputError("prompts: is one text; give a list of prompts, or call generate")
        texts = []
        for i, prompt in enumerate(prompts):
            try:
                texts.append(decoder.check(self.prompt_ids(prompt, chat), max_new_tokens))
            except InputError as error:
                raise InputError(f"prompts[{i}]: {error}") from error
        return [
            decoder.generate(
                text,
                max_new_tokens,
                eos_token_ids,
                sampling=replace(sampling, seed=sampling.seed + i),
            )
            for i, text in enumerate(texts)
        ]

    def stream_text(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        result: Generation | None = None,
        sampling: Sampling = GREEDY,
        chat: bool | None = None,
        skip_special_tokens: bool = True,
    ) -> Iterator[str]:
        """Yield the answer's text as it grows; arguments as for `generate` and `stream`.

        A piece never ends within a character; the pieces together are the text of all tokens.
        """
        decoder: TreeGraftDecoder = self  # type: ignore[assignment]
        text = TextPieces(self.pair.tokenizer, skip_special_tokens)
        for tokens in decoder.stream(prompt, max_new_tokens, eos_token_ids, result, sampling, chat):
            piece = text.add(tokens)
            if piece:
                yield piece
        rest = text.end()
        if rest:
            yield rest


def open_scheduler(
    scheduler: Any,
    drafting: DraftingConfig,
    max_calls: int | None = None,
    allow: Sequence[str] = (),
) -> Scheduler:
    """Return the scheduler that is meant; see `Library.from_pretrained`."""
    if isinstance(scheduler, str) and re.fullmatch(r"[01](,?[01])*", scheduler):
        scheduler = [int(bit) for bit in re.findall("[01]", scheduler)]
    named = {
        None: [1 - k % 2 for k in range(drafting.depth)],
        "all_small": [0] * drafting.depth,
        "all_mid": [1] * drafting.depth,
    }
    if scheduler is None or isinstance(scheduler, str):
        scheduler = named.get(scheduler, scheduler)
    if isinstance(scheduler, (str, Path)):
        scheduler = SchedulerArtifact.from_pretrained(scheduler)
    if isinstance(scheduler, SchedulerArtifact):
        return DistilledScheduler(scheduler, max_calls, allow)
    for name, value in (("max_calls", max_calls), ("allow", allow or None)):
        if value is not None:
            raise InputError(f"{name}={value}: is for a distilled scheduler; leave it out")
    if isinstance(scheduler, Sequence):
        return FixedSchedule(scheduler)
    if callable(getattr(scheduler, "decide", None)) and hasattr(scheduler, "reads_signals"):
        found: Scheduler = scheduler
        return found
    raise InputError(
        f"scheduler={type(scheduler).__name__}: give a path, an artifact, bits such as 1,0,1,0,1, "
        "all_small, all_mid, or an object with decide and reads_signals"
    )


def fitting(scheduler: Scheduler, drafting: DraftingConfig | None) -> DraftingConfig:
    """Return ``drafting``, or the default with the scheduler's depth and widths.

    Raises
    ------
    InputError
        If both have a depth, and not the same.
    """
    depth: int | None = None
    widths: dict[str, Any] = {}
    if isinstance(scheduler, DistilledScheduler):
        depth, widths = scheduler.artifact.depth, dict(scheduler.artifact.trained.widths)
    elif isinstance(scheduler, FixedSchedule):
        depth = len(scheduler.bits)
    if drafting is None:
        return DraftingConfig() if depth is None else DraftingConfig(depth=depth, **widths)
    if depth is not None and depth != drafting.depth:
        raise InputError(
            f"drafting.depth={drafting.depth}: the scheduler decides {depth} steps; give "
            f"DraftingConfig(depth={depth}) or another scheduler"
        )
    return drafting


def open_pair(
    target: str | Path | PreTrainedModel,
    mid: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    cache: Path | str | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Return a pair of paths, loaded models, or one of each; see `Library.from_pretrained`."""
    named = isinstance(mid, (str, Path))
    if not isinstance(target, PreTrainedModel):
        if tokenizer is not None:
            raise InputError(f"tokenizer={type(tokenizer).__name__}: {target} has its own")
        if named:
            return load_pair(
                str(target), str(mid), "pair", device, dtype, cache, True, trust_remote_code
            )
    home = Path(cache) if cache else None
    vocabulary = None
    if isinstance(target, PreTrainedModel):
        model, tokenizer = _loaded_target(target, tokenizer, device, dtype)
    else:
        model, tokenizer = load_target(str(target), device, dtype, home, trust_remote_code)
        pack_linears(model)
    if named:
        mid, vocabulary = load_mid(str(mid), model, tokenizer, home, trust_remote_code)
        if isinstance(mid, PreTrainedModel | TrainedHead):
            pack_linears(mid)
    elif isinstance(mid, PreTrainedModel):
        _check_ready(mid, "mid")
    elif not callable(getattr(mid, "open", None)):
        raise InputError(
            f"mid={type(mid).__name__}: give a folder, a hub id, a transformers causal LM, or a "
            "drafter as treegraft_core.mid describes"
        )
    if isinstance(mid, PreTrainedModel) and mid.device != model.device:
        raise InputError(f"mid: is on {mid.device}, the target on {model.device}; move it there")
    for role, loaded in (("target", model), ("mid", mid)):
        if isinstance(loaded, PreTrainedModel):
            check_tree_attention(loaded, role)
    eos = eos_tokens(model, tokenizer)
    if not isinstance(target, PreTrainedModel):
        plain_generation(model)
    return Pair("pair", model, mid, tokenizer, vocabulary, eos)


def _loaded_target(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, device: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if tokenizer is None:
        raise InputError("tokenizer=None: a loaded target brings none; give tokenizer=tokenizer")
    for name, value in (("device", device), ("dtype", dtype)):
        if value != "auto":
            raise InputError(
                f"{name}={value}: the target is loaded already, on {target.device} in "
                f"{target.dtype}; leave it out, or move the model with target.to"
            )
    _check_ready(target, "target")
    return target, tokenizer


def _check_ready(model: PreTrainedModel, role: str) -> None:
    if model.training:
        raise InputError(f"{role}={type(model).__name__}: is in training mode; call model.eval()")
