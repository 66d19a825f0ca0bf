"""The blocks of a report, counted again from its request log: another code path, with numpy's own order statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def order_statistics(samples: Any) -> dict[str, float] | None:
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return None
    found = {}
    for name, share in SHARES.items():
        rank = int(values.size * share)
        found[name] = np.partition(values, rank)[rank]
    return {**found, "minimum": values.min(), "maximum": values.max(), "average": values.mean()}


def recount(log: list[dict[str, Any]]) -> dict[str, Any]:
    """``request_info``, ``performance`` and ``streaming_metrics`` of one GPU."""
    rows = [row for row in log if row["finish_reason"] in {"length", "stop"}]
    columns = {
        name: np.array([row[name] for row in rows], dtype=np.float64)
        for name in rows[0]
        if name.endswith("_s") and name != "token_times_s"
    }
    arrival, end = columns["arrival_s"], columns["end_s"]
    inputs = np.array([row["input_tokens"] for row in rows])
    outputs = np.array([row["output_tokens"] for row in rows])
    seconds = end.max() - arrival.min()
    streamed = ~np.isnan(columns["first_token_s"])
    first = columns["first_token_s"]
    several = streamed & (outputs > 1)
    generation = (end - first)[several]
    tpot = generation / (outputs[several] - 1)
    moving = generation > 0
    speeds = (outputs[several][moving] - 1) / generation[moving]
    latency = (end - arrival) * 1000
    ttft = (first - arrival)[streamed] * 1000
    return {
        "request_info": {
            "num_requests": len(rows),
            # The area under the number of requests in flight, event by event.
            "avg_num_concurrent_requests": area_in_flight(arrival, end) / seconds,
            "avg_input_length": inputs.mean(),
            "avg_output_length": outputs.mean(),
        },
        "performance": {
            "total_latency_ms": seconds * 1000,
            "avg_request_latency_ms": latency.mean(),
            "request_throughput_req_s": len(rows) / seconds,
            "system_output_throughput_tok_s": outputs.sum() / seconds,
            "system_total_throughput_tok_s": (inputs.sum() + outputs.sum()) / seconds,
            "output_throughput_per_user_tok_s": np.mean(outputs / (end - arrival)),
            "output_throughput_per_gpu_tok_s": outputs.sum() / seconds,
            "request_latency_percentiles_ms": order_statistics(latency),
        },
        "streaming_metrics": {
            "token_output_speed_tok_s": speeds.mean() if speeds.size else None,
            "avg_ttft_ms": ttft.mean() if ttft.size else None,
            "avg_tpot_ms": tpot.mean() * 1000 if tpot.size else None,
            "ttft_percentiles": order_statistics(ttft),
            "tpot_percentiles": order_statistics(tpot * 1000),
            "gen_tps_percentiles": order_statistics(speeds),
        },
    }


def area_in_flight(arrival: np.ndarray, end: np.ndarray) -> float:
    moments = np.concatenate([arrival, end])
    changes = np.concatenate([np.ones(len(arrival)), -np.ones(len(end))])
    order = np.argsort(moments, kind="stable")
    in_flight = np.cumsum(changes[order])[:-1]
    return float(np.sum(in_flight * np.diff(moments[order])))


def flatten(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, for comparison with a tolerance."""
    flat: dict[str, Any] = {}
    for key, value in block.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
