"""The benchmarks measure ways that agree, at tiny sizes; nothing here depends on a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import collect, decode, gpu, growth, overhead, run
from benchmarks.naive import CachedTree, WholeTree, all_schedules, first_difference
from benchmarks.shapes import Shape, random_text
from benchmarks.timing import alternate, cell, spread
from pipeline.tasks import TaskPrompt
from pipeline.texts import Text, greedy_texts
from tests.conftest import tiny_llama, word_tokenizer
from treegraft_core import DraftingConfig, FixedSchedule
from treegraft_core.models import CachedModel
from treegraft_core.pair import Pair
from treegraft_core.prompts import Prompt
from treegraft_core.student import DraftVocabulary

CONFIGS = {
    "as defined": DraftingConfig(depth=4, width=4, verify_nodes=12, max_ngram=3),
    "wide": DraftingConfig(depth=3, width=8, verify_nodes=40, max_ngram=5),
    "w/o EG": DraftingConfig(depth=3, width=4, verify_nodes=12, max_ngram=3, pool="frontier"),
    "w/o ND": DraftingConfig(depth=4, width=3, verify_nodes=12, max_ngram=3, graft="replace"),
}
SMALLEST = Shape(layers=1, hidden=32, heads=4, kv_heads=2, inner=64, vocab=64, positions=256)


def tiny_texts(pair: Pair, config: DraftingConfig) -> list[Text]:
    repeated = "w2 w3 w4 w5 w2 w3 w4 w6 w2 w3"
    prompts = [TaskPrompt("t", Prompt(str(i), "t", (f"w{i + 7} {repeated}",))) for i in range(2)]
    return [t for t in greedy_texts(pair, prompts, 12, 2, config)[0] if len(t.roots()) > 2]


def compare_all_ways(pair: Pair, config: DraftingConfig) -> int:
    """Return the largest A at states of two texts where all ways give the same records."""
    model = CachedModel(pair.mid)
    slow = [way(pair, config, keep_trees=True) for way in (WholeTree, CachedTree)]
    texts = tiny_texts(pair, config)
    assert texts
    longest = 0
    for text in texts:
        roots = list(text.roots())[::3]
        found = collect.enumerate_text(pair, model, text, roots, config, keep_trees=True)
        for state, root in enumerate(roots):
            ours = found.outcomes(state)
            assert len(ours) == 2**config.depth and all(o.kept for o in ours)
            for way in slow:
                assert first_difference(way.outcomes(text, root), ours) is None, (way, root)
            longest = max(longest, *(o.accepted for o in ours))
    return longest


@pytest.mark.parametrize("name", CONFIGS)
def test_both_slow_ways_give_the_records_of_the_shared_enumeration(
    tiny_pair: Pair, name: str
) -> None:
    assert compare_all_ways(tiny_pair, CONFIGS[name]) > 0


def test_paths_deeper_than_depth_and_n_gram_are_accepted() -> None:
    # Without attention the next token depends on the last one alone, so greedy text runs in a
    # circle, and mid steps grow accepted paths below an n-gram's chain.
    target, mid = tiny_llama(0), tiny_llama(0)
    with torch.no_grad():
        for model in (target, mid):
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
    pair = Pair("circle", target, mid, word_tokenizer(), None, (1,))
    config = DraftingConfig(depth=3, width=3, verify_nodes=60, max_ngram=3)
    assert compare_all_ways(pair, config) > 3


def test_a_wrong_record_is_named(tiny_pair: Pair) -> None:
    config = CONFIGS["as defined"]
    text = tiny_texts(tiny_pair, config)[0]
    way = CachedTree(tiny_pair, config)
    ours, theirs = (way.outcomes(text, text.roots()[1]) for _ in range(2))
    theirs[3].accepted += 1
    assert "schedule 0011: accepted is" in str(first_difference(ours, theirs))
    theirs[3].accepted -= 1
    theirs[5].signals[2][0] += 1e-9
    assert "schedule 0101: step 3: depth_before" in str(first_difference(ours, theirs))


def test_collect_compares_and_replays_the_passes_alone(tiny_pair: Pair) -> None:
    config = CONFIGS["as defined"]
    ways = collect.Ways(tiny_pair, config)
    done = collect.measure(ways, tiny_texts(tiny_pair, config), states=3, repeats=2, seed=0)
    assert done.failures == [] and done.values["compared"] == 4
    assert [row["way"][:3] for row in next(iter(done.tables.values()))] == [
        "(a)",
        "(b)",
        "(c)",
        "(d)",
    ]
    recorder, _ = ways.record(tiny_texts(tiny_pair, config)[0], [12, 14])
    model = CachedModel(tiny_pair.mid)
    recorder.replay(model)
    np.testing.assert_array_equal(model.positions, recorder.positions)
    assert sum(name == "run" for name, _, _ in recorder.calls) <= 1 + config.depth


def test_growth_measures_time_memory_and_a_budget_too_small(monkeypatch) -> None:
    setting = growth.Setting(SMALLEST, "cpu", "float32", memory=2**30, threads=1)
    rows = [growth.Row(d, 4, 16, 2) for d in (2, 3)]
    done = growth.measure({"depth": rows, "pack": [growth.Row(2, 4, 16, 2, 1)]}, setting, 1)
    first, second = done.tables["growth with depth; counts a state"]
    assert first["cost ×"] == first["paths ×"] == 1.0 and second["2^D ×"] == 2.0
    assert done.failures == []
    assert all(row["peak"] >= 0 for row in done.values["rows"])
    monkeypatch.setattr(growth, "measure_peaks", lambda rows, _: dict.fromkeys(rows, 2**31))
    done = growth.measure({"depth": rows}, setting, 1)
    assert len(done.failures) == 2 and "collect.memory_gb" in done.failures[0]
    monkeypatch.setattr(growth, "measure_peaks", lambda rows, _: {r: None for r in rows})
    done = growth.measure({"depth": rows}, setting, 1)
    assert len(done.notes) == 2 and "refused" in done.notes[0]


def test_overhead_times_every_piece(tiny_pair: Pair) -> None:
    config = CONFIGS["as defined"]
    done = overhead.measure(tiny_pair, config, 1, nodes=(20,), contexts=(40,))
    pieces, rounds = done.tables.values()
    assert len(pieces) == 9 and {row["paper"] for row in pieces} == {920.0, 318.0, ""}
    assert len(rounds) == 4


def test_stored_target_accepts_three_nodes(tiny_pair: Pair) -> None:
    pieces = overhead.Pieces(tiny_pair, CONFIGS["as defined"], 30, 40)
    verdict = overhead.verify(pieces.target, pieces.tree, pieces.kept, np.zeros(40, np.int64))
    deepest = int(pieces.tree.depth[pieces.kept].max())
    assert len(verdict.path) >= min(3, deepest) > 0


@pytest.mark.parametrize("restricted", [False, True])
def test_decoding_systems_agree_with_plain_decoding(tiny_pair: Pair, restricted: bool) -> None:
    pair = tiny_pair
    if restricted:
        mid = copy.copy(pair.mid)
        mid._modules = dict(pair.mid._modules)
        tokens = torch.arange(2, 40)
        head = torch.nn.Linear(32, len(tokens), bias=False, dtype=torch.float64)
        head.weight = torch.nn.Parameter(pair.mid.lm_head.weight[tokens], requires_grad=False)
        mid.lm_head = head
        vocabulary = DraftVocabulary(tokens, -5.0)
        pair = Pair("tiny", pair.target, mid, pair.tokenizer, vocabulary, pair.eos_token_ids)
    config = CONFIGS["as defined"]
    candidates = {**decode.peers(pair, (3,)), **decode.fixed(pair, config, None)}
    prompts = [[7, 2, 3, 4, 5, 2, 3, 4, 6, 2, 3], [9, 2, 3, 4, 2, 3]]
    chosen = decode.choose(decode.run_all(candidates, prompts[:1], 8))
    scheduler = FixedSchedule([1, 0, 0, 1])
    systems = {**decode.plain(pair), **candidates}
    systems["scheduler"] = decode.decoder(pair, scheduler, config, None)
    done = decode.measure(pair, systems, chosen, prompts, ["a", "b"], 12, draws=20)
    assert done.failures == []
    assert {row["identical"] for row in done.values["systems"]} == {"2 of 2"}
    assert [row["kind"] for row in done.values["by_kind"]] == ["a", "b"]


def test_gpu_benchmark_runs_tiny_on_a_cpu(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["eager", "--out", str(tmp_path)]) == 0
    assert "no GPU" in capsys.readouterr().out
    written = json.loads((tmp_path / "gpu-eager.json").read_text())
    assert set(gpu.TINY) < set(written)
    assert gpu.main(["compiled", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dance"], ["benchmark=dance", "collect, growth"]),
        (["--states=0"], ["--states=0", "at least 1"]),
        (["--repeats", "4"], ["--repeats=4", "at least 5"]),
        (["--repeats", "x"], ["--repeats", "'x'"]),
        (["--colour"], ["--colour"]),
        (["collect", "drafting.colour=1"], ["drafting.colour"]),
        (["growth", "collect.memory_gb=0"], ["collect.memory_gb=0"]),
        (["decode", "paths.data=/nowhere"], ["run"]),
        (["growth", "engine.device=tpu"], ["engine.device=tpu"]),
    ],
)
def test_argument_errors(arguments: list[str], says: list[str], capsys) -> None:
    assert run.main(arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    for text in says:
        assert text in error[0]


def test_out_must_be_a_folder(tmp_path: Path, capsys) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run.main(["growth", "--out", str(file)]) == 2
    assert "--out" in capsys.readouterr().err


def test_words_and_overrides_are_told_apart() -> None:
    names, overrides, options = run.parse(["collect", "--states", "3", "drafting=cpu"])
    assert (names, overrides, options.states) == (["collect"], ["drafting=cpu"], 3)
    assert run.parse([])[0] == list(run.BENCHMARKS)


def test_random_text_repeats_itself() -> None:
    tokens, log_p = random_text(400, 1000)
    assert len(tokens) == len(log_p) == 400 and max(tokens) < 1000
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    assert len(set(trigrams)) < 0.9 * len(trigrams)


def test_alternate_times_every_call_once_a_repeat() -> None:
    order: list[str] = []
    times = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert "".join(order) == "ab" + "ab" + "ba" and len(times["a"]) == 2
    assert spread(np.array([1.0, 2.0, 3.0]))["median"] == 2.0
    assert cell(np.array([1.0, 2.0, 3.0])) == "2 (1.5 … 2.5)"


def test_schedules_in_binary_order() -> None:
    assert all_schedules(2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
