"""stage=report: statistics against a slow twin, tables, pictures, and the page itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from pipeline import figures, page, report
from pipeline.document import Table, markdown_table
from pipeline.replay import bootstrap
from pipeline.results import (
    ONE_PROMPT,
    Results,
    ablation_table,
    ablation_tasks,
    estimate,
    load_all,
    load_results,
    main_table,
    orderings,
    parse_results,
    task_table,
)
from pipeline.run import CONF
from tests.pipeline.results_example import SYSTEMS, TASKS, example, write_results
from treegraft_core import InputError

HERE = Path("results.json")


def parsed(**settings: Any) -> Results:
    return parse_results(example(**settings), HERE)


def run_report(data: Path) -> Path:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        conf = compose("config", ["stage=report", "tracker=disabled", f"paths.data={data}"])
    page.run(conf)
    return data / "report"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Leave git alone and draw small pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "git_sha", lambda: "test")
        patch.setattr(figures, "DOTS_PER_INCH", 40)
        yield


# Statistics


def slow_interval(
    value: dict[str, Any], keep: list[int], statistic: Callable[[list[int]], float]
) -> tuple[float, float, float]:
    """Compute a statistic and its interval turn by turn, with the bootstrap of the replay."""
    groups = [f"{value['turns'][i]['task']}\n{value['turns'][i]['prompt_id']}" for i in keep]
    low, high = bootstrap(groups, lambda at: statistic([keep[i] for i in at]), 400, 0)
    return statistic(keep), low, high


def slow_rate(value: dict[str, Any], name: str, turns: list[int]) -> float:
    runs = [value["runs"][name][i] for i in turns]
    return sum(r["tokens"] for r in runs) / sum(r["ms"] for r in runs)


def slow_accepted(value: dict[str, Any], name: str, turns: list[int]) -> float:
    runs = [value["runs"][name][i] for i in turns]
    return sum(r["accepted"] for r in runs) / sum(r["rounds"] for r in runs)


@pytest.fixture(scope="module")
def partial() -> dict[str, Any]:
    """Return results in which online planning ran two tasks and CSD missed one turn."""
    value = example()
    for i, turn in enumerate(value["turns"]):
        if turn["task"] not in ("gsm8k", "mt_bench"):
            value["runs"]["online"][i] = None
    value["runs"]["csd"][3] = None
    return value


def test_speedup_is_that_of_the_slow_twin(partial: dict[str, Any]) -> None:
    results = parse_results(partial, HERE)
    for name, base in (("scheduler", "plain"), ("online", "csd"), ("scheduler", "all_mid")):
        runs = partial["runs"]
        both = [i for i in range(len(partial["turns"])) if runs[name][i] and runs[base][i]]
        slow = slow_interval(
            partial,
            both,
            lambda at, name=name, base=base: (
                slow_rate(partial, name, at) / slow_rate(partial, base, at)
            ),
        )
        assert results.speedup(name, base) == pytest.approx(slow, rel=1e-12)


def test_accepted_and_its_difference_are_those_of_the_slow_twin(partial: dict[str, Any]) -> None:
    results = parse_results(partial, HERE)
    every = list(range(len(partial["turns"])))
    slow = slow_interval(partial, every, lambda at: slow_accepted(partial, "fixed", at))
    assert results.accepted("fixed") == pytest.approx(slow, rel=1e-12)
    both = [i for i in every if i != 3]
    slow = slow_interval(
        partial,
        both,
        lambda at: slow_accepted(partial, "fixed", at) - slow_accepted(partial, "csd", at),
    )
    assert results.accepted_difference("fixed", "csd") == pytest.approx(slow, rel=1e-9)


def test_average_is_the_mean_of_the_tasks(partial: dict[str, Any]) -> None:
    results = parse_results(partial, HERE)
    by_task = [results.speedup("scheduler", "plain", [task]).value for task in TASKS]
    assert results.average_speedup("scheduler", "plain").value == pytest.approx(np.mean(by_task))

    def slow(at: list[int]) -> float:
        tasks = sorted({partial["turns"][i]["task"] for i in at})
        chosen = [[i for i in at if partial["turns"][i]["task"] == task] for task in tasks]
        return float(
            np.mean(
                [
                    slow_rate(partial, "scheduler", turns) / slow_rate(partial, "plain", turns)
                    for turns in chosen
                ]
            )
        )

    every = list(range(len(partial["turns"])))
    assert results.average_speedup("scheduler", "plain") == pytest.approx(
        slow_interval(partial, every, slow), rel=1e-12
    )


def test_intervals_contain_the_truth() -> None:
    truth = SYSTEMS["scheduler"][3]
    inside = 0
    for seed in range(60):
        found = parsed(seed=seed, draws=300, prompts_per_task=6).speedup("scheduler", "plain")
        assert found.low < found.value < found.high
        # Both ms are log-normal with equal spread, so the ratio of sums is near the truth.
        inside += found.low < truth < found.high
    assert inside >= 51


def test_turns_of_one_prompt_are_drawn_together() -> None:
    results = parsed(tasks=("mt_bench",), prompts_per_task=5)
    weights = results.weights(results.turns("plain"))
    assert weights.shape == (401, 10)
    assert (weights[0] == 1).all()
    assert (weights[:, ::2] == weights[:, 1::2]).all()
    assert (weights[1:].sum(axis=1) == 10).all()


def test_a_system_without_common_turns_has_no_figure(partial: dict[str, Any]) -> None:
    results = parse_results(partial, HERE)
    assert math.isnan(results.speedup("online", "plain", ["qa"]).value)
    assert results.speedup("online", "plain", ["qa"]).text() == "–"
    assert ablation_tasks(results) == ["gsm8k", "mt_bench"]
    rows = {row["variant"]: row for row in ablation_table(results)}
    assert rows["online planning"]["turns"] == 24
    assert rows["CSD"]["turns"] == 23
    assert rows["CSD"]["paper × plain"] == "0.94"
    same = {row["system"]: row["same tokens"] for row in main_table(results)}
    assert same["online planning"] == "24 of 24"


def test_one_prompt_has_no_interval() -> None:
    results = parsed(tasks=("mt_bench",), prompts_per_task=1)
    assert len(results.turn_tasks) == 2
    found = results.speedup("scheduler", "plain")
    assert math.isfinite(found.value)
    assert math.isnan(found.low)
    assert ONE_PROMPT in found.text()
    assert all("cannot be told apart" in line and ONE_PROMPT in line for line in orderings(results))


def test_estimate_of_nothing() -> None:
    assert math.isnan(estimate(np.array([math.nan, 1.0, 2.0])).value)
    assert math.isnan(estimate(np.array([1.0])).high)


# Tables


def test_orderings_say_what_holds() -> None:
    # Seed 0: plain is noisy, the planted gaps are wide.
    lines = orderings(parsed(prompts_per_task=12, noise=0.05))
    assert len(lines) == 7
    assert all(": holds; " in line for line in lines)


def test_orderings_say_what_does_not_hold_and_what_was_not_run() -> None:
    value = example(noise=0.05)
    value["runs"]["scheduler"], value["runs"]["csd"] = (
        value["runs"]["csd"],
        value["runs"]["scheduler"],
    )
    value["runs"]["without_nd"] = value["runs"]["without_eg"]
    lines = orderings(parse_results(value, HERE))
    assert "does not hold" in lines[2]
    assert "does not hold" in lines[4]
    assert "cannot be told apart" in lines[1]
    value["systems"] = [s for s in value["systems"] if s["role"] != "online"]
    assert "not measured here (online planning not run)" in orderings(parse_results(value, HERE))[6]


def test_task_table_marks_held_out_tasks() -> None:
    rows = task_table(parsed())
    assert [row["task"] for row in rows][-2:] == ["mt_bench (held out)", "average of tasks"]
    assert rows[-1]["turns"] == 56


def test_main_table_without_a_fastest_plain_decoding() -> None:
    value = example()
    value["systems"] = [s for s in value["systems"] if s["role"] != "fastest"]
    assert {row["× fastest plain"] for row in main_table(parse_results(value, HERE))} == {"–"}


def test_tokens_that_cannot_be_compared_are_not_counted() -> None:
    value = example()
    for run in value["runs"]["compiled"]:
        run["same"] = None
    value["runs"]["csd"][0]["same"] = None
    value["runs"]["csd"][1]["same"] = False
    same = {row["system"]: row["same tokens"] for row in main_table(parse_results(value, HERE))}
    assert (same["plain, compiled"], same["CSD"], same["w/o EG"]) == ("–", "54 of 55", "56 of 56")


def test_rows_of_one_table_have_the_same_columns(partial: dict[str, Any]) -> None:
    results = parse_results(partial, HERE)
    for build in (main_table, task_table, ablation_table):
        rows = build(results)
        assert len({tuple(row) for row in rows}) == 1
        # W&B wants one kind a column.
        assert all(len({type(row[name]) for row in rows}) == 1 for name in rows[0])


# The file


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: v.update(format=0),
        lambda v: v.pop("turns"),
        lambda v: v["runs"]["csd"].pop(),
        lambda v: v["runs"]["csd"][0].pop("ms"),
        lambda v: v["runs"]["csd"][0].update(ms=0.0),
        lambda v: v["runs"]["csd"][0].update(ms=math.nan),
        lambda v: v["runs"]["csd"][0].update(ms="fast"),
        lambda v: v["runs"].pop("csd"),
        lambda v: v["systems"][3].update(role="hero"),
        lambda v: v["systems"].append(v["systems"][0]),
        lambda v: v["systems"].pop(0),
        lambda v: v["settings"].pop("seed"),
        lambda v: v["settings"].update(bootstrap=0),
        lambda v: v.update(turns=[]),
        lambda v: v.update(cost=[1]),
        lambda v: v["replay"]["by_calls"][0].pop("oracle"),
        lambda v: v["picks"]["fixed"].update(by_offset={"one": 1}),
        lambda v: v["calls_by_step"]["scheduler"]["all"].pop(),
    ],
)
def test_damaged_results_name_the_fix(tmp_path: Path, spoil: Callable[[Any], Any]) -> None:
    value = example(prompts_per_task=2)
    spoil(value)
    path = write_results(tmp_path, value)
    with pytest.raises(InputError, match=r"results\.json: damaged .*stage=evaluate again") as error:
        load_results(path)
    assert "\n" not in str(error.value)


def test_missing_cut_and_doubled_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stage=evaluate"):
        load_results(tmp_path / "results.json")
    path = write_results(tmp_path, example(prompts_per_task=2))
    path.write_text(path.read_text()[:500])
    with pytest.raises(InputError, match="damaged"):
        load_results(path)
    write_results(tmp_path, example(prompts_per_task=2))
    write_results(tmp_path, example(prompts_per_task=2), "copy")
    with pytest.raises(InputError, match="smollm2-135m has another"):
        load_all(tmp_path / "evaluation")


# The page


class Page(HTMLParser):
    """Every tag closed, what is linked, and the text."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.links.append(value or "")
            if name == "alt":
                self.alts.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("report")
    write_results(data, example(prompts_per_task=3))
    write_results(data, example("tiny", prompts_per_task=3, seed=1, speed=0.9, unseen=True))
    return run_report(data)


