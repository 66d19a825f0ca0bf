"""What became of each request of a benchmark, in the terms that every metric is computed from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from trtllm_mla.files import write_json_lines

RequestOutcome = Literal["length", "stop", "cancelled", "error"]
_COMPLETED = ("length", "stop")


@dataclass(frozen=True)
class RequestRecord:
    """One request, with moments in seconds from the start of the benchmark's clock.

    Attributes:
        task_id: The request's number in its dataset.
        input_tokens: Tokens of its prompt.
        output_tokens: New tokens that came, the first included.
        arrival: When it was due. Its latency counts from here, not from its admission.
        token_times: When its new tokens came, the first one first. A client that receives several tokens at once has
            fewer moments than tokens; one that does not stream has none.
        end: When the last of it came, or it was given up.
        finish_reason: ``length`` or ``stop`` where it was completed.
        num_preemptions: How often it lost its pages to another request and was recomputed.
        reused_tokens: Prompt tokens that were in the cache when it was first admitted.
    """

    task_id: int
    input_tokens: int
    output_tokens: int
    arrival: float
    token_times: tuple[float, ...]
    end: float
    finish_reason: RequestOutcome
    num_preemptions: int = 0
    reused_tokens: int = 0

    def __post_init__(self) -> None:
        moments = (self.arrival, *self.token_times, self.end)
        if any(earlier > later for earlier, later in pairwise(moments)):
            raise ValueError(f"task {self.task_id}: found moments {moments}, expected none before the one it follows")
        if len(self.token_times) > self.output_tokens:
            raise ValueError(
                f"task {self.task_id}: found {len(self.token_times)} moments for {self.output_tokens} new tokens"
            )

    @property
    def is_completed(self) -> bool:
        """Whether the request came to its end, so that its latency means something."""
        return self.finish_reason in _COMPLETED

    @property
    def latency(self) -> float:
        """Seconds from the arrival to the end."""
        return self.end - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds from the arrival; None where no moment of a first token is known."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token, in seconds: (end - first token) / (output tokens - 1).

        None where there are not two tokens, or the moment of the first one is not known.
        """
        if not self.token_times or self.output_tokens < 2:
            return None
        return (self.end - self.token_times[0]) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, in seconds, without the moments between the first token and the end."""
        return {
            "task_id": self.task_id,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "arrival_s": self.arrival,
            "first_token_s": self.token_times[0] if self.token_times else None,
            "end_s": self.end,
            "finish_reason": self.finish_reason,
            "num_preemptions": self.num_preemptions,
            "reused_tokens": self.reused_tokens,
        }


def write_request_log(path: Path, records: Iterable[RequestRecord]) -> None:
    """Writes one JSON object a line: a record, with the moments of all its tokens under ``token_times_s``."""
    write_json_lines(path, ({**record.to_json(), "token_times_s": record.token_times} for record in records))
