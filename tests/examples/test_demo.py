import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_ends_in_a_summary(tmp_path):
    """Slow because it builds an engine and validates twice, once in Triton's interpreter."""
    result = subprocess.run(
        [sys.executable, DEMO, "--output", tmp_path / "output"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = result.stdout[result.stdout.index("Summary") :]
    for command in ("inspect", "convert", "build", "validate", "generate", "latency", "throughput", "report"):
        assert command in summary
    assert "FAILED" not in result.stdout


def test_the_demo_stops_at_a_failing_command(tmp_path):
    (tmp_path / "output" / "network").mkdir(parents=True)
    (tmp_path / "output" / "network" / "letter.txt").write_text("x")
    result = subprocess.run(
        [sys.executable, DEMO, "--output", tmp_path / "output"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "never replaced" in result.stderr
    assert "Summary" not in result.stdout
