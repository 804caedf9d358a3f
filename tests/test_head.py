"""A trained head as mid drafter: its definition, its cache, decoding, enumeration, its folders."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.check import check_states
from pipeline.head_training import Batch, unroll
from pipeline.rows import enumerate_text
from pipeline.texts import Text, fingerprint
from tests.conftest import VOCAB, tiny_llama, word_tokenizer
from tests.reference.eagle import head_logits
from treegraft_core import (
    AS_DEFINED,
    DraftingConfig,
    FixedSchedule,
    InputError,
    TreeGraftDecoder,
    decode_plain,
)
from treegraft_core.head import HeadConfig, TrainedHead
from treegraft_core.head_layouts import is_head, load_head, save_head
from treegraft_core.models import CachedModel, Visibility
from treegraft_core.pair import Pair
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import DraftTree
from treegraft_core.verify import token_log_p, verify

LAYERS = 6
CONFIG = DraftingConfig(depth=3, width=4, verify_nodes=16)
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15]
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 8, "eps": 1e-5, "theta": 5000.0}


def target_of(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_llama(0, layers=LAYERS, dtype=dtype)


def weights_of(size: int, rows: int, own: bool, seed: int = 3) -> dict[str, Tensor]:
    """Return random weights by the names of EAGLE-3."""
    torch.manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * 32),
        "midlayer.self_attn.q_proj.weight": (32, 2 * size),
        "midlayer.self_attn.k_proj.weight": (16, 2 * size),
        "midlayer.self_attn.v_proj.weight": (16, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, 32),
        "midlayer.mlp.gate_proj.weight": (40, size),
        "midlayer.mlp.up_proj.weight": (40, size),
        "midlayer.mlp.down_proj.weight": (size, 40),
        "lm_head.weight": (rows, size),
    }
    if own:
        shapes["embed_tokens.weight"] = (VOCAB, size)
    weights = {name: 0.4 * torch.randn(shape) for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    weights["norm.weight"] = 1 + 0.2 * torch.randn(size)
    return weights


def write_checkpoint(
    folder: Path, layout: str, size: int = 32, rows: int = VOCAB, **change: Any
) -> dict[str, Tensor]:
    """Write a random checkpoint in a published layout; return its weights as EAGLE-3 names them."""
    folder.mkdir(exist_ok=True)
    weights = weights_of(size, rows, own=size != 32)
    tensors = dict(weights)
    if rows < VOCAB:
        tokens = torch.randperm(VOCAB)[:rows].sort().values
        tensors["d2t"] = tokens - torch.arange(rows)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][tokens] = True
    shape = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
    }
    if layout == "eagle3":
        config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": rows, **shape}
        config["target_hidden_size"] = 32
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": shape,
            "draft_vocab_size": rows,
            "norm_before_residual": True,
            "target_hidden_size": 32,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        }
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    config |= change
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return weights


def hidden_of(target: Any, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """Return what layers read, from the model's own ``output_hidden_states``."""
    with torch.inference_mode():
        found = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([found[i][0] for i in layers], -1)


def head_pair(folder: Path, dtype: torch.dtype = torch.float64, rows: int = VOCAB) -> Pair:
    write_checkpoint(folder, "eagle3", rows=rows)
    target = target_of(dtype)
    head, vocabulary = load_head(folder, target)
    return Pair("headed", target, head, word_tokenizer(), vocabulary, ())


