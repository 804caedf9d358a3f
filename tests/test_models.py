"""A cached model reads what a fresh one reads: after any passes, cuts, failures and requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import VOCAB, tiny_llama
from tests.test_decoder import ARCHITECTURES
from treegraft_core import models
from treegraft_core.models import CachedModel, TreeLayer, Visibility

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(0),
    "one_layer": lambda: tiny_llama(3, layers=1),
    **{name: lambda name=name: random_model(name) for name in ARCHITECTURES},
}


def random_model(name: str) -> PreTrainedModel:
    """Return a random model of an architecture, float64."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], dtype=torch.float64)
    return model.eval().requires_grad_(False)


Make = Callable[[PreTrainedModel], CachedModel]


@pytest.fixture(params=["any_shape", "fixed_shapes"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes a cached model: as it is, and with the shapes of a compiled one."""
    monkeypatch.setattr(models, "compiled", lambda model: model.forward)
    return lambda model: CachedModel(model, request.param == "fixed_shapes")


class Request:
    """A text and a tree of drafts after it, kept in lists, beside the model that caches them."""

    def __init__(self, model: PreTrainedModel, cached: CachedModel, seed: int):
        self.model, self.cached = model, cached
        self.rng = np.random.default_rng(seed)
        self.begin()

    def begin(self) -> None:
        """Start another request on the same cache."""
        self.cached.reset()
        self.text: list[int] = []
        self.paths: list[list[int]] = []  # places of each draft's path after the text, its own last
        self.tokens: list[int] = []  # of every place

    def alone(self, tokens: list[int]) -> Tensor:
        """Return the logits after ``tokens`` by a plain forward without a cache."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]

    def check(self, logits: Tensor, texts: list[list[int]]) -> None:
        """Compare a pass's rows with plain forwards; the cache counts what was read."""
        for row, text in zip(logits, texts, strict=True):
            torch.testing.assert_close(row, self.alone(text), rtol=0, atol=1e-9)
        assert self.cached.length == len(self.tokens)

    def read_text(self, n: int) -> None:
        """Read more text in one causal pass; it follows the text directly."""
        assert not self.paths
        new = self.rng.integers(VOCAB, size=n).tolist()
        at = len(self.text)
        rows = np.sort(self.rng.choice(n, size=min(n, 3), replace=False))
        logits = self.cached.run(new, np.arange(at, at + n), rows=rows)
        self.text += new
        self.tokens += new
        self.check(logits, [self.text[: at + r + 1] for r in rows.tolist()])

    def read_drafts(self, n: int) -> None:
        """Read drafts in one pass, each under the text or an earlier draft."""
        at, first = len(self.text), len(self.tokens)
        for place in range(first, first + n):
            above = int(self.rng.integers(-1, len(self.paths)))
            self.paths.append([*(self.paths[above] if above >= 0 else []), place])
            self.tokens.append(int(self.rng.integers(VOCAB)))
        new = self.paths[-n:]
        deepest = max(map(len, new))
        slots = np.array([[*path, *[path[-1]] * (deepest - len(path))] for path in new])
        logits = self.cached.run(
            self.tokens[first:],
            [at + len(path) - 1 for path in new],
            Visibility(np.full(n, at), slots),
        )
        self.check(logits, [self.text + [self.tokens[p] for p in path] for path in new])

    def accept(self) -> None:
        """Keep the text and one path of drafts, or a part of the text alone."""
        path: list[int] = []
        if self.paths and self.rng.random() < 0.8:
            path = self.paths[int(self.rng.integers(len(self.paths)))]
        elif self.text and self.rng.random() < 0.5:
            del self.text[int(self.rng.integers(1, len(self.text) + 1)) :]
        self.cached.keep(len(self.text), path)
        self.text += [self.tokens[place] for place in path]
        self.tokens, self.paths = list(self.text), []
        assert self.cached.positions.tolist() == list(range(len(self.text)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_passes_and_cuts(
    name: str, seed: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, drafts, accepted paths, cuts and new requests; buffers grow again and again."""
    monkeypatch.setattr(models, "MIN_CAPACITY", 4)
    model = MODELS[name]()
    request = Request(model, make(model), seed)
    rng = np.random.default_rng(seed)
    grown = set()
    for _ in range(3):
        request.begin()
        request.read_text(int(rng.integers(1, 12)))
        for _ in range(6):
            for _ in range(int(rng.integers(0, 3))):
                request.read_drafts(int(rng.integers(1, 7)))
            request.accept()
            if rng.random() < 0.4:
                request.read_text(int(rng.integers(1, 4)))
            grown.add(request.cached._capacity)
    assert len(grown - {0}) > 1


def test_a_long_text_after_a_short_one_on_the_same_buffers(make: Make) -> None:
    """reset() forgets the text, not the buffers, and nothing of the old text is seen."""
    model = tiny_llama(0)
    cached = make(model)
    rng = np.random.default_rng(0)
    for length in (5, 60, 2, 90, 1):
        cached.reset()
        assert cached.length == 0
        text = rng.integers(VOCAB, size=length)
        cached.run(text, np.arange(length))
        more = rng.integers(VOCAB, size=4)
        logits = cached.run(more, np.arange(length, length + 4))
        fresh = CachedModel(model).run(np.concatenate([text, more]), np.arange(length + 4))
        torch.testing.assert_close(logits, fresh[-4:], rtol=0, atol=1e-9)


def test_rows_are_those_asked_for() -> None:
    """Also of a model whose forward cannot leave rows out."""
    for leaves_out in (True, False):
        cached = CachedModel(tiny_llama(0))
        assert cached._keeps_logits
        cached._keeps_logits = leaves_out
        everything = CachedModel(tiny_llama(0)).run([3, 4, 5, 6], np.arange(4))
        rows = np.array([3, 1])
        found = cached.run([3, 4, 5, 6], np.arange(4), rows=rows)
        torch.testing.assert_close(found, everything[rows], rtol=0, atol=1e-12)
        nothing = cached.run([7], [4], rows=np.zeros(0, np.int64))
        assert nothing.shape == (0, VOCAB)
        assert cached.length == 5


# Failures -------------------------------------------------------------------------------------


def fail_once(patch: pytest.MonkeyPatch, model: PreTrainedModel, layer: int) -> None:
    """Let the next pass fail in a layer, after the layers below have written to the cache."""
    forward = model.model.layers[layer].forward

    def broken(*arguments: object, **options: object) -> None:
        patch.setattr(model.model.layers[layer], "forward", forward)
        raise torch.OutOfMemoryError("CUDA out of memory")

    patch.setattr(model.model.layers[layer], "forward", broken)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("q", [1, 5, 40])
def test_a_failed_pass_leaves_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch, make: Make, layer: int, passes: int, q: int
) -> None:
    """Before and after the first passes, within the buffers and beyond; then as if nothing was."""
    monkeypatch.setattr(models, "MIN_CAPACITY", 16)
    model = tiny_llama(0, layers=3)
    cached, expected = make(model), CachedModel(model)
    for n in range(passes):
        for either in (cached, expected):
            either.run([5 + n, 6, 7], np.arange(3 * n, 3 * n + 3))
    at = 3 * passes
    positions = cached.positions.tolist()
    fail_once(monkeypatch, model, layer)
    with pytest.raises(torch.OutOfMemoryError):
        cached.run(np.arange(q), np.arange(at, at + q))
    assert cached.positions.tolist() == positions
    assert cached.cache.get_seq_length() == at
    for tokens in ([9, 10], [11], list(range(30))):
        length = cached.length
        where = np.arange(length, length + len(tokens))
        found, wanted = (m.run(tokens, where) for m in (cached, expected))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    for either in (cached, expected):
        either.keep(at, [at + 1, at + 2])
        either.run([3], [at + 2])
    found, wanted = (m.run([4], [at + 3]) for m in (cached, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("leaves_out", [True, False])
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_pass_that_fails_at_its_logits_is_not_counted(
    make: Make, leaves_out: bool, passes: int
) -> None:
    """Rows that do not exist are found out late: the keys and values do not count."""
    model = tiny_llama(0)
    cached, expected = make(model), CachedModel(model)
    for n in range(passes):
        for either in (cached, expected):
            either.run([5 + n, 6, 7], np.arange(3 * n, 3 * n + 3))
    at = 3 * passes
    cached._keeps_logits = leaves_out
    with pytest.raises(IndexError):
        cached.run([8, 9], [at, at + 1], rows=np.array([7]))
    assert cached.length == cached.cache.get_seq_length() == at
    found, wanted = (m.run([10, 11], [at, at + 1]) for m in (cached, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("at", range(2))
def test_buffers_that_cannot_grow_leave_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch, make: Make, at: int
) -> None:
    """No memory for one of the larger buffers: what was cached stays, and can grow later."""
    monkeypatch.setattr(models, "MIN_CAPACITY", 8)
    model = random_model("gemma3_sliding_and_full")
    cached, expected = make(model), CachedModel(model)
    for either in (cached, expected):
        either.run([5, 6, 7], np.arange(3))
        either.run([8, 9], [3, 4])
    made = 0

    def limited(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(self: Tensor, *size: object, **options: object) -> Tensor:
            nonlocal made
            made += 1
            if made > at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(self, *size, **options)

        return new

    assert len(cached._stores) >= 2
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", limited(Tensor.new_empty))
        patch.setattr(Tensor, "new_zeros", limited(Tensor.new_zeros))
        with pytest.raises(torch.OutOfMemoryError):
            cached.run(np.arange(20), np.arange(5, 25))
    assert cached.positions.tolist() == list(range(5))
    for either in (cached, expected):
        either.run([10, 11, 12], [5, 6, 7])
        either.keep(5, [6, 7])
        either.run(np.arange(20), np.arange(7, 27))
    found, wanted = (m.run([3], [27]) for m in (cached, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


# Memory ---------------------------------------------------------------------------------------


def test_bytes_of_a_pass_grow_with_it_and_with_the_cache() -> None:
    """Monotone, and at least what keys, values, mask and logits take."""
    model = tiny_llama(0)
    cached = CachedModel(model)
    cached.run(np.arange(40), np.arange(40))
    before = [cached.bytes_of_pass(q) for q in (1, 10, 100, 1000)]
    assert before == sorted(set(before))
    cached.run(np.arange(30), np.arange(40, 70))
    after = [cached.bytes_of_pass(q) for q in (1, 10, 100, 1000)]
    assert all(a > b for a, b in zip(after, before, strict=True))
    for q, found in zip((1, 10, 100, 1000), after, strict=True):
        layers, heads, head = 2, 2, 8
        keys_and_values = 2 * layers * heads * head * 8 * (70 + q)
        assert found >= keys_and_values + q * (70 + q) * 8 + q * VOCAB * 8


def test_buffers_of_one_shape_are_one_store() -> None:
    """One operation moves an accepted path in all layers: layers are views of the stores."""
    cached = CachedModel(tiny_llama(0, layers=3))
    cached.run([3, 4, 5], np.arange(3))
    cached.run([6, 7], [3, 4])
    assert len(cached._stores) == 2
    layers: list[TreeLayer] = cached.cache.layers  # type: ignore[assignment]
    for i, layer in enumerate(layers):
        for store, name in zip(cached._stores, ("keys", "values"), strict=True):
            assert getattr(layer, name).data_ptr() == store[i].data_ptr()
            assert store[i].shape[2] >= models.MIN_CAPACITY