def test_page_needs_nothing_else(full: Path) -> None:
    source = (full / "report.html").read_text(encoding="utf-8")
    found = Page(source)
    assert '<meta charset="utf-8">' in source
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert found.links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in found.links)
    assert "url(" not in source
    assert "@import" not in source
    assert found.tags.count("img") == len(found.alts) == 14
    assert all(found.alts)
    assert found.tags.count("h1") == 1
    anchors = {link[1:] for link in found.links if link.startswith("#")}
    assert all(f'id="{anchor}"' in source for anchor in anchors)


def test_page_has_every_section(full: Path) -> None:
    text = " ".join(Page((full / "report.html").read_text(encoding="utf-8")).text)
    for words in (
        "Settings",
        "Speed-up by task",
        "Generalisation",
        "Ablations",
        "Where the mid drafter expands",
        "When the mid drafter is called",
        "What a round costs",
        "Throughput against mid calls",
        "61.47",
        "1.48",
        "holds",
        "Pair tiny (unseen)",
    ):
        assert words in text
    assert "nan" not in text.split()
    assert "None" not in text


def cells_of(line: str) -> int:
    """Count the cells of a Markdown row; an escaped pipe separates nothing."""
    return len(re.split(r"(?<!\\)\|", line.strip())) - 2


def check_tables(text: str) -> int:
    tables = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    for lines in tables:
        counts = {cells_of(line) for line in lines.splitlines()}
        assert len(counts) == 1, lines
        assert re.fullmatch(r"\|( :?-+:? \|)+", lines.splitlines()[1])
    return len(tables)


