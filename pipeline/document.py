"""A document of headings, text, tables and pictures, written as one HTML page or as Markdown."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

Row = Mapping[str, Any]
NONE = "–"


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Sentences, one an item."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows with the same keys; the first column heads its row."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Picture:
    """A PNG file with a text that says what it shows."""

    title: str
    path: Path
    alt: str


Block = Heading | Paragraph | Listing | Table | Picture

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6370; --line: #d5d9df;
  --paper: #ffffff; --band: #f3f5f8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3abb8; --line: #3a404b;
  --paper: #16181c; --band: #1f2329; --accent: #56b4e9; } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; }
h2 { font-size: 1.35rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin-top: 2rem; }
a { color: var(--accent); }
nav ul { padding-left: 1.2rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { background: var(--band); vertical-align: bottom; }
tbody th { font-weight: 600; }
.number { text-align: right; }
td.number { white-space: nowrap; }
figure { margin: 1.2rem 0; }
figure img { display: block; width: 100%; max-width: 700px; height: auto; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: .9rem; max-width: 700px; }
"""


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return column names, every cell as text, and which columns hold numbers.

    The floats of one column share their decimals, so that they align; no value is a dash.
    """
    names = list(rows[0])
    columns = [_column([row.get(name) for row in rows]) for name in names]
    numeric = [all(re.match(r"[-+−]?\d|–$", cell) for cell in column) for column in columns]
    return names, [list(line) for line in zip(*columns, strict=True)], numeric


def _column(values: Sequence[Any]) -> list[str]:
    floats = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v)]
    decimals = (
        0 if max(floats, default=0.0) >= 1000 else 1 if max(floats, default=0.0) >= 100 else 2
    )
    return [_cell(value, decimals) for value in values]


def _cell(value: Any, decimals: int) -> str:
    if value is None or value == "":
        return NONE
    if isinstance(value, float):
        return f"{value:,.{decimals}f}" if math.isfinite(value) else NONE
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(str(value).split())


def html_page(blocks: Sequence[Block]) -> str:
    """Return one page that needs no other file: inline style, pictures as base64.

    The first block is the heading that names the page; links to the sections follow it.
    """
    parts = [_html(number, block) for number, block in enumerate(blocks)]
    body = "\n".join([parts[0], contents(blocks), *parts[1:]])
    title = next(block.text for block in blocks if isinstance(block, Heading))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def contents(blocks: Sequence[Block]) -> str:
    """Return links to the headings of level 2, as HTML."""
    links = [
        f'<li><a href="#s{number}">{html.escape(block.text)}</a></li>'
        for number, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level == 2
    ]
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def _html(number: int, block: Block) -> str:
    if isinstance(block, Heading):
        return f'<h{block.level} id="s{number}">{html.escape(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Listing):
        return "<ul>" + "".join(f"<li>{html.escape(x)}</li>" for x in block.items) + "</ul>"
    if isinstance(block, Table):
        return _html_table(block)
    data = base64.b64encode(block.path.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(block.alt)}">'
        f"<figcaption>{html.escape(block.title)}</figcaption></figure>"
    )


def _html_table(table: Table) -> str:
    names, lines, numeric = cells(table.rows)
    kinds = [' class="number"' if n and i else "" for i, n in enumerate(numeric)]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(name)}</th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = ""
    for first, *rest in lines:
        others = zip(rest, kinds[1:], strict=True)
        body += f'<tr><th scope="row">{html.escape(first)}</th>' + "".join(
            f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in others
        )
        body += "</tr>\n"
    title = html.escape(table.title)
    # The wrapper scrolls, not the page; it takes the focus so that a keyboard can scroll it.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">\n<table>\n'
        f"<caption>{title}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        "</table>\n</div>"
    )


def markdown_page(blocks: Sequence[Block]) -> str:
    """Return the document as Markdown; pictures are linked by file name, beside the page."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {plain_text(block.text)}"
    if isinstance(block, Paragraph):
        return plain_text(block.text)
    if isinstance(block, Listing):
        return "\n".join(f"- {plain_text(item)}" for item in block.items)
    if isinstance(block, Table):
        return markdown_table(block)
    return f"![{plain_text(block.alt)}]({quote(block.path.name)})\n\n{plain_text(block.title)}"


def markdown_table(table: Table) -> str:
    """Return a Markdown table under its title; numbers are right-aligned."""
    names, lines, numeric = cells(table.rows)
    rule = ["---:" if n and i else ":---" for i, n in enumerate(numeric)]
    rows = [list(map(plain_text, names)), rule, *(list(map(plain_text, line)) for line in lines)]
    return "\n".join([plain_text(table.title), "", *(f"| {' | '.join(row)} |" for row in rows)])


def plain_text(text: str) -> str:
    """Return text in which no character is Markdown or HTML."""
    one_line = " ".join(text.split())
    escaped = html.escape(re.sub(r"([\\`*|\[\]])", r"\\\1", one_line), quote=False)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", escaped)
