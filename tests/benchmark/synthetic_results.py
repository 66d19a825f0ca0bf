"""Results as ``bench`` writes them, from requests and steps that were made up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from trtllm_mla.benchmark import metrics
from trtllm_mla.benchmark.records import RequestRecord
from trtllm_mla.benchmark.spread import MedianInterval, Spread


def make_records(count: int, seed: int, *, slowness: float = 1.0) -> list[RequestRecord]:
    """Requests of mixed lengths with arrivals, the last one cancelled."""
    generator = np.random.default_rng(seed)
    records, arrival = [], 0.0
    for index in range(count):
        arrival += float(generator.exponential(0.02))
        output_tokens = int(generator.integers(1, 90))
        first = arrival + slowness * float(generator.lognormal(-3.5, 0.6))
        step = slowness * float(generator.lognormal(-5.5, 0.3))
        times = tuple(first + step * number for number in range(output_tokens))
        reason = "cancelled" if index == count - 1 else "length"
        records.append(RequestRecord(index, 100 + index, output_tokens, arrival, times, times[-1], reason))
    return records


def make_timeline(seed: int, steps: int = 700) -> dict[str, list[float]]:
    """Pages and requests that come and go."""
    generator = np.random.default_rng(seed)
    pages = np.clip(np.cumsum(generator.integers(-4, 5, steps)) + 40, 0, 96)
    return {
        "seconds": np.linspace(0, 6.5, steps).tolist(),
        "pages_in_use": pages.tolist(),
        "running": np.ceil(pages / 6).tolist(),
        "waiting": np.clip(60 - np.arange(steps) // 8, 0, None).tolist(),
    }


def make_result(seed: int, *, kind: str = "throughput", concurrency: int = 8, count: int = 120, **own: Any) -> dict:
    """A result with requests and a timeline."""
    records = make_records(count, seed, slowness=1 + concurrency / 16)
    return {
        "engine": {
            "model": "tiny-mla",
            "model_path": "examples/tiny-mla",
            "engine_dir": "network",
            "version": "0.1.0",
            "backend": "onnxruntime",
            "dtype": "float32",
            "kv_cache_dtype": "fp32",
            "quantization": None,
        },
        "request_info": metrics.request_info(records),
        "performance": metrics.performance(records),
        "streaming_metrics": metrics.streaming_metrics(records),
        "trtllm_mla": {
            "format": 1,
            "kind": kind,
            "executor": "ONNX Runtime 1.32.0, CPU, float32 twin of the bfloat16 network",
            "timer": "wall clock of this process (perf_counter)",
            "sha256": f"{seed:064x}",
            "versions": {"trtllm_mla": "0.1.0", "onnxruntime": "1.32.0"},
            "options": {"concurrency": concurrency, "request_rate": None, "warmup": 2, "seed": seed},
            "machine": {"name": "AMD EPYC", "usable_cores": 2, "packages": {"numpy": "2.4.0"}},
            "cache_bytes_per_token": {"latent": 1024, "decompressed": 6336},
            "cache_bytes_pool": 96 * 64 * 1024,
            "page_size": 64,
            "num_pages": 96,
            "pages_peak": 91,
            "num_preemptions": 3,
            "reused_tokens": 512,
            "chunks": {"num_context_chunks": 30, "num_absorbed_chunks": 99},
            "requests": [record.to_json() for record in records],
            "timeline": make_timeline(seed),
            **own,
        },
    }


def make_threshold_block(seed: int = 0) -> dict[str, Any]:
    """A measurement with a break-even between 64 and 96 tokens."""
    generator = np.random.default_rng(seed)

    def samples(milliseconds: float) -> list[float]:
        return (milliseconds * generator.lognormal(0, 0.05, 10)).tolist()

    chunks = []
    for history in (0, 512):
        for length in (8, 16, 32, 64, 96, 128, 256, 512):
            absorbed, decompressed = samples(1 + length / 12), samples(6 + length / 220 + history / 1000)
            difference = [first - second for first, second in zip(absorbed, decompressed, strict=True)]
            chunks.append(
                {
                    "history": history,
                    "num_tokens": length,
                    "absorbed_ms": asdict(Spread.of(absorbed)),
                    "decompressed_ms": asdict(Spread.of(decompressed)),
                    "difference_ms": asdict(MedianInterval.of(difference)),
                }
            )
    return {
        "configured": 256,
        "workloads": [
            {
                "threshold": threshold,
                "prefill_ms": asdict(Spread.of(samples(22.0 if threshold <= 128 else 30.0))),
                "decode_step_ms": asdict(Spread.of(samples(1.4))),
                "context_tokens": 128 if threshold <= 128 else 0,
                "absorbed_tokens": 0 if threshold <= 128 else 128,
            }
            for threshold in (1, 64, 128, 256, 512, 1024)
        ],
        "chunks": chunks,
        "predicted": [{"history": 0, "num_tokens": None}, {"history": 512, "num_tokens": 38.2}],
        "predicted_limit": 40.6,
        "recommendation": {
            "threshold": 74,
            "low": 65,
            "high": 96,
            "is_decided": True,
            "text": "onnxruntime on tiny-mla: 74 tokens.",
        },
    }


def make_threshold_result(seed: int = 0) -> dict[str, Any]:
    """A result of kind ``threshold``."""
    result = make_result(seed, kind="threshold", threshold=make_threshold_block(seed))
    return {"engine": result["engine"], "trtllm_mla": _without_log(result["trtllm_mla"])}


def make_compare_result() -> dict[str, Any]:
    """A result of kind ``compare``."""
    subjects = []
    for index, name in enumerate(("onnxruntime", "huggingface", "interpreter")):
        scale = (1.0, 2.4, 180.0)[index]
        metrics_of = {
            key: {
                "value": value * scale,
                "low": value * scale * 0.95,
                "high": value * scale * 1.1,
                "ratio": scale,
                "ratio_low": scale * 0.97,
                "ratio_high": scale * 1.04,
            }
            for key, value in (("prefill_ms", 21.0), ("decode_step_ms", 1.37))
        }
        subjects.append({"name": name, "description": f"what {name} is", "same_tokens": 1.0, "metrics": metrics_of})
    block = {
        "mode": "run",
        "metrics": {"prefill_ms": "Prefill, ms", "decode_step_ms": "Decode step, ms"},
        "subjects": subjects,
    }
    own = make_result(1, kind="compare", compare=block)["trtllm_mla"]
    return {"engine": {"model": "tiny-mla"}, "trtllm_mla": _without_log(own)}


def _without_log(own: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key not in {"requests", "timeline"}}