# The definition -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "size", "rows"),
    [
        ("eagle3", 32, VOCAB),
        ("eagle3", 24, 30),
        ("speculators", 32, 30),
        ("speculators", 24, VOCAB),
    ],
)
def test_heads_of_published_layouts_are_read_as_defined(
    tmp_path: Path, layout: str, size: int, rows: int
) -> None:
    """A tree of drafts after a text: each path equals the slow reading of text and path alone."""
    weights = write_checkpoint(tmp_path / "head", layout, size, rows)
    assert is_head(tmp_path / "head")
    target = target_of()
    head, vocabulary = load_head(tmp_path / "head", target)
    layers = (2, 3, 3) if layout == "eagle3" else (1, 2, 4)
    assert head.hidden_layers == layers
    if rows < VOCAB:
        assert vocabulary is not None
        assert len(vocabulary.tokens) == rows
    pair = Pair("p", target, head, word_tokenizer(), vocabulary, ())
    cache = pair.open_mid()
    tokens = PROMPT[:7]
    assert cache.target is not None
    cache.target.run(tokens[:-1], np.arange(6))
    cache.run(tokens[:4], np.arange(4), rows=np.zeros(0, np.int64))
    # Root's catch-up, two children, a grandchild, and its child in a later pass.
    visible = Visibility(
        np.array([5, 6, 7, 7, 7, 7]),
        np.array([[4] * 2, [5] * 2, [6] * 2, [7] * 2, [8] * 2, [7, 9]]),
    )
    first = cache.run([*tokens[4:], 11, 12, 13], [4, 5, 6, 7, 7, 8], visible)
    later = cache.run([20], [9], Visibility(np.array([7]), np.array([[7, 9, 10]])))
    with torch.no_grad():
        embedding = target.get_input_embeddings().weight
    w = {n: t.double() for n, t in weights.items()}
    w.setdefault("embed_tokens.weight", embedding.detach())
    shape = SHAPE | {"norm_first": layout == "speculators"}
    states = hidden_of(target, tokens, layers)

    close = {"rtol": 0.0, "atol": 2e-5}  # the library's cosines are of float32

    def slow(path: list[int]) -> Tensor:
        return head_logits(w, shape, states, [*tokens, *path], len(tokens))[-1]

    for row, path in ((2, []), (3, [11]), (4, [12]), (5, [11, 13])):
        assert torch.allclose(first[row], slow(path), **close), path
    assert torch.allclose(later[0], slow([11, 13, 20]), **close)
    short = head_logits(w, shape, states, tokens[:6], 6)[-1]
    assert torch.allclose(first[1], short, **close)


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return head_pair(tmp_path_factory.mktemp("cut") / "head")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_passes_in_any_cut_give_the_same(seed: int, random_pair: Pair) -> None:
    """Text and a random tree of drafts, in passes of any size, rows in any order."""
    rng = np.random.default_rng(seed)
    pair = random_pair
    tokens = rng.integers(VOCAB, size=6).tolist()
    parent = [-1] + [int(rng.integers(i)) - 1 for i in range(1, 8)]
    draft = rng.integers(VOCAB, size=8).tolist()

    def path(i: int) -> list[int]:
        return [] if i < 0 else [*path(parent[i]), i]

    whole: list[Tensor] = []
    for cuts in ([14], sorted({*rng.integers(1, 14, 3).tolist(), 14})):
        cache = pair.open_mid()
        assert cache.target is not None
        cache.target.run(tokens[:-1], np.arange(5))
        found, first = [], 0
        for end in cuts:
            ids, places, ends, slots = [], [], [], []
            for i in range(first, end):
                above = [6 + j for j in path(i - 6)] if i >= 6 else [i]
                ids.append(tokens[i] if i < 6 else draft[i - 6])
                places.append(i if i < 6 else 5 + len(above))
                ends.append(i + 1 if i < 6 else 6)
                slots.append((above * 9)[:9] if len(above) > 9 else above + [i] * (9 - len(above)))
            visible = Visibility(np.array(ends), np.array(slots))
            found.append(cache.run(ids, places, visible))
            first = end
        whole.append(torch.cat(found))
    assert torch.allclose(whole[0], whole[1], atol=1e-9)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    pair = head_pair(tmp_path / "head")
    with pytest.raises(ValueError, match="must keep the hidden states"):
        pair.mid.open(CachedModel(pair.target))
    cache = pair.open_mid()
    with pytest.raises(ValueError, match="the target has read 0"):
        cache.run([1, 2], [0, 1])
    assert cache.length == 0
    assert cache.target is not None
    cache.target.run([1, 2], [0, 1])
    cache.run([1, 2, 3], np.arange(3), rows=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="output at a token that was no row"):
        cache.run([4], [3], Visibility(np.array([3]), np.array([[3]])))


# Decoding and enumeration ---------------------------------------------------------------------