def test_markdown_has_the_same_tables_and_pictures(full: Path) -> None:
    text = (full / "report.md").read_text(encoding="utf-8")
    source = (full / "report.html").read_text(encoding="utf-8")
    assert check_tables(text) == source.count("<table>")
    pictures = re.findall(r"^!\[.*\]\((.*)\)$", text, flags=re.MULTILINE)
    assert len(pictures) == source.count("<img")
    for name in pictures:
        assert (full / name).read_bytes().startswith(b"\x89PNG")
    assert not [p for p in full.iterdir() if p.name.endswith(".tmp")]
    assert json.loads((full / "metrics.json").read_text())


def test_report_again_is_the_same(full: Path) -> None:
    before = {p.name: p.read_bytes() for p in full.glob("report.*")}
    run_report(full.parent)
    assert {p.name: p.read_bytes() for p in full.glob("report.*")} == before


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<b>&|$x$*\"'_y_"
    write_results(tmp_path, example(pair="a<i>&b", tasks=("gsm8k", name), prompts_per_task=2))
    folder = run_report(tmp_path)
    source = (folder / "report.html").read_text(encoding="utf-8")
    found = Page(source)
    assert not {"b", "i"} & set(found.tags)
    assert "&lt;b&gt;&amp;|" in source
    assert any(name in text for text in found.text)
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert check_tables(text) == source.count("<table>")
    assert r"&lt;b&gt;&amp;\|" in text
    assert "<b>" not in text


