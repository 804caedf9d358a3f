"""The systems of the paper's tables, built from the ``system`` configs; each decodes for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedModel

from pipeline.engine import drafting_config, runtime_config
from pipeline.features import check_numerator
from pipeline.peers import Output, assistant_of, generate
from pipeline.planning import OnlinePlanner
from pipeline.results import ROLES
from pipeline.value import ValueModel
from treegraft_core import (
    AS_DEFINED,
    Caches,
    DistilledScheduler,
    DraftingConfig,
    FixedSchedule,
    Generation,
    InputError,
    LatencyProfile,
    Pair,
    Sampling,
    Scheduler,
    SchedulerArtifact,
    TreeGraftDecoder,
    decode_plain,
)
from treegraft_core.packed import pack_linears
from treegraft_core.pair import DTYPES, load_target, plain_generation

SCHEDULES = ("small", "mid", "scheduler", "online")
PEERS = ("generate", "assisted", "prompt_lookup")
CANDIDATES = ("same", "generate", "compiled", *DTYPES)


Decode = Callable[[Sequence[int], int, Sampling], Output]
"""Takes prompt ids, the most new tokens, and how they are chosen."""


@dataclass
class System:
    """One row of the tables.

    Attributes
    ----------
    name, label, role : str
        Key in the config, name in tables, what it stands for in them.
    decode : callable
        Decodes one prompt.
    variants : dict of callable
        Ways to decode of which the fastest in the warm-up becomes ``decode``.
    bits : str or None
        Its schedule, if it always takes the same.
    config : DraftingConfig or None
        Its drafting rules; None for what drafts nothing here.
    ablation : bool
        It runs on ``evaluate.ablation_tasks`` only.
    exact : bool
        Its tokens are those of ``plain`` in the target's dtype.
    """

    name: str
    label: str
    role: str
    decode: Decode
    variants: dict[str, Decode] = field(default_factory=dict)
    bits: str | None = None
    config: DraftingConfig | None = None
    ablation: bool = False
    exact: bool = True


def output(done: Generation) -> Output:
    """Return a generation of this project's runtime: the first token came with the prompt."""
    return Output(done.tokens, max(0, len(done.tokens) - 1), done.decode_ms, done.rounds)


