"""Figures as files; what they show is tested with the page that has them."""

from __future__ import annotations

import sys

import pytest

from tests.benchmark.synthetic_results import make_compare_result, make_threshold_block
from trtllm_mla.benchmark.plots import (
    check_plot_path,
    draw_comparison,
    draw_distribution,
    draw_threshold_report,
    save_figure,
    to_svg,
)
from trtllm_mla.benchmark.result_files import CompareBlock, ThresholdBlock
from trtllm_mla.errors import MissingDependencyError, UserError


@pytest.fixture
def block():
    return ThresholdBlock.model_validate(make_threshold_block())


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_files_are_the_same_each_time(block, suffix, magic, tmp_path):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        save_figure(draw_threshold_report(block), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(magic)


def test_an_undecided_threshold_has_no_line(block):
    assert "recommended: 74" in to_svg(draw_threshold_report(block))
    undecided = block.recommendation.model_copy(update={"is_decided": False})
    assert "recommended" not in to_svg(draw_threshold_report(block.model_copy(update={"recommendation": undecided})))


def test_percentiles_are_marked_where_the_summary_has_them():
    samples = [float(value) for value in range(1, 101)]
    figure = draw_distribution("Title", "milliseconds", {"a": samples[::-1]})
    (axes,) = figure.axes
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [(51.0, 50.0), (91.0, 90.0), (100.0, 99.0)]
    curve = axes.lines[0].get_xydata().tolist()
    assert curve[0] == [1.0, 0.0]
    assert curve[-1] == [100.0, 100.0]
    assert [50.0, 50.0] in curve


def test_a_comparison_shows_each_subject_and_its_spread():
    comparison = CompareBlock.model_validate(make_compare_result()["trtllm_mla"]["compare"])
    (axes,) = draw_comparison(comparison, "prefill_ms").axes
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([21.0, 50.4, 3780.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["onnxruntime", "huggingface", "interpreter"]


def test_paths_are_checked_before_the_work(tmp_path, monkeypatch):
    check_plot_path(tmp_path / "a.svg")
    with pytest.raises(UserError, match=r"found the ending '.gif', expected one of .svg, .png, .pdf"):
        check_plot_path(tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="plots"):
        check_plot_path(tmp_path / "a.svg")
