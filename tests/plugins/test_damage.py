"""Damaged library data, and the evaluator under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.conftest import PLUGINS, build
from tests.plugins.evaluator import Evaluator, Library, PlanError
from tests.plugins.random_plans import generator, kernel_files, random_form
from trtllm_mla.engine.plan_data import MAGIC, PlannedOperation, library_data
from trtllm_mla.ops import OPS

# Longer by hand: a minute and more.
FUZZ_SECONDS = float(os.environ.get("TRTLLM_MLA_FUZZ_SECONDS", "4"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Library data with every operation in two forms."""
    rng, planned = generator(8), list[PlannedOperation]()
    for definition in OPS.values():
        forms = (form for _ in range(100) if (form := random_form(rng, definition)) is not None)
        planned += [next(forms).planned, next(forms).planned]
    directory = tmp_path_factory.mktemp("kernels")
    return library_data(tuple(OPS.values()), planned, kernel_files(planned, directory))


def test_data_that_ends_early_is_refused(evaluator: Evaluator, data: bytes) -> None:
    Library(evaluator, data).close()
    for size in {*range(0, len(data), 37), *range(40), *range(len(data) - 40, len(data))}:
        with pytest.raises(PlanError, match=r"^library data: "):
            Library(evaluator, data[:size])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "found no 'TMLAPLAN'"),
        (lambda data: b"\x7fELF" + data[4:], "found no 'TMLAPLAN'"),
        (lambda data: MAGIC + b"\x02" + data[len(MAGIC) + 1 :], "found format 2, expected 1: .* another version"),
        (lambda data: data + b"\0", "found bytes behind the last operation"),
        (lambda data: MAGIC + b"\x01" + b"\xff" * 11, "found a number of more than 64 bits"),
        (lambda data: MAGIC + b"\x01\xff\xff\xff\xff\x07", "expected at most as many as the bytes that follow"),
    ],
)
def test_what_is_wrong_is_named(evaluator: Evaluator, data: bytes, change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        Library(evaluator, change(data))


def test_a_library_of_nothing_is_closed(evaluator: Evaluator) -> None:
    evaluator.c.tmla_library_close(None)
    evaluator.c.tmla_plan_free(None)


class TestSanitizers:
    """Each prints and fails where the evaluator touches memory that is not its own, or what C++ leaves undefined."""

    def test_damaged_data_and_random_calls(self, sanitized: Path, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "library.bin"
        path.write_bytes(data)
        command = [str(sanitized / "trtllm_mla_fuzz"), str(path), str(FUZZ_SECONDS)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        words = result.stdout.splitlines()[-1].split()
        counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert counts["libraries"] > counts["opened"] > 0
        assert counts["calls"] > counts["found"] > counts["plans"] > 0

    def test_plans(self, sanitized: Path) -> None:
        libraries = [
            subprocess.run(
                ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libstdc++.so")
        ]
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.plugins.random_plans",
                str(sanitized / "libtrtllm_mla_plan.so"),
                "--forms=4",
                "--calls=40",
            ],
            # Python itself leaks at its end.
            env={**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert " plan\n" in result.stdout


@pytest.mark.parametrize("standard", ["c99", "c++17"])
def test_the_interface_is_plain_c_too(tools: None, standard: str) -> None:
    header = PLUGINS / "include" / "trtllm_mla" / "plan.h"
    language = "c" if standard == "c99" else "c++"
    options = [f"-std={standard}", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-x", language]
    result = subprocess.run(["g++", *options, str(header)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_data_is_embedded(tools: None, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "library.bin"
    path.write_bytes(data)
    build(tmp_path / "build", "trtllm_mla_embedded", f"-DTRTLLM_MLA_LIBRARY_DATA={path}", "-DTRTLLM_MLA_PLUGINS=OFF")
    program = tmp_path / "build" / "trtllm_mla_embedded"
    result = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("14 operations, ")
