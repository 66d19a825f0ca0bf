"""The parts that the report's page is made of: escaped text, tables that scroll by themselves, inline figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from trtllm_mla.benchmark import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SHOWN_TEXT = 400

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1d2127; --soft: #59626e; --line: #d7dce2; --panel: #f5f7f9;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #15181d; --text: #e4e7eb; --soft: #a3acb8; --line: #363d47; --panel: #1d2128 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif }
header, main, footer { max-width: 1180px; margin: 0 auto; padding: 0 20px }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 28px 0 4px }
h2 { font-size: 1.2rem; margin: 36px 0 10px; padding-top: 10px; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 20px 0 8px; overflow-wrap: anywhere }
p { margin: 8px 0; max-width: 80ch; overflow-wrap: anywhere }
.soft, .caption, footer { color: var(--soft) }
.advice { background: var(--panel); border-left: 4px solid #2d9059; padding: 10px 14px }
.scroll { overflow-x: auto; margin: 10px 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
.caption { margin: 22px 0 0; font-size: .9rem }
th, td { padding: 4px 14px 4px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line) }
th[scope=row], thead th:first-child { text-align: left; position: sticky; left: 0; background: var(--page);
  font-weight: 500; min-width: 9.5rem }
thead th { vertical-align: bottom; max-width: 15rem; min-width: 6.5rem; overflow-wrap: break-word }
td { white-space: nowrap }
th[scope=rowgroup] { text-align: left; padding-top: 14px; font-weight: 700 }
.text td { white-space: normal; text-align: left; overflow-wrap: anywhere; max-width: 60rem }
.text th[scope=row] { position: static; font-weight: 500 }
.text table { table-layout: fixed; width: 100% }
.text th[scope=row] { width: 30%; min-width: 0; overflow-wrap: anywhere }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 18px }
figure { margin: 0; min-width: 0; max-width: 600px }
figure svg { width: 100%; height: auto; display: block }
details { border: 1px solid var(--line); border-radius: 6px; padding: 6px 14px; margin: 10px 0 }
summary { cursor: pointer; overflow-wrap: anywhere; font-weight: 500 }
footer { font-size: .85rem; padding-top: 24px; padding-bottom: 36px }
@media print { details { border: none } .scroll { overflow-x: visible } }
"""


def document(title: str, lead: str, sections: Iterable[str], end: str) -> str:
    """A whole page.

    Args:
        title: Its title.
        lead: A line below the title.
        sections: HTML of its sections; empty ones are left out.
        end: A line below them.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{text(title)}</h1>\n<p class="soft">{text(lead)}</p>\n</header>\n<main>\n'
        + "".join(sections)
        + f"</main>\n<footer>{text(end)}</footer>\n</body>\n</html>\n"
    )


def shown(text: str) -> str:
    """A text of a result, cut to a length and without what a page cannot hold."""
    short = text if len(text) <= MAX_SHOWN_TEXT else text[: MAX_SHOWN_TEXT - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in short)


def text(text: str) -> str:
    """A text as HTML."""
    return escape(shown(text))


def section(title: str, content: str) -> str:
    """A section of the page, with HTML as its content."""
    return f"<section>\n<h2>{text(title)}</h2>\n{content}</section>\n"


def table_head(labels: Iterable[str]) -> str:
    """A table's first row."""
    named = (text(label).replace("_", "_<wbr>") for label in labels)
    cells = "".join(f'<th scope="col">{label}</th>' if label else "<td></td>" for label in named)
    return f"<thead><tr>{cells}</tr></thead>\n"


def table_row(label: str, cells: Iterable[str]) -> str:
    """A further row; every cell is text."""
    return f'<tr><th scope="row">{text(label)}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>\n"


def table(caption: str, head: str, rows: Sequence[str]) -> str:
    """A table that scrolls by itself where the page is too narrow."""
    if not rows:
        return ""
    return (
        f'<p class="caption">{text(caption)}</p>\n'
        f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0"><table>\n{head}<tbody>\n'
        + "".join(rows)
        + "</tbody></table></div>\n"
    )


@dataclass(frozen=True)
class Drawing:
    """A figure and what it shows, in words."""

    figure: Figure
    description: str


def figures(prefix: str, drawings: Sequence[Drawing]) -> str:
    """Figures side by side where there is room.

    Args:
        prefix: What the names of their elements begin with, unlike others on the page.
        drawings: The figures.
    """
    inline = (_inline(drawing, f"{prefix}{index}-") for index, drawing in enumerate(drawings))
    return '<div class="figures">\n' + "".join(inline) + "</div>\n" if drawings else ""


def _inline(drawing: Drawing, prefix: str) -> str:
    """A figure as an element of the page: in the page's colours, described, with names of its own."""
    # Written by matplotlib just now, so nobody else's XML.
    root = ElementTree.fromstring(plots.to_svg(drawing.figure))  # noqa: S314
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        _localise(element, prefix)
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-label", shown(drawing.description))
    return f"<figure>{ElementTree.tostring(root, encoding='unicode')}</figure>\n"


def _localise(element: ElementTree.Element, prefix: str) -> None:
    """Makes an element's names the figure's own, and gives what is drawn in the foreground's colour the page's."""
    target = element.attrib.pop(_XLINK, None)
    if target is not None:
        element.set("href", f"#{prefix}{target.removeprefix('#')}")
    for name, value in element.attrib.items():
        if name == "id":
            element.set(name, prefix + value)
        elif name != "href":
            element.set(name, _REFERENCE.sub(rf"url(#{prefix}\1)", value))
    if "style" in element.attrib:
        element.set("style", element.attrib["style"].replace(plots.FOREGROUND, "currentColor"))
