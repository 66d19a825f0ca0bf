from __future__ import annotations

from typing import Any

import pytest

from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.logs import LogCapture, capture_logs, trt_logger

trt: Any = pytest.importorskip("tensorrt_rtx")


def test_keeps_each_warning_and_error_once(capfd: pytest.CaptureFixture[str]) -> None:
    backend = load_backend("tensorrt-rtx")
    severity = trt.ILogger.Severity
    with capture_logs(backend) as log:
        logger = trt_logger(backend)
        for _ in range(2):
            logger.log(severity.ERROR, "no such\n  layer")
            logger.log(severity.WARNING, "slow")
        logger.log(severity.INTERNAL_ERROR, "broken")
        logger.log(severity.INFO, "building")
        noise = "A node named x already exists, the output tensors of this new instance will not be queryable."
        logger.log(severity.WARNING, noise)
    logger.log(severity.ERROR, "later")
    assert log.errors == ["no such layer", "broken"]
    assert log.warnings == ["slow"]
    assert capfd.readouterr() == ("", "")


def test_keeps_the_most_memory_that_an_engine_takes() -> None:
    backend = load_backend("tensorrt-rtx")
    severity = trt.ILogger.Severity
    with capture_logs(backend) as log:
        assert log.activation_bytes is None
        for size in (4096, 123456789, 512):
            trt_logger(backend).log(severity.INFO, f"Total Activation Memory: {size} bytes")
        trt_logger(backend).log(severity.INFO, "Total Weights Memory: 999999999999 bytes")
    assert log.activation_bytes == 123456789
    assert (log.errors, log.warnings) == ([], [])


def test_tensorrts_own_messages_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    backend = load_backend("tensorrt-rtx")
    with capture_logs(backend) as log:
        builder = trt.Builder(trt_logger(backend))
        network = builder.create_network(backend.network_flags())
        assert builder.build_serialized_network(network, builder.create_builder_config()) is None
    assert log.errors
    assert capfd.readouterr() == ("", "")


def test_a_summary_is_short() -> None:
    assert LogCapture().summary() == "it gave no reason"
    assert LogCapture(errors=["a", "b"]).summary() == "a; b"
    many = LogCapture(errors=["x" * 5000, "b", "c", "d", "e"])
    assert many.summary() == f"{'x' * 600}; b; c (and 2 more errors)"
