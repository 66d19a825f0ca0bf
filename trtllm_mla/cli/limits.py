"""Which limits apply to a directory that is about to be run."""

from trtllm_mla.runtime.limits import find_limits

__all__ = ["find_limits"]
