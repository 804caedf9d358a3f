"""Damaged and hostile inputs, and the judge of what reading them may do."""

from __future__ import annotations

import gc
import json
import pickle
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from treegraft_core import InputError

HANG_SECONDS = 20
MOST_MUTATIONS = 4

ODD_TEXTS = [
    *("\0", "\x1b[2J", "\u2028", "\u202e", "\ufeff", "\ud800", "\udfff\ud800", "é", "𝕏"),
    *("NaN", "-Infinity", "1e999", "-1", "0", "9" * 400, "9" * 5000, "0x7f", "1_0", "true", "null"),
    *("[" * 40, "{" * 40, '{"a":' * 30, "[" * 3000, '{"a":' * 3000, "(" * 300, "-" * 3000),
    *("\\ud800", "\\u0000", "${", "${seed}", "${oc.env:HOME}", "${oc.create:{a: 1}}"),
    *("&a [*a]", "*a", "!!python/object/apply:os.system [true]", "../../..", "/etc/passwd"),
    *("\r", "\n\n", "\t", ",", ":", "=", "_target_", "@", "~", "%s%n", "<<", "- ", "? ", "''"),
    "\u0301" * 50,
]
"""Pieces that have broken readers of text before."""

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**70, -(10**30), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")),
    *("", " ", "x", "\ud800", "\0", "a\nb", "1", "__class__", "x" * 2000),
    *([], [[]], {}, {"a": {}}, [None], [1, "x"], {"": 0}, list(range(50))),
]
"""Values of every type that JSON has, and the numbers that do not fit in a machine's."""


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def payloads(canary: Path) -> list[bytes]:
    """Return texts and pickles that create ``canary`` if anything executes them."""
    call = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    texts = [
        call,
        f"SCHEDULER_ARTIFACTS = {call}\n",
        f"{call}\nSCHEDULER_ARTIFACTS = {{}}\n",
        f"!!python/object/apply:os.system ['touch {canary}']",
        f"_target_: os.system\ncommand: touch {canary}\n",
        f"hydra.callbacks.x={{_target_:pathlib.Path.touch,self:{canary}}}",
        f"stage.run._target_={call}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{call}",
    ]
    return [text.encode() for text in texts] + [
        pickle.dumps(Touch(canary), protocol=protocol) for protocol in (0, 2, 5)
    ]


# Mutations ------------------------------------------------------------------------------------


def mutate(data: bytes, kind: int, number: int, pieces: Sequence[bytes]) -> bytes:
    """Return ``data`` with one change; ``kind`` and ``number`` say which."""
    rng = random.Random(number)
    at = rng.randrange(len(data) + 1)
    to = min(len(data), at + rng.choice((1, 2, 8, 64)))
    if kind == 0:
        return data[:at]
    if kind == 1 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.choice((1, 1, 4))) + data[at:]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:
        one, two = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        return data[:one] + data[two : two + 16] + data[one:two] + data[two + 16 :]
    if kind in (5, 6):
        lines = data.split(b"\n")
        i = rng.randrange(len(lines))
        lines[i : i + 1] = [lines[i]] * (2 if kind == 5 else 0)
        return b"\n".join(lines)
    piece = rng.choice(pieces)
    return data[:at] + piece + data[at if kind == 7 else to :]


KINDS = 9
"""Kinds of `mutate`: 7 inserts a piece, 8 puts it in place of bytes."""


def damaged(seeds: Sequence[bytes], canary: Path) -> st.SearchStrategy[bytes]:
    """Return valid inputs with one to four changes."""
    pieces = [text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS] + payloads(canary)
    changes = st.lists(
        st.tuples(st.integers(0, KINDS - 1), st.integers(0, 2**32)), min_size=1,
        max_size=MOST_MUTATIONS,
    )  # fmt: skip

    def build(seed: bytes, steps: list[tuple[int, int]]) -> bytes:
        for kind, number in steps:
            seed = mutate(seed, kind, number, pieces)
        return seed

    return st.builds(build, st.sampled_from(list(seeds)), changes)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested lists and dicts."""
    yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from places(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return ``value`` with what is at ``path`` replaced; `places` itself removes it."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is places:
        del copy[path[0]]
    else:
        copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def changed(value: Any, canary: Path) -> st.SearchStrategy[Any]:
    """Return a valid value with one or two of its parts removed or of a wrong type or size."""
    odd = [*ODD_VALUES, places, *(p.decode("latin-1") for p in payloads(canary))]

    def build(steps: list[tuple[int, int]]) -> Any:
        found = value
        for where, what in steps:
            spots = list(places(found))
            found = put(found, spots[where % len(spots)], odd[what % len(odd)])
            if found is places:
                return None
        return found

    numbers = st.tuples(st.integers(0, 2**16), st.integers(0, len(odd) - 1))
    return st.lists(numbers, min_size=1, max_size=2).map(build)


def as_json(value: Any) -> bytes:
    """Return a value as JSON text, lone surrogates as escapes, NaN and numbers of any size."""
    return json.dumps(value).encode()


# The judge ------------------------------------------------------------------------------------


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise `TimeoutError` in what takes too long."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"hangs: more than {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(count: int, inputs: st.SearchStrategy[Any], read: Callable[[Any], Any]) -> int:
    """Read ``count`` inputs; return how many were refused.

    `InputError` with one line, or a result. Anything else that is raised fails the test.
    """
    ran = refused = 0

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def one(data: Any) -> None:
        nonlocal ran, refused
        ran += 1
        try:
            with no_hang():
                read(data)
        except InputError as error:
            refused += 1
            text = str(error)
            assert text.strip() and len(text.splitlines()) == 1, repr(text)
            assert not re.search(r"Traceback|object at 0x", text), text

    gc.collect()
    gc.freeze()  # what the imports made is not searched again with every few inputs
    try:
        one()
    finally:
        gc.unfreeze()
    assert ran >= count, f"only {ran} inputs of {count}"
    return refused