def test_decoding_is_lossless_under_every_schedule(tmp_path: Path) -> None:
    pair = head_pair(tmp_path / "head", torch.float32, rows=30)
    expected = decode_plain(pair, PROMPT, 20, ()).tokens
    with torch.inference_mode():
        stock = pair.target.generate(
            torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
    assert stock[0, len(PROMPT) :].tolist() == expected
    calls = 0
    for bits in product((0, 1), repeat=3):
        decoder = TreeGraftDecoder(pair, FixedSchedule(bits), CONFIG, runtime=AS_DEFINED)
        done = decoder.generate(PROMPT, 20, ())
        assert done.tokens == expected
        calls += sum(len(r.calls) for r in done.rounds)
    assert calls > 15


def text_of(pair: Pair) -> Text:
    tokens = [*PROMPT, *decode_plain(pair, PROMPT, 30, ()).tokens]
    logits = CachedModel(pair.target).run(tokens, np.arange(len(tokens)))
    log_p = [0.0, *token_log_p(logits[:-1], tokens[1:], CONFIG.width)]
    return Text("task", "p", 0, tokens, len(PROMPT), 20, log_p)


@pytest.mark.parametrize(("rows", "evaluation"), [(VOCAB, "needed"), (30, "all")])
def test_enumeration_gives_what_the_runtime_does(
    tmp_path: Path, rows: int, evaluation: Any
) -> None:
    """In float64: trees, counts, signals and A of every schedule at some states."""
    pair = head_pair(tmp_path / "head", rows=rows)
    text = text_of(pair)
    config = DraftingConfig(depth=3, width=4, verify_nodes=16, evaluation=evaluation)
    found = check_states(pair, [text], config, 4, 0)
    assert found.rounds == 4 * 8
    assert found.accepted == found.kept_tree == found.counts == found.rounds
    assert found.worst_score < 1e-5


def test_packs_change_nothing(tmp_path: Path) -> None:
    pair = head_pair(tmp_path / "head")
    text = text_of(pair)
    roots = list(text.roots())[:6]
    whole = enumerate_text(pair, pair.open_mid(), text, roots, CONFIG, keep_trees=True)
    split = enumerate_text(pair, pair.open_mid(), text, roots, CONFIG, pack=1, keep_trees=True)
    assert whole.kept == split.kept
    for name in ("accepted", "counts", "signals", "ranks"):
        assert np.array_equal(getattr(whole, name), getattr(split, name)), name
    levels = whole.counts[..., 5:]
    assert levels.max() > 1
    assert (levels <= whole.counts[..., [0, 2]]).all()


# Caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_first_call_after_fifty_rounds_is_that_of_a_fresh_cache(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of the first call's pass equal those of caches that read the text."""
    pair = head_pair(tmp_path / "head")
    if kind == "model":
        pair.mid, pair.vocabulary = tiny_llama(5), None
    decoder = TreeGraftDecoder(pair, FixedSchedule([0, 0, 0]), CONFIG, runtime=AS_DEFINED)
    context = decoder.start(PROMPT)
    for _ in range(50):
        done, _ = decoder.round(context, len(PROMPT))
        assert not done.calls
    behind = len(context) - 1 - decoder._mid.model.length
    assert behind >= 50
    text = context.tokens.tolist()

    def first_call(made: TreeGraftDecoder, known: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        cache = made._mid.model
        run = cache.run
        monkeypatch.setattr(
            cache, "run", lambda *a: seen.append(run(*a).log_softmax(-1)) or seen[-1]
        )
        made.scheduler = FixedSchedule([1, 1, 1])
        done, _ = made.round(known, len(PROMPT))
        assert len(done.calls) == 3
        return seen

    ours = first_call(decoder, context)
    fresh = TreeGraftDecoder(pair, FixedSchedule([1, 1, 1]), CONFIG, runtime=AS_DEFINED)
    again = fresh.resume(text)
    again = type(again)(text, context.log_p[: len(text)], CONFIG.max_ngram)
    theirs = first_call(fresh, again)
    assert [len(x) for x in ours] == [len(x) for x in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_hidden_states_stay_those_of_a_fresh_pass(tmp_path: Path) -> None:
    """After rounds with accepted paths and plain steps, and after a request that was cut back."""
    pair = head_pair(tmp_path / "head")
    answer = decode_plain(pair, PROMPT, 40, ()).tokens
    decoder = TreeGraftDecoder(pair, FixedSchedule([0, 1, 0]), CONFIG, runtime=AS_DEFINED)
    context = decoder.start(PROMPT)
    accepted = 0
    for number in range(9):
        if number % 3 == 2:
            decoder.plain_step(context)
            continue
        done, _ = decoder.round(context, len(PROMPT))
        # A tree of the target's own next tokens, each after a wrong one, so that entries move.
        tree, node = DraftTree.from_root(int(context.tokens[-1])), 0
        for token in answer[len(context) - len(PROMPT) :][:3]:
            tree.add(node, (token + 1) % VOCAB, -1.0)
            node = tree.add(node, token, -1.0)
        verdict = verify(decoder._target, tree, np.arange(1, tree.size), context.tokens)
        context.extend(verdict.tokens, verdict.log_p)
        accepted += done.accepted + len(verdict.path)
    assert accepted > 10
    assert context.tokens[len(PROMPT) :].tolist() == answer[: len(context) - len(PROMPT)]
    target = decoder._target
    length = len(context) - 1
    assert target.hidden is not None
    assert target.length == length
    found = target.hidden.at(torch.arange(length))
    expected = hidden_of(pair.target, context.tokens[:-1].tolist(), pair.mid.hidden_layers)
    assert torch.allclose(found, expected, atol=1e-9)
    target.shrink()
    assert torch.allclose(target.hidden.at(torch.arange(length)), expected, atol=1e-9)


# Folders --------------------------------------------------------------------------------------


def own_folder(folder: Path, target: Any) -> tuple[TrainedHead, Tensor]:
    tokens = torch.arange(0, VOCAB, 2)
    config = HeadConfig(32, 40, 32, 4, 2, 8, (1, 3, 4), len(tokens), max_positions=256)
    torch.manual_seed(4)
    head = TrainedHead(config, target.get_input_embeddings())
    rows = target.get_output_embeddings().weight[tokens].float()
    head.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)
    for p in head.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    save_head(folder, head, DraftVocabulary(tokens, -3.0), {"target": "t", "layers": [1, 3, 4]})
    return head, tokens


def test_our_own_folder_round_trips(tmp_path: Path) -> None:
    """All but what the target has is stored; what is loaded is what was saved."""
    target = tiny_llama(0, layers=LAYERS, dtype=torch.float32)
    head, tokens = own_folder(tmp_path, target)
    loaded, vocabulary = load_head(tmp_path, target)
    assert is_head(tmp_path)
    assert loaded.config == head.config
    assert vocabulary is not None
    assert torch.equal(vocabulary.tokens, tokens)
    assert vocabulary.floor_log_p == -3.0
    for name, value in loaded.state_dict().items():
        if not name.startswith("lm_head"):
            assert torch.equal(value, head.state_dict()[name]), name
    rows = target.get_output_embeddings().weight[tokens]
    assert torch.equal(loaded.lm_head.weight, rows)
    assert fingerprint(loaded) != fingerprint(load_head_of(tmp_path / "other", target))


def load_head_of(folder: Path, target: Any) -> TrainedHead:
    write_checkpoint(folder, "eagle3")
    return load_head(folder, target)[0]


def damage(folder: Path, name: str, value: Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("fc.weight", None, r"lacks the tensor fc\.weight"),
        ("fc.weight", torch.zeros(32, 5), r"tensor fc\.weight has shape \[32, 5\], not \[32, 96\]"),
        ("d2t", torch.full((30,), 90), r"tensor d2t maps 30 rows to tokens 90 … 119"),
        ("d2t", -torch.arange(30), "tensor d2t names a token twice"),
        ("t2d", torch.ones(VOCAB, dtype=torch.bool), "d2t and t2d name different tokens"),
        ("midlayer.router.weight", torch.zeros(2, 2), r"tensor midlayer\.router\.weight is not of"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, value: Tensor | None, says: str
) -> None:
    write_checkpoint(tmp_path / "head", "eagle3", rows=30)
    damage(tmp_path / "head", name, value)
    with pytest.raises(InputError, match=says) as caught:
        load_head(tmp_path / "head", target_of())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_hidden_size": 64}, "hidden size 64, this one has 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, not 1"),
        ({"hidden_size": None}, "config.json is not that of such a head"),
        ({"norm_before_fc": True}, "norm_before_fc, which is not read here"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layer 9 of the target"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    write_checkpoint(tmp_path / "head", "eagle3", **change)
    with pytest.raises(InputError, match=says):
        load_head(tmp_path / "head", target_of())


def test_pickles_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "head", "eagle3")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(InputError, match="not read from pickles"):
        load_head(tmp_path / "head", target_of())


# Training reads what drafting reads -------------------------------------------------------------


def test_unrolled_steps_are_what_a_draft_reads(tmp_path: Path) -> None:
    """Row t of step j: the output after t + j tokens of which the last j are drafts from t."""
    torch.manual_seed(0)
    target = target_of()
    head = load_head_of(tmp_path / "head", target)
    texts = [PROMPT, PROMPT[2:11]]
    start, rows = [5, 3], [7, 4]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = Batch(
        pad([torch.tensor(t) for t in texts], batch_first=True),
        pad([hidden_of(target, t, head.hidden_layers) for t in texts], batch_first=True),
        torch.tensor(start),
        torch.tensor(rows),
    )
    with torch.no_grad():
        outputs = unroll(head, batch, 3)
    pair = Pair("p", target, head, word_tokenizer(), None, ())
    for b, text in enumerate(texts):
        for row in range(rows[b]):
            root = start[b] + row
            cache = pair.open_mid()
            assert cache.target is not None
            cache.target.run(text[:root], np.arange(root))
            cache.run(text[: root + 1], np.arange(root + 1))
            found = [cache._outputs[root]]  # type: ignore[attr-defined]
            for place in range(root + 1, min(root + 3, len(text))):
                path = np.arange(root + 1, place + 1)[None]
                cache.run([text[place]], [place], Visibility(np.array([root + 1]), path))
                found.append(cache._outputs[place])  # type: ignore[attr-defined]
            for step, expected in enumerate(found):
                assert torch.allclose(outputs[step][b, row], expected, atol=1e-6), (b, row, step)
