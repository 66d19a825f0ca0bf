import json

import pytest

from tests.benchmark.synthetic_results import make_result


def test_a_page_from_what_bench_wrote(command, network, checkpoint, tmp_path):
    outcome = command(
        *("bench", "latency", network, "-c", checkpoint[0], "--input-len", 20, "--output-len", 4, "--batch-size", 2),
        *("--warmup", 0, "--iterations", 2, "--json", tmp_path / "latency.json"),
    )
    assert outcome.status == 0, outcome.err
    (tmp_path / "made.json").write_text(json.dumps(make_result(1)))
    page = tmp_path / "new" / "page.html"
    outcome = command("report", tmp_path / "latency.json", tmp_path / "made.json", "-o", page)
    assert outcome.status == 0, outcome.err
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    # Three distributions, throughput against 2 and 8 requests at a time, both timelines.
    assert text.count("<svg") == 3 + 1 + 2
    assert "Wrote " in outcome.err
    again = tmp_path / "again.html"
    command("report", tmp_path / "latency.json", tmp_path / "made.json", "-o", again)
    assert again.read_text() == text


@pytest.mark.parametrize(
    ("name", "content", "output", "message"),
    [
        ("absent.json", None, "page.html", "no such file"),
        ("bad.json", "{", "page.html", "not valid JSON"),
        ("other.json", '{"performance": {}}', "page.html", "found no block 'trtllm_mla'"),
        ("bad.json", '{"a\\u001b[31m\\n": 1}', "page.html", "found no block 'trtllm_mla'"),
        ("good.json", json.dumps(make_result(1)), "page.pdf", "found the ending '.pdf', expected .html"),
        ("good.json", json.dumps(make_result(1)), "file/page.html", "is a file, expected a writable directory"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, tmp_path, name, content, output, message):
    (tmp_path / "file").touch()
    if content is not None:
        (tmp_path / name).write_text(content)
    outcome = command("report", tmp_path / name, "-o", tmp_path / output)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / output).exists()


def test_help_has_an_example(command):
    assert "Example: trtllm-mla report" in " ".join(command("report", "--help").out.split())


def test_a_page_whose_name_looks_like_markup(command, tmp_path):
    (tmp_path / "made.json").write_text(json.dumps(make_result(1)))
    page = tmp_path / "[" / "x].html"
    outcome = command("report", tmp_path / "made.json", "-o", page)
    assert outcome.status == 0, outcome.err
    assert outcome.err.startswith(f"Wrote {page} (")
