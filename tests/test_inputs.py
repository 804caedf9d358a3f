"""What users hand in: prompts, tokenizers and latency profiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tests.conftest import word_tokenizer
from treegraft_core.drafting import MidCall
from treegraft_core.enumeration import Enumeration
from treegraft_core.errors import InputError
from treegraft_core.latency import Grid, LatencyProfile
from treegraft_core.prompts import Prompt, chat_ids, read_prompts
from treegraft_core.tokenizers import check_same_tokenizer

properties = settings(derandomize=True, deadline=None, max_examples=80, database=None)

# Prompts --------------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    """Write lines to a file."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def line(question_id: Any = 1, turns: Any = ("hello",), **more: Any) -> str:
    """Return one line of a prompt file."""
    return json.dumps({"question_id": question_id, "turns": turns, **more})


def test_read_prompts(tmp_path: Path) -> None:
    """Ids as text, turns in order, blank lines skipped, other fields ignored."""
    path = write(
        tmp_path / "p.jsonl",
        line(81, ["one", "two"], category="writing", reference=["x"]),
        "",
        line("b", ["é 日本"]),
    )
    assert read_prompts(path) == [
        Prompt("81", "writing", ("one", "two")),
        Prompt("b", "", ("é 日本",)),
    ]
    assert read_prompts(str(path)) == read_prompts(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(1), line(2)[:-9]], "line 2: not valid JSON .*truncated"),
        ([line(1), "", "{"], "line 3: not valid JSON"),
        (["[1, 2]"], "line 1: needs the fields"),
        (["3"], "line 1: needs the fields"),
        (['{"turns": ["x"]}'], "line 1: needs the fields"),
        (['{"question_id": 1}'], "line 1: needs the fields"),
        ([line(1, "hello")], "line 1: turns must be a list"),
        ([line(1, [])], "line 1: turns must be a list"),
        ([line(1, None)], "line 1: turns must be a list"),
        ([line(1, ["a", 3])], "line 1: turns must be a list"),
        ([line(1, [""])], "line 1: empty prompt"),
        ([line(1), line(2, ["a", " \n\t"])], "line 2: empty prompt"),
        ([line(1), line(2), line(1)], "line 3: question_id=1 repeats"),
        ([line(1), line("1")], "line 2: question_id=1 repeats"),
        ([], "no prompts; the file is empty"),
        (["", "  "], "no prompts; the file is empty"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, lines: list[str], message: str) -> None:
    """The message names the file, the line and the fault."""
    path = write(tmp_path / "p.jsonl", *lines)
    with pytest.raises(InputError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_prompt_files_that_are_none(tmp_path: Path) -> None:
    """Missing, a folder, and not text."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="no such file"):
            read_prompts(path)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(tmp_path / "b.jsonl")


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\u2029"])
def test_only_newlines_end_a_line(tmp_path: Path, character: str) -> None:
    """JSON allows Unicode line separators inside a string; they do not end a JSON line."""
    text = f"first{character}second"
    row = json.dumps({"question_id": 1, "turns": [text]}, ensure_ascii=False)
    assert read_prompts(write(tmp_path / "p.jsonl", row))[0].turns == (text,)


def test_chat_ids() -> None:
    """The tokenizer's own template, or the turns as paragraphs."""
    tokenizer = word_tokenizer()
    messages = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    assert chat_ids(tokenizer, messages) == [5, 6, 7]
    tokenizer.chat_template = (
        "{% for m in messages %}w2 {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}w3{% endif %}"
    )
    assert chat_ids(tokenizer, messages) == [2, 5, 6, 2, 7, 3]


# Tokenizers -----------------------------------------------------------------------------------


def words(vocabulary: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a")), unk_token="a", **special
    )


def bpe(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer over a, b, c."""
    vocabulary = {t: i for i, t in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, merges)))


def test_equal_content_is_accepted(tmp_path: Path) -> None:
    """Another object, another folder, another order of the vocabulary's dict."""
    target = words({"a": 0, "b": 1, "c": 2}, eos_token="b")
    check_same_tokenizer(target, words({"c": 2, "a": 0, "b": 1}, eos_token="b"))
    target.save_pretrained(tmp_path / "another-name")
    check_same_tokenizer(target, PreTrainedTokenizerFast.from_pretrained(tmp_path / "another-name"))
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    check_same_tokenizer(bpe(merges), bpe(list(merges)))


def test_a_pad_token_named_by_one_side_changes_nothing() -> None:
    """Padding changes no text."""
    vocabulary = {"a": 0, "b": 1, "c": 2}
    check_same_tokenizer(words(vocabulary), words(vocabulary, pad_token="c"))


@pytest.mark.parametrize(
    ("mid", "message"),
    [
        ({"a": 0, "x": 1, "y": 2}, "token 1: target has 'b', mid has 'x'"),
        ({"a": 0, "c": 1, "b": 2}, "token 1: target has 'b', mid has 'c'"),
        ({"a": 0, "b": 1}, "token 2: target has 'c', mid has None"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "token 3: target has None, mid has 'd'"),
    ],
)
def test_the_first_differing_token_is_named(mid: dict[str, int], message: str) -> None:
    """By id, lowest first, with what either side has."""
    with pytest.raises(InputError, match=message):
        check_same_tokenizer(words({"a": 0, "b": 1, "c": 2}), words(mid))


def test_different_merges_and_special_tokens() -> None:
    """Same vocabulary, other tokens from the same text."""
    one = bpe([("a", "b"), ("b", "c"), ("a", "bc")])
    with pytest.raises(InputError, match="merge 'a b' against 'b c'"):
        check_same_tokenizer(one, bpe([("b", "c"), ("a", "b"), ("a", "bc")]))
    with pytest.raises(InputError, match="3 merges, mid's 2"):
        check_same_tokenizer(one, bpe([("a", "b"), ("b", "c")]))
    vocabulary = {"a": 0, "b": 1, "c": 2}
    with pytest.raises(InputError, match="special token 'c'"):
        check_same_tokenizer(words(vocabulary), words(vocabulary, eos_token="c"))


# Latency profiles -----------------------------------------------------------------------------

GRID = Grid((1, 11, 31), (100, 300), ((1.0, 2.0), (2.0, 4.0), (6.0, 10.0)), ((0.1, 0.1),) * 3)


def profile(**change: Any) -> LatencyProfile:
    """Return a small profile."""
    values: dict[str, Any] = {
        "mid": GRID,
        "verify": Grid((1,), (1,), ((7.0,),), ((0.0,),)),
        "plain_ms": 5.0,
        "small_ms": 0.5,
        "mid_overhead_ms": 0.25,
        "signals_ms": 0.1,
        "scheduler_ms": 0.2,
        "prune_ms": 0.3,
        "accept_ms": 0.4,
        "target_ms": 8.0,
        "mid_ms": 3.0,
        "evaluation": "needed",
        "meta": {"cpu": "tiny", "threads": 1},
    }
    return LatencyProfile(**{**values, **change})


@pytest.mark.parametrize(
    ("tokens", "context", "expected"),
    [
        (1, 100, 1.0),
        (31, 300, 10.0),
        (6, 100, 1.5),
        (11, 200, 3.0),
        (21, 200, 5.5),  # between (2 + 4) / 2 and (6 + 10) / 2
        (41, 100, 8.0),  # the last slope goes on
        (11, 400, 5.0),
        (0, 50, 1.0),  # before the first point its value holds
    ],
)
def test_interpolation(tokens: int, context: int, expected: float) -> None:
    """Linear in both axes."""
    assert GRID.at(tokens, context) == pytest.approx(expected)


def test_extrapolation_never_falls() -> None:
    """Noise at the end of a grid does not make long passes free."""
    falling = Grid((1, 10), (5,), ((3.0,), (2.0,)), ((0.0,), (0.0,)))
    assert falling.at(5.5, 5) == pytest.approx(2.5)
    assert falling.at(1000, 5) == pytest.approx(2.0)
    assert Grid((1,), (1,), ((0.0,),), ((0.0,),)).at(1, 1) > 0


def test_times_of_calls_and_verification() -> None:
    """Passes without nodes cost nothing; verification reads the root, too."""
    p = profile(verify=GRID)
    call = MidCall(refresh_nodes=0, expand_nodes=11, all_nodes=31)
    assert p.mid_call_ms(call, 100) == pytest.approx(0.25 + 2.0)
    assert p.mid_call_ms(call, 100, "all") == pytest.approx(0.25 + 6.0)
    assert profile(evaluation="all").mid_call_ms(call, 100) == pytest.approx(0.25 + 6.0)
    assert p.mid_call_ms(MidCall(1, 11, 31), 300) == pytest.approx(0.25 + 2.0 + 4.0)
    levels = replace(p, mid_sequential=True)
    call = MidCall(8, 11, 31, refresh_levels=4, all_levels=5)
    assert levels.mid_call_ms(call, 100) == pytest.approx(
        0.25 + 4 * p.mid.at(2, 100) + p.mid.at(11, 100)
    )
    assert levels.mid_call_ms(call, 100, "all") == pytest.approx(0.25 + 5 * p.mid.at(31 / 5, 100))
    assert p.verify_ms(10, 100) == pytest.approx(2.0)
    assert p.verify_ms(30, 300) == pytest.approx(10.0)


def plain_line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate between points, one number at a time."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        if x <= xs[i]:
            return ys[i - 1] + slope * (x - xs[i - 1])
    return ys[-1] + max(slope, 0.0) * (x - xs[-1])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw grids of one to four points an axis, times falling as often as rising."""
    axis = st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(sorted)
    tokens, context = draw(axis), draw(axis)
    ms = st.floats(0, 50, width=32)
    row = st.lists(ms, min_size=len(context), max_size=len(context)).map(tuple)
    rows = tuple(draw(st.lists(row, min_size=len(tokens), max_size=len(tokens))))
    return Grid(tuple(tokens), tuple(context), rows, rows)


@properties
@given(grids(), st.lists(st.integers(0, 90), min_size=1, max_size=6), st.data())
def test_arrays_interpolate_as_numbers_do(grid: Grid, tokens: list[int], data: Any) -> None:
    """Every pair of an outer product, on, between, before and beyond the points."""
    points = st.one_of(st.integers(0, 90), st.sampled_from(grid.context))
    context = data.draw(st.lists(points, min_size=1, max_size=5))
    found = grid.at(np.array(tokens)[:, None], np.array(context))
    assert found.shape == (len(tokens), len(context))
    assert grid.at(np.array(tokens), context[0]).tolist() == found[:, 0].tolist()
    for i, n in enumerate(tokens):
        for j, length in enumerate(context):
            columns = [plain_line(length, grid.context, row) for row in grid.ms]
            expected = max(plain_line(n, grid.tokens, columns), 1e-3)
            assert found[i, j] == pytest.approx(expected, rel=1e-9)
            number = grid.at(n, length)
            assert isinstance(number, float) and number == found[i, j]
    cube = np.array(tokens).reshape(-1, 1, 1) + np.zeros((1, 2, 1), int)
    assert grid.at(cube, np.array(context)).tolist() == np.stack([found, found], 1).tolist()


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("evaluation", ["needed", "all"])
def test_times_of_many_states_are_those_of_each_call(evaluation: str, sequential: bool) -> None:
    """Steps, t_D and t_V of every schedule, from the counts as one call at a time."""
    rng = np.random.default_rng(0)
    states, depth = 5, 3
    bits = np.array(list(product((0, 1), repeat=depth)), np.int8)
    counts = rng.integers(0, 3, (states, len(bits), depth, 7)) * rng.integers(1, 30)
    counts = (counts * bits[None, :, :, None]).astype(np.int32)
    kept = rng.integers(0, 40, (states, len(bits)))
    none = np.zeros((states, len(bits), 1), np.int64)
    found = Enumeration(bits, kept, kept, kept, none, counts, np.zeros((*counts.shape[:3], 10)))
    p, context = profile(verify=GRID, evaluation=evaluation), rng.integers(50, 400, states)
    p = replace(p, mid_sequential=bool(sequential))
    step_ms, draft_ms, verify_ms = p.times(found, context)
    assert (counts[..., 0][:, bits > 0] == 0).any()  # a call without a refreshing pass
    for state, length in enumerate(context.tolist()):
        for n, o in enumerate(found.outcomes(state)):
            steps = [p.step_ms(call, length) for call in o.calls]
            assert step_ms[state, n] == pytest.approx(np.array(steps), rel=1e-12)
            assert draft_ms[state, n] == pytest.approx(p.draft_ms(o.calls, length), rel=1e-12)
            assert verify_ms[state, n] == pytest.approx(p.verify_ms(o.kept_nodes, length))


def test_profiles_round_trip(tmp_path: Path) -> None:
    """What is loaded equals what was saved, and no temporary file stays."""
    profile().save(tmp_path / "profile.json")
    assert LatencyProfile.load(tmp_path / "profile.json") == profile()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def damaged(**change: Any) -> str:
    """Return a profile file with changed fields; None removes one."""
    value = json.loads(json.dumps({"format": 1, **profile_dict()}))
    for name, new in change.items():
        value.pop(name) if new is None else value.update({name: new})
    return json.dumps(value)


def profile_dict() -> dict[str, Any]:
    """Return the profile's fields as JSON values."""
    from dataclasses import asdict

    return asdict(profile())


@pytest.mark.parametrize(
    "text",
    [
        "",
        damaged()[:200],
        "[]",
        "3",
        '"profile"',
        "null",
        damaged(format=None),
        damaged(mid=None),
        damaged(mid=3),
        damaged(mid=[]),
        damaged(verify={"tokens": [1]}),
        damaged(verify={"tokens": 1, "context": [1], "ms": [[1.0]], "spread_ms": [[0.0]]}),
        damaged(small_ms=None),
        damaged(surprise=1),
    ],
    ids=[
        "empty",
        "truncated",
        "list",
        "number",
        "text",
        "null",
        "no_format",
        "no_mid",
        "mid_number",
        "mid_list",
        "incomplete_grid",
        "grid_axis_number",
        "no_small_ms",
        "unknown_field",
    ],
)
def test_damaged_profiles(tmp_path: Path, text: str) -> None:
    """The message names the file and the stage that makes a new one."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError, match="stage=profile") as error:
        LatencyProfile.load(path)
    assert str(path) in str(error.value)


def test_missing_profile(tmp_path: Path) -> None:
    """No such file."""
    with pytest.raises(InputError, match="stage=profile"):
        LatencyProfile.load(tmp_path / "none.json")
