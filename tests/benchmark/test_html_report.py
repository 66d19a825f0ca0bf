"""The HTML page: well-formed, self-contained, and with what the results say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from tests.benchmark.synthetic_results import (
    make_compare_result,
    make_result,
    make_threshold_block,
    make_threshold_result,
)
from trtllm_mla.benchmark import html_page, plots
from trtllm_mla.benchmark.html_report import write_html_report

VOID = {"meta", "wbr", "br"}
# What figures show of a name has a formula, control characters and an element too.
HOSTILE = '_$\\frac{$\x00\x1b[31m\u202e</td><script>alert("x")</script><img src=http://evil.example/x>&lt; %s {0}'


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1][-1] += data

    def row(self, label: str) -> list[str]:
        return next(cells[1:] for cells in self.cells if cells and cells[0] == label)

    @property
    def headings(self) -> list[str]:
        return [data for data in self.words if data.strip()]


def _report(tmp_path, results):
    paths = []
    for name, values in results.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(values))
    assert write_html_report(paths, tmp_path / "report.html") == (tmp_path / "report.html").stat().st_size
    return (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def results():
    return {
        "one": make_result(1, concurrency=1),
        "many": make_result(2, concurrency=16),
        "remote": make_result(3, kind="endpoint", concurrency=16),
        "threshold": make_threshold_result(),
        "compare": make_compare_result(),
    }


@pytest.fixture(scope="module")
def text(results, tmp_path_factory):
    return _report(tmp_path_factory.mktemp("report"), results)


def _check_self_contained(page: Page, text: str) -> None:
    assert "script" not in page.tags
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), f"{tag} {name}"
        if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert value.startswith("#"), f"{tag} {name}={value}"
        if value and "url(" in value:
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", value))
    assert "@import" not in text
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    targets = [value[1:] for _, name, value in page.attributes if name == "href"]
    targets += re.findall(r"url\(#([^)]*)\)", text)
    assert targets
    assert set(targets) <= set(ids)


def test_the_page_is_well_formed_and_loads_nothing(text):
    page = Page(text)
    _check_self_contained(page, text)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')


def test_every_section_is_there(text):
    headings = Page(text).headings
    for heading in (
        "Benchmark report: tiny-mla",
        "Summary",
        "Latency distribution",
        "Throughput against concurrency",
        "Cache use over time",
        "Prefill threshold: threshold",
        "Comparison: compare",
        "What was measured",
        "onnxruntime on tiny-mla: 74 tokens.",
    ):
        assert heading in headings
    # Three distributions, one throughput, three timelines, two of the threshold, two of the comparison.
    assert Page(text).tags.count("svg") == 3 + 1 + 3 + 2 + 2


def test_figures_have_titles_units_legends_and_descriptions(text):
    page = Page(text)
    for words in (
        "time to first token, ms",
        "time per output token, ms",
        "from arrival to last token, ms",
        "requests, %",
        "output tokens per second",
        "requests at a time",
        "seconds from the start",
        "pages in use",
        "pool of 96 pages",
        "waiting",
        "p99",
        "new tokens of the chunk",
        "recommended: 74",
        "by operations: 41",
        "prefill_absorption_threshold, tokens",
        "Decode step, ms",
    ):
        assert words in page.words
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg")
    assert all(len(label) > 20 for label in labels)
    assert page.tags.count("metadata") == 0


def test_the_summary_has_the_numbers_of_every_result(text, results):
    page = Page(text)
    assert page.row("Kind") == ["throughput", "throughput", "endpoint", "threshold", "compare"]
    assert page.row("Requests at a time") == ["1", "16", "16", "8", "8"]
    latency = [results[name]["performance"]["request_latency_percentiles_ms"] for name in ("one", "many", "remote")]
    found = page.row("Request, p99")
    assert [float(cell.replace(",", "")) for cell in found[:3]] == pytest.approx(
        [item["p99"] for item in latency], rel=1e-3
    )
    assert found[3:] == ["", ""]
    assert page.row("Bytes per token, all layers")[0] == "1,024"
    assert page.row("timer") == ["wall clock of this process (perf_counter)"]
    assert page.row("machine.packages.numpy") == ["2.4.0"]
    assert page.row("options.seed") == ["1"]


def test_the_tables_of_threshold_and_comparison(text):
    page = Page(text)
    block = make_threshold_block()
    row = page.row("64 after 512")
    chunk = next(item for item in block["chunks"] if (item["history"], item["num_tokens"]) == (512, 64))
    assert float(row[0].split()[0]) == pytest.approx(chunk["absorbed_ms"]["median"], rel=1e-3)
    assert float(row[2].split()[0]) == pytest.approx(chunk["difference_ms"]["median"], rel=1e-2)
    assert page.row("256")[2:] == ["128", "0"]
    assert page.row("Prefill, ms")[1].startswith("50.40 (47.9 to 55.4)")
    assert page.row("as a multiple of the first")[1] == "2.400 (2.33 to 2.50)"


def test_the_same_results_give_the_same_bytes(results, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert _report(tmp_path / "a", results) == _report(tmp_path / "b", results)


def test_text_of_results_cannot_leave_its_place(tmp_path):
    """Every text of every kind of result is hostile: no element, attribute or reference comes of it."""

    def poison(value):
        if isinstance(value, dict):
            kept = ("kind", "finish_reason", "mode")
            return {key: item if key in kept else poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    results = [make_result(1), make_result(2, concurrency=2), make_threshold_result(), make_compare_result()]
    poisoned = {f"r{index}": poison(result) for index, result in enumerate(results)}
    poisoned["r3"]["trtllm_mla"]["compare"]["metrics"] = {"prefill_ms": HOSTILE}
    poisoned["r0"]["trtllm_mla"]["machine"] = {HOSTILE: HOSTILE, "deep": {"a": {"b": {"c": {"d": [HOSTILE]}}}}}
    text = _report(tmp_path, poisoned)
    page = Page(text)
    _check_self_contained(page, text)
    assert "img" not in page.tags
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    assert shown in "".join(page.words)
    assert sum(shown[:20] in words for words in page.words if shown not in words) >= 3, "in figures it is cut"


def test_long_texts_and_many_facts_are_cut(tmp_path):
    result = make_result(1)
    result["engine"]["model"] = "m" * 9_000
    result["trtllm_mla"]["options"] = {f"key{index}": "v" * 5_000 for index in range(1_000)}
    result["trtllm_mla"]["machine"] = {"list": list(range(100_000))}
    text = _report(tmp_path, {"long": result})
    assert "m" * 401 not in text
    assert "v" * 401 not in text
    assert "more in the file" in text
    assert len(text) < 1_000_000


def test_many_requests_make_no_large_figure(tmp_path):
    small = len(_report(tmp_path, {"a": make_result(1, count=1_000)}))
    assert len(_report(tmp_path, {"a": make_result(1, count=20_000)})) < 1.3 * small


def test_results_with_little_in_them(tmp_path):
    """No streaming metrics, no log, no timeline, one concurrency: what there is, is shown."""
    result = make_result(1, requests=[], timeline=None)
    del result["streaming_metrics"]
    page = Page(_report(tmp_path, {"bare": result}))
    assert "svg" not in page.tags
    assert "Summary" in page.headings
    assert "Latency distribution" not in page.headings


def test_a_result_has_one_colour_in_all_distributions(tmp_path):
    """The first result has no times of first tokens; the second keeps the second colour."""
    first, second = make_result(1), make_result(2)
    for row in first["trtllm_mla"]["requests"]:
        row["first_token_s"] = None
    del first["streaming_metrics"]
    text = _report(tmp_path, {"first": first, "second": second})
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)[:3]
    assert [plots.PALETTE[0] in figure for figure in figures] == [False, False, True]
    assert [plots.PALETTE[1] in figure for figure in figures] == [True, True, True]


def test_more_results_than_colours(tmp_path):
    results = {f"result{index}": make_result(index, concurrency=1 + index, count=20) for index in range(11)}
    page = Page(_report(tmp_path, results))
    assert page.tags.count("svg") == 2 * 3 + 1 + 11
    assert all(f"result{index}" in page.words for index in range(11))


def _luminance(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("color", plots.PALETTE)
def test_figures_are_legible_on_light_and_on_dark_pages(color):
    pages = re.findall(r"--page: (#\w{6})", html_page.STYLE)
    assert len(pages) == 2
    assert all(_contrast(color, page) >= 3 for page in pages)


def test_text_is_legible_on_light_and_on_dark_pages():
    for name in ("text", "soft"):
        pairs = zip(
            re.findall(rf"--{name}: (#\w{{6}})", html_page.STYLE),
            re.findall(r"--page: (#\w{6})", html_page.STYLE),
            strict=True,
        )
        assert all(_contrast(ink, page) >= 4.5 for ink, page in pairs)