@dataclass
class Bench:
    """What all systems of a run share.

    Attributes
    ----------
    conf : DictConfig
        The composed configuration.
    pair : Pair
        Target and mid drafter.
    profile : LatencyProfile
        Of the pair on this machine.
    artifact : SchedulerArtifact
        The distilled scheduler.
    value : ValueModel or None
        For online planning.
    """

    conf: DictConfig
    pair: Pair
    profile: LatencyProfile
    artifact: SchedulerArtifact
    value: ValueModel | None

    def __post_init__(self) -> None:
        self.caches = Caches(self.pair)
        self.width = drafting_config(self.conf).width
        self._plain = self._decode_plain(self.pair, self.caches)
        self._by_transformers = self._generate()

    def build(self) -> dict[str, System]:
        """Return the configured systems, in the order of the config."""
        found = {}
        for name, options in self.conf.systems.items():
            try:
                system = self._build(str(name), options)
            except OmegaConfBaseException as error:
                raise InputError(f"systems.{name}: {str(error).splitlines()[0]}") from error
            if system is not None:
                found[system.name] = system
        missing = {"plain", "generate"} - set(found)
        if missing:
            raise InputError(
                f"system={list(found)}: lacks {', '.join(sorted(missing))}, which all others are "
                "compared with; add it"
            )
        return found

    def _build(self, name: str, options: DictConfig) -> System | None:
        if options.role not in ROLES:
            raise InputError(
                f"systems.{name}.role={options.role}: choose one of {', '.join(ROLES)}"
            )
        make = partial(System, name, str(options.label), str(options.role))
        if options.role == "plain":
            return make(self._plain)
        if options.role == "fastest":
            return make(self._plain, self._candidates(options), exact=False)
        if options.role == "peer":
            if options.get("kind") == "assisted" and not isinstance(self.pair.mid, PreTrainedModel):
                print(
                    f"note: systems.{name}: the mid drafter is no transformers model, which "
                    "assisted generation needs: left out",
                    flush=True,
                )
                return None
            return make(*self._peer(name, options))
        return self._tree(name, options, make)

    # Peers ----------------------------------------------------------------------------------

    def _peer(self, name: str, options: DictConfig) -> tuple[Decode, dict[str, Decode]]:
        if options.kind not in PEERS:
            raise InputError(
                f"systems.{name}.kind={options.kind}: choose one of {', '.join(PEERS)}"
            )
        if options.kind == "generate":
            return self._by_transformers, {}
        lengths = list(options.draft_tokens)
        if not lengths or any(type(n) is not int or n < 1 for n in lengths):
            raise InputError(
                f"systems.{name}.draft_tokens={lengths}: give one or more whole numbers of at "
                "least 1"
            )
        variants = {str(n): self._drafting_peer(options.kind, n) for n in lengths}
        return next(iter(variants.values())), variants

    def _drafting_peer(self, kind: str, length: int) -> Decode:
        if kind == "prompt_lookup":
            return self._generate(prompt_lookup_num_tokens=length)
        assistant = assistant_of(self.pair)
        assistant.generation_config.num_assistant_tokens = length
        return self._generate(assistant_model=assistant)

    def _generate(self, **named: Any) -> Decode:
        return lambda ids, n, sampling: generate(self.pair, ids, n, sampling, **named)

    # The fastest plain decoding -------------------------------------------------------------

    def _candidates(self, options: DictConfig) -> dict[str, Decode]:
        found: dict[str, Decode] = {}
        own = str(self.pair.target.dtype).removeprefix("torch.")
        for name in map(str, options.candidates):
            if name not in CANDIDATES:
                raise InputError(
                    f"systems.fastest.candidates: holds {name}; choose from {', '.join(CANDIDATES)}"
                )
            if name in ("same", own):
                found[f"own runtime, {own}"] = self._plain
            elif name == "generate":
                found[f"transformers generate, {own}"] = self._by_transformers
            elif name == "compiled":
                found[f"own runtime, compiled, {own}"] = self._decode_plain(
                    self.pair, Caches(self.pair, compile=True)
                )
            else:
                other = self._in_dtype(name)
                found[f"own runtime, {name}"] = self._decode_plain(other, Caches(other))
        if not found:
            raise InputError(
                f"systems.fastest.candidates=[]: give one or more of {', '.join(CANDIDATES)}"
            )
        return found

    def _decode_plain(self, pair: Pair, caches: Caches) -> Decode:
        return lambda ids, n, sampling: output(
            decode_plain(pair, ids, n, sampling=sampling, caches=caches, width=self.width)
        )

    def _in_dtype(self, dtype: str) -> Pair:
        conf = self.conf
        target, _ = load_target(
            str(conf.pair.target.path),
            str(self.pair.device),
            dtype,
            Path(conf.paths.cache) / "models",
            bool(conf.engine.trust_remote_code),
        )
        if conf.engine.pack:
            pack_linears(target)
        plain_generation(target)
        return replace(self.pair, target=target, mid=target)

    # Trees ----------------------------------------------------------------------------------

    def _tree(self, name: str, options: DictConfig, make: Callable[..., System]) -> System | None:
        rules = OmegaConf.merge(self.conf.drafting, options.drafting)
        if rules.expansion == "auto" and rules.depth > rules.verify_nodes:
            print(
                f"note: systems.{name}: a tree of drafting.depth={rules.depth} is more than "
                f"drafting.verify_nodes={rules.verify_nodes}: left out"
            )
            return None
        try:
            config = drafting_config(self.conf, rules)
        except InputError as error:
            raise InputError(f"systems.{name}: {error}") from error
        schedule = options.schedule
        given = list(schedule) if OmegaConf.is_list(schedule) else None
        if (given is None and schedule not in SCHEDULES) or (given and not set(given) <= {0, 1}):
            raise InputError(
                f"systems.{name}.schedule={schedule}: give one of {', '.join(SCHEDULES)}, or a "
                "list of one 0 or 1 for each drafting step"
            )
        if given is not None and len(given) != config.depth:
            print(
                f"note: systems.{name}.schedule={given} has {len(given)} steps, drafting.depth is "
                f"{config.depth}: left out"
            )
            return None
        bits = fixed_bits(schedule, config.depth)
        decoder = TreeGraftDecoder(
            self.pair,
            self._scheduler(str(schedule), bits),
            config,
            self.profile,
            runtime=runtime_config(self.conf) if options.guard else AS_DEFINED,
            log_picks=True,
            caches=None if options.guard and self.conf.runtime.compile else self.caches,
        )

        def decode(ids: Sequence[int], n: int, sampling: Sampling) -> Output:
            return output(decoder.generate(ids, n, sampling=sampling))

        system = make(decode, bits=bits, config=config, ablation=bool(options.ablation))
        return replace(system, label=f"{system.label} {bits}") if system.role == "fixed" else system

    def _scheduler(self, schedule: str, bits: str | None) -> Scheduler:
        if bits is not None:
            return FixedSchedule([int(bit) for bit in bits])
        if schedule == "scheduler":
            return DistilledScheduler(self.artifact, allow=list(self.conf.evaluate.allow))
        assert self.value is not None
        return OnlinePlanner(self.value, check_numerator(self.conf))


def fixed_bits(schedule: Any, depth: int) -> str | None:
    """Return the bits of a schedule that is always the same, or None."""
    if OmegaConf.is_list(schedule):
        return "".join(str(int(bit)) for bit in schedule)
    return {"small": "0" * depth, "mid": "1" * depth}.get(schedule)