def test_markdown_table_aligns_numbers() -> None:
    rows = [{"name": "a|b", "x": 1.5, "said": "yes"}, {"name": "c", "x": None, "said": "1"}]
    assert markdown_table(Table("t", rows)).splitlines()[2:] == [
        "| name | x | said |",
        "| :--- | ---: | :--- |",
        r"| a\|b | 1.50 | yes |",
        "| c | – | 1 |",
    ]


def test_missing_sections_are_said(tmp_path: Path) -> None:
    value = example(tasks=("gsm8k",), prompts_per_task=1)
    value["systems"] = [s for s in value["systems"] if s["role"] in ("plain", "small", "scheduler")]
    for system in value["systems"]:
        system |= {"predicted": None, "predicted_from": None}
    value |= {"replay": None, "picks": {}, "cost": {}, "calls_by_step": {}}
    write_results(tmp_path, value)
    folder = run_report(tmp_path)
    text = " ".join(Page((folder / "report.html").read_text(encoding="utf-8")).text)
    for words in (
        "No pair here is unseen",
        "No task here is unseen",
        "No speed-up was predicted",
        "No picks of the mid drafter were logged",
        "No system that decides its calls",
        "The cost of a round was not logged",
        "no exact replay",
        "not measured here",
        ONE_PROMPT,
    ):
        assert words in text, words
    assert sorted(p.name for p in folder.glob("*.png")) == [
        "smollm2-135m-speedups.png",
        "smollm2-135m-tasks.png",
    ]


def test_picks_of_a_system_without_calls_are_left_out(tmp_path: Path) -> None:
    value = example(prompts_per_task=2)
    value["picks"]["all_small"] = {
        **{"calls": 0, "picks": 0, "earlier_share": None, "by_offset": {}},
        **{"pool": None, "frontier": None, "usual_pool": None},
    }
    blocks = list(page.picks(parse_results(value, HERE), page.Pictures(tmp_path, "p")))
    table = next(b for b in blocks if isinstance(b, Table))
    assert [row["system"] for row in table.rows] == ["fixed 10101", "TreeGraft", "paper"]


def test_calls_of_a_fixed_schedule_are_not_drawn(tmp_path: Path) -> None:
    value = example(prompts_per_task=2)
    value["calls_by_step"] = {"fixed": {"all": [1.0, 0.0, 1.0, 0.0, 1.0]}, "csd": {}}
    blocks = list(page.calls(parse_results(value, HERE), page.Pictures(tmp_path, "p")))
    assert not [b for b in blocks if isinstance(b, Table)]
    assert not list(tmp_path.iterdir())


def test_no_results_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no results\.json .*stage=evaluate"):
        run_report(tmp_path)
    assert not (tmp_path / "report").exists()
