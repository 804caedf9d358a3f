"""What users hand in: prompts, tokenizers and latency profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tests.conftest import word_tokenizer
from treegraft_core.drafting import MidCall
from treegraft_core.errors import InputError
from treegraft_core.latency import Grid, LatencyProfile, mid_passes
from treegraft_core.prompts import Prompt, chat_ids, read_prompts
from treegraft_core.tokenizers import check_same_tokenizer

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
    assert mid_passes(call, "needed") == [11]
    assert mid_passes(call, "all") == [31]
    assert mid_passes(MidCall(1, 11, 31), "needed") == [1, 11]
    assert p.mid_call_ms(call, 100) == pytest.approx(0.25 + 2.0)
    assert p.mid_call_ms(call, 100, "all") == pytest.approx(0.25 + 6.0)
    assert profile(evaluation="all").mid_call_ms(call, 100) == pytest.approx(0.25 + 6.0)
    assert p.mid_call_ms(MidCall(1, 11, 31), 300) == pytest.approx(0.25 + 2.0 + 4.0)
    assert p.verify_ms(10, 100) == pytest.approx(2.0)
    assert p.verify_ms(30, 300) == pytest.approx(10.0)


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
