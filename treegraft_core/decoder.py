"""The runtime decoder: rounds of drafting and verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treegraft_core.context import Context
from treegraft_core.drafting import (
    DraftingConfig,
    MidCall,
    begin_mid_step,
    expand,
    mid_pool,
    prune,
    select_frontier,
    small_step,
)
from treegraft_core.errors import InputError
from treegraft_core.fit_check import check_scheduler
from treegraft_core.guard import Guard, Mode, RuntimeConfig
from treegraft_core.latency import LatencyProfile
from treegraft_core.library import Library
from treegraft_core.models import CachedModel, max_context
from treegraft_core.neural import MidDrafter
from treegraft_core.pair import Pair
from treegraft_core.rounds import Clock, Generation, Picks, Round
from treegraft_core.sampling import ARGMAX, GREEDY, OUTSIDE, Chooser, Sampling
from treegraft_core.schedulers import Scheduler, StepState
from treegraft_core.sequence import overwrite, unread, write_on
from treegraft_core.signals import signals
from treegraft_core.tree import DraftTree, IntArray
from treegraft_core.verify import (
    TreeRead,
    accept,
    argmaxes,
    chosen_log_p,
    read_tree,
    token_log_p,
    walk,
)


@dataclass
class Draft:
    """A round whose tree the target has read, and whose tokens nobody has chosen yet.

    Attributes
    ----------
    round_ : Round
        Its statistics so far.
    read : TreeRead
        The tree and the target's logits.
    clock : Clock
        Of the round.
    """

    round_: Round
    read: TreeRead
    clock: Clock

    @property
    def mode(self) -> Mode:
        """Whether the scheduler decided."""
        return "small" if self.round_.mode == "small" else "scheduled"


class TreeGraftDecoder(Library):
    """Decode a target losslessly with two drafters that grow one tree.

    Parameters
    ----------
    pair : Pair
        Target and mid drafter, see :func:`treegraft_core.load_pair`.
    scheduler : Scheduler
        Decides every drafting step.
    config : DraftingConfig, optional
        Widths and budgets.
    profile : LatencyProfile, optional
        Of this machine and pair; needed by a scheduler that reads T_tgt and T_mid, and by
        ``evaluation="auto"``, which without one evaluates the needed nodes only.
    keep_trees : bool
        Keep the token paths sent to verification in the statistics.
    log_signals : bool
        Put the signals into the statistics even if the scheduler does not read them.
    log_picks : bool
        Put where mid calls picked into the statistics.
    runtime : RuntimeConfig, optional
        Whether the guard may decode plainly or verify fewer nodes, and how passes run.
    caches : Caches, optional
        Shared with other decoders of the same pair, of which one decodes at a time (default: own).
    """

    def __init__(
        self,
        pair: Pair,
        scheduler: Scheduler,
        config: DraftingConfig | None = None,
        profile: LatencyProfile | None = None,
        keep_trees: bool = False,
        log_signals: bool = False,
        runtime: RuntimeConfig | None = None,
        log_picks: bool = False,
        caches: Caches | None = None,
    ):
        self.pair = pair
        self.scheduler = scheduler
        self.config = config or DraftingConfig()
        self.config.small.check_vocabulary(pair.target_vocab)
        self.profile = profile
        self.keep_trees = keep_trees
        self.log_signals = log_signals
        self.log_picks = log_picks
        if scheduler.reads_signals and profile is None:
            raise InputError(
                "profile=None: this scheduler reads T_tgt and T_mid; run stage=profile"
            )
        check_scheduler(scheduler, pair, self.config, profile)
        evaluation: str = self.config.evaluation
        if evaluation == "auto":
            evaluation = profile.evaluation if profile else "needed"
        self._everything = evaluation == "all"
        self.runtime = runtime or RuntimeConfig()
        bits = getattr(scheduler, "bits", (1,))
        self.guard = Guard(self.runtime, profile, has_schedule=any(bits))
        self._caches = caches or Caches(pair, self.runtime.compile)
        self._target = self._caches.target
        self._chooser = ARGMAX
        self._mid = MidDrafter(
            self._caches.mid,
            self.config.width,
            pair.vocabulary,
            pair.target_vocab,
            self.config.small,
        )
        self.max_context = max_context(pair.target)
        self._mid_context = max_context(pair.mid)
        self._deepest = self.config.deepest

    def sibling(self) -> TreeGraftDecoder:
        """Return a decoder like this one with caches of its own."""
        return TreeGraftDecoder(
            self.pair,
            self.scheduler,
            self.config,
            self.profile,
            self.keep_trees,
            self.log_signals,
            self.runtime,
            self.log_picks,
        )

    def generate(
        self,
        prompt_ids: Sequence[int] | str,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        sampling: Sampling = GREEDY,
        chat: bool | None = None,
    ) -> Generation:
        """Generate the target's own output: its greedy tokens exactly, or samples of its law.

        Parameters
        ----------
        prompt_ids : sequence of int or str
            Token ids of the prompt, at least one; or a text, then with ``chat``.
        max_new_tokens : int
            Most tokens to generate.
        eos_token_ids : sequence of int, optional
            Stop after any of these (default: the target's generation config).
        on_tokens : callable, optional
            Called with each round's new tokens.
        sampling : Sampling
            How the target's tokens are chosen (default: greedily). The tokens of one seed are the
            same under every scheduler, and those of `decode_plain`.
        chat : bool, optional
            A text is a user's turn, put into the tokenizer's chat template (True), or is
            tokenized as it stands (False).

        Raises
        ------
        InputError
            If the prompt is empty or as long as the model's context.
        """
        result = Generation()
        prompt = self.prompt_ids(prompt_ids, chat)
        for tokens in self.stream(prompt, max_new_tokens, eos_token_ids, result, sampling):
            if on_tokens is not None:
                on_tokens(tokens)
        return result

    def stream(
        self,
        prompt_ids: Sequence[int] | str,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        result: Generation | None = None,
        sampling: Sampling = GREEDY,
        chat: bool | None = None,
    ) -> Iterator[list[int]]:
        """Yield the new tokens of each round as soon as they are committed; see `generate`.

        ``result``, when given, is filled with the statistics as the rounds go by.
        """
        result = Generation() if result is None else result
        prompt_ids = self.prompt_ids(prompt_ids, chat)
        prompt = self.check(prompt_ids, max_new_tokens)
        eos = set(self.pair.eos_token_ids if eos_token_ids is None else eos_token_ids)
        started = self._now()
        context = self.start(prompt, sampling)
        request = self._caches.requests
        result.prefill_ms = 1e3 * (self._now() - started)
        started = self._now()
        self.guard.begin(max_new_tokens)
        result.decisions = self.guard.decisions
        new = [int(context.tokens[-1])]
        round_: Round | None = None
        while True:
            stop = clip(new, len(result.tokens), max_new_tokens, eos)
            result.tokens += new
            if round_ is not None:
                round_.committed = len(new)
            result.decode_ms = 1e3 * (self._now() - started)
            if stop is None and len(prompt) + len(result.tokens) >= self.max_context:
                stop = "context"
            if stop is not None:
                result.stopped = stop
                self.config.small.remember(result.tokens)
                yield new
                return
            yield new
            if self._caches.requests != request:
                raise RuntimeError(
                    "stream: another request has begun on this decoder; finish one before the "
                    "next, or use a decoder with caches of its own for each"
                )
            mode = self.guard.choose(len(context))
            if mode == "plain":
                round_, new = None, self.plain_step(context)
                result.plain_steps += 1
                continue
            round_, new = self.round(context, len(prompt), mode)
            new = new[: self.max_context - len(prompt) - len(result.tokens)]
            result.rounds.append(round_)

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return a request's prompt as a list, or raise `InputError`."""
        return check_prompt(prompt_ids, max_new_tokens, self.max_context, self.pair.target_vocab)

    def _now(self) -> float:
        self.pair.synchronize()
        return time.perf_counter()

    def start(self, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Context:
        """Read the prompt with both models and commit the target's first token.

        Returns
        -------
        Context
            Prompt and first token, which is the root of the first round.
        """
        self._chooser = Chooser(sampling)
        log_p, last = self._read(prompt)
        first = _next(self._chooser, prompt, last)
        return self._context([*prompt, first], log_p, last)

    def resume(self, tokens: Sequence[int], sampling: Sampling = GREEDY) -> Context:
        """Read committed tokens, of which the last becomes the root of the next round."""
        self._chooser = Chooser(sampling)
        return self._context(tokens, *self._read(tokens[:-1]))

    def _read(self, tokens: Sequence[int]) -> tuple[list[float], Tensor]:
        return self._caches.read(tokens, self.config.width, self._mid_fits(len(tokens) + 1))

    def _context(self, tokens: Sequence[int], log_p: list[float], last: Tensor) -> Context:
        log_p = log_p + token_log_p(last, tokens[-1:], self.config.width)
        return Context(tokens, log_p, self.config.max_ngram)

    def _mid_fits(self, context: int) -> bool:
        # A mid drafter with a shorter context than the target's leaves the rest to small steps.
        if context > self.max_context:
            return False
        return context + min(self._deepest, self.max_context - context) <= self._mid_context

    def rewind(self, length: int) -> None:
        """Cut both caches back to their first ``length`` committed tokens."""
        self._caches.rewind(length)

    @property
    def requests(self) -> int:
        """Requests begun on this decoder's caches so far."""
        return self._caches.requests

    def read_prompt(self, prompt: Sequence[int]) -> tuple[list[float], Tensor]:
        """Read a prompt for somebody who chooses the tokens; returns as `Caches.read`."""
        self._chooser = OUTSIDE
        return self._read(prompt)

    def first_context(self, tokens: Sequence[int], log_p: list[float], last: Tensor) -> Context:
        """Return prompt and first token as the context of the first round.

        ``log_p`` and ``last`` are those of `read_prompt`.
        """
        return self._context(tokens, log_p, last)

    def plain_step(self, context: Context) -> list[int]:
        """Decode one token with the target alone; ``context`` grows by it."""
        started = time.perf_counter()
        logits = self.plain_pass(context)
        tokens = [_next(self._chooser, context.tokens, logits)]
        self.end_plain(context, logits, tokens, started)
        return tokens

    def plain_pass(self, context: Context) -> Tensor:
        """Return the target's logits after ``context``, shape ``[1, vocabulary]``."""
        return self._target.run(context.tokens[-1:], [len(context) - 1])

    def end_plain(
        self, context: Context, logits: Tensor, tokens: list[int], started: float
    ) -> None:
        """Commit the one token chosen from a plain pass that began at ``started``, s."""
        at = len(context)
        context.extend(tokens, chosen_log_p(logits, tokens, self._chooser, self.config.width))
        if self.runtime.guard:
            self.guard.plain_step(at, 1e3 * (time.perf_counter() - started))
            self.guard.judge(context.tokens, self._deepest + 1)
            if self.guard.shadow_due(at):
                self._shadow(context)

    def _shadow(self, context: Context) -> None:
        started = time.perf_counter()
        tree, frontier = self._first_tree(context)
        for step in range(1, self.config.depth + 1):
            frontier = self.small_step(tree, frontier, context, step)
        kept = self.guard.budget(tree, prune(tree, self.config), len(context))
        self.guard.shadow(tree, kept, len(context), 1e3 * (time.perf_counter() - started))

    def _first_tree(self, context: Context) -> tuple[DraftTree, IntArray]:
        # A node at depth d sits at position len(context) - 1 + d, which the model must have.
        tree = DraftTree.from_root(int(context.tokens[-1]), self.max_context - len(context))
        return tree, np.zeros(1, np.int64)

    def round(
        self, context: Context, prompt_tokens: int, mode: Mode = "scheduled"
    ) -> tuple[Round, list[int]]:
        """Run one round on ``context``, which grows by the committed tokens.

        Parameters
        ----------
        context : Context
            Committed tokens, the last of which is the root.
        prompt_tokens : int
            Tokens of the prompt, which the scheduler reads.
        mode : {"scheduled", "small"}
            ``small`` draws small steps only.

        Returns
        -------
        Round
            Its statistics.
        list of int
            The A + 1 committed tokens.
        """
        draft = self.begin_round(context, prompt_tokens, mode)
        read = draft.read
        path, rows, tokens = walk(read.tree, read.order, read.logits, context.tokens, self._chooser)
        self.end_round(draft, context, path, rows, tokens)
        return draft.round_, tokens

    def begin_round(self, context: Context, prompt_tokens: int, mode: Mode = "scheduled") -> Draft:
        """Draft a tree and let the target read it; arguments as in `round`."""
        config, at = self.config, len(context)
        round_ = Round((), at, mode=mode)
        clock = Clock(round_.ms)
        self._mid.begin_round(context)
        tree, frontier = self._first_tree(context)
        may_call = mode == "scheduled" and self._mid_fits(at)
        clock.lap("accept")
        for step in range(1, config.depth + 1):
            state = self._state(tree, frontier, step, round_, prompt_tokens, clock)
            action = self.scheduler.decide(state) if may_call else 0
            clock.lap("scheduler")
            if action:
                frontier, call = self.mid_step(tree, frontier, step, round_)
                round_.calls.append(call)
                clock.lap("mid")
            else:
                frontier = self.small_step(tree, frontier, context, step)
                clock.lap("small")
            round_.schedule += (action,)
        kept = self.guard.budget(tree, prune(tree, config), at)
        clock.lap("prune")
        read = read_tree(self._target, tree, kept, context.tokens)
        clock.lap("verify")
        return Draft(round_, read, clock)

    def end_round(
        self,
        draft: Draft,
        context: Context,
        path: list[int],
        rows: list[int],
        tokens: list[int],
    ) -> None:
        """Commit what was chosen on a drafted tree; ``path``, ``rows``, ``tokens`` as from `walk`.

        ``context`` grows by the tokens; the caches keep what they share with it.
        """
        round_, tree, kept = draft.round_, draft.read.tree, draft.read.kept
        at = len(context)
        verdict = accept(
            self._target, draft.read, path, rows, tokens, self._chooser, self.config.width
        )
        draft.clock.lap("verify")
        self._mid.end_round(tree, verdict.path)
        context.extend(verdict.tokens, verdict.log_p)
        round_.accepted = len(verdict.path)
        round_.committed = len(verdict.tokens)
        round_.tree_nodes, round_.kept_nodes = len(tree), len(kept)
        round_.caught_up = self._mid.caught_up
        round_.ranks = verdict.ranks
        round_.pass_ms = self._mid.pass_ms
        draft.clock.lap("accept")
        if self.runtime.guard or self.runtime.budget == "auto":
            ms = sum(round_.ms.values())
            chosen = np.array(verdict.tokens)
            self.guard.round(draft.mode, tree, chosen, len(kept), at, round_.ms["verify"], ms)
        if self.keep_trees:
            round_.kept = [tuple(tree.path_tokens(int(node))) for node in kept]

    def _state(
        self,
        tree: DraftTree,
        frontier: IntArray,
        step: int,
        round_: Round,
        prompt_tokens: int,
        clock: Clock,
    ) -> StepState:
        state = StepState(
            step=step,
            bits=round_.schedule,
            depth=self.config.depth,
            prompt_tokens=prompt_tokens,
            target_ms=self.profile.target_ms if self.profile else float("nan"),
            mid_ms=self.profile.mid_ms if self.profile else float("nan"),
        )
        round_.frontiers.append(len(frontier))
        if self.scheduler.reads_signals or self.log_signals:
            values = signals(tree, frontier, self.config)
            round_.signals.append(values)
            state = replace(state, signals=values)
            clock.lap("signals")
        return state

    def small_step(
        self, tree: DraftTree, frontier: IntArray, context: Context, step: int
    ) -> IntArray:
        """Run one small step on ``tree``, in place; return N_{k+1}."""
        if self.config.structure == "sequence":
            return write_on(tree, frontier, context, step, self.config)
        return small_step(tree, frontier, context, step, self.config).frontier

    def mid_step(
        self, tree: DraftTree, frontier: IntArray, step: int, round_: Round | None = None
    ) -> tuple[IntArray, MidCall]:
        """Run one mid step on ``tree``, in place; return N_{k+1} and the counts of the call."""
        call = MidCall()
        if self.config.structure == "sequence":
            self._mid.evaluate(tree, unread(tree, frontier, call))
            return overwrite(tree, self._mid.rows, call), call
        pool = mid_pool(tree, frontier, self.config) if self.log_picks else None
        self._mid.evaluate(tree, begin_mid_step(tree, call, self._everything))
        picked, missing = select_frontier(tree, frontier, self._mid.rows, call, self.config)
        if not self._everything:
            self._mid.evaluate(tree, missing)
        if pool is not None and round_ is not None:
            round_.picks.append(where_picked(tree, frontier, picked, pool))
        return expand(tree, picked, self._mid.rows, self.config, step), call


class Caches:
    """The caches of both models, which several decoders of one pair may use in turn.

    A prompt that was the last one read is not read again.

    Parameters
    ----------
    pair : Pair
        Target and mid drafter.
    compile : bool
        As in `RuntimeConfig`.
    """

    def __init__(self, pair: Pair, compile: bool = False):
        self.target = pair.open_target(compile)
        self.mid = pair.open_mid(self.target, compile)
        self.requests = 0
        self._read: tuple[list[int], int] | None = None
        self._log_p: list[float] = []
        self._last = torch.empty(0)

    def read(self, tokens: Sequence[int], width: int, with_mid: bool) -> tuple[list[float], Tensor]:
        """Begin a request: read its tokens.

        Parameters
        ----------
        tokens : sequence of int
            Prompt, or prompt and committed tokens.
        width : int
            W of the table that log-probabilities are read from.
        with_mid : bool
            Read them with the mid drafter, too.

        Returns
        -------
        log_p : list of float
            The target's log p of each token, nats; 0 for the first.
        last : Tensor, shape ``[1, vocabulary]``
            Its logits after the last token.
        """
        self.requests += 1
        n = len(tokens)
        if self._read != (list(tokens), width) or self.target.length < n:
            self._read = None
            self.target.reset()
            self.mid.reset()
            logits = self.target.run(tokens, np.arange(n))
            self._log_p = [0.0, *token_log_p(logits[:-1], tokens[1:], width)]
            self._last = logits[-1:].clone()
            self._read = (list(tokens), width)
        self.target.keep(n)
        self.mid.keep(min(n, self.mid.length))
        if with_mid and self.mid.length < n:
            start = self.mid.length
            positions = np.arange(start, n)
            self.mid.run(tokens[start:], positions, rows=np.zeros(0, np.int64))
        return list(self._log_p), self._last

    def rewind(self, length: int) -> None:
        """Cut both caches back to their first ``length`` tokens."""
        if self._read is not None and length < len(self._read[0]):
            self._read = None
        for model in (self.target, self.mid):
            model.keep(min(length, model.length))


def where_picked(tree: DraftTree, frontier: IntArray, picked: IntArray, pool: IntArray) -> Picks:
    """Return where F_k lies by depth, and the sizes of the pools."""
    depths = tree.depth[frontier]
    level = int(np.isin(tree.depth[pool], depths).sum())
    offsets = (tree.depth[picked] - depths.max()).tolist() if len(frontier) else []
    return Picks(tuple(offsets), len(pool), level)


def _next(chooser: Chooser, tokens: Sequence[int] | IntArray, logits: Tensor) -> int:
    if chooser.sampling.untouched:
        return argmaxes(logits)(-1)
    return chooser.choose(tokens, logits[-1])


def check_prompt(
    prompt_ids: Sequence[int], max_new_tokens: int, max_context: int, vocab: int
) -> list[int]:
    """Return the prompt as a list, or say what is wrong with it."""
    prompt = [int(t) for t in prompt_ids]
    if not prompt:
        raise InputError("prompt_ids=[]: empty prompt; give at least one token")
    wrong = next((t for t in prompt if not 0 <= t < vocab), None)
    if wrong is not None:
        raise InputError(f"prompt_ids: holds {wrong}; token ids are 0 … {vocab - 1}")
    if len(prompt) >= max_context:
        raise InputError(
            f"prompt_ids: {len(prompt)} tokens do not fit the model's context of {max_context} "
            "with room for an answer; shorten the prompt"
        )
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    return prompt


def clip(new: list[int], have: int, limit: int, eos: set[int]) -> str | None:
    """Cut ``new`` in place after EOS or at the limit; return why generation stops, or None."""
    for i, token in enumerate(new):
        if have + i + 1 > limit:
            break
        if token in eos:
            del new[i + 1 :]
            return "eos"
    if have + len(new) >= limit:
        del new[limit - have :]
        return "length"
    return None


def decode_plain(
    pair: Pair,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] | None = None,
    sampling: Sampling = GREEDY,
    caches: Caches | None = None,
    width: int = 10,
) -> Generation:
    """Decode with the target alone, one token a pass; the baseline of every speed-up.

    Parameters
    ----------
    pair : Pair
        Its target decodes.
    prompt_ids, max_new_tokens, eos_token_ids, sampling
        As for `TreeGraftDecoder.generate`.
    caches : Caches, optional
        Shared with decoders of width ``width`` (default: own).
    width : int
        W of those decoders.
    """
    model = caches.target if caches else CachedModel(pair.target)
    limit = max_context(pair.target)
    prompt = check_prompt(prompt_ids, max_new_tokens, limit, pair.target_vocab)
    eos = set(pair.eos_token_ids if eos_token_ids is None else eos_token_ids)
    chooser = Chooser(sampling)
    result = Generation()
    pair.synchronize()
    started = time.perf_counter()
    if caches:
        _, logits = caches.read(prompt, width, with_mid=False)
    else:
        last = np.array([len(prompt) - 1])
        logits = model.run(prompt, np.arange(len(prompt)), rows=last)
    text = [*prompt, _next(chooser, prompt, logits)]
    pair.synchronize()
    result.prefill_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    while True:
        new = text[-1:]
        stop = clip(new, len(result.tokens), max_new_tokens, eos)
        result.tokens += new
        if stop is None and len(text) >= limit:
            stop = "context"
        if stop is not None:
            break
        logits = model.run(text[-1:], [len(text) - 1])
        text.append(_next(chooser, text, logits))
    pair.synchronize()
    result.decode_ms = 1e3 * (time.perf_counter() - started)
    result.stopped = stop
    return result
