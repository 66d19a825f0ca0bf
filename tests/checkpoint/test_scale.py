"""Opening and checking a checkpoint with as many files and tensors as the largest released ones."""

from __future__ import annotations

import resource
import time

from tests.support.configs import PUBLISHED
from tests.support.synthetic import write_sparse_checkpoint
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.weights import build_weight_map, check_checkpoint


def test_163_files_and_90_000_tensors_take_seconds(tmp_path):
    count = write_sparse_checkpoint(tmp_path, PUBLISHED["kimi_k2"] | {"num_hidden_layers": 79}, 163)
    assert count > 90_000
    seen: list[tuple[int, int]] = []
    started = time.process_time()
    checkpoint = Checkpoint.open(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert check_checkpoint(build_weight_map(read_model_spec(checkpoint)), checkpoint) == {}
    for name in checkpoint.tensors:
        assert checkpoint.read(name).size
    assert time.process_time() - started < 10
    assert seen == [(number, 163) for number in range(1, 164)]
    # Only headers were read: the files claim terabytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < sum(
        f.stat().st_size for f in tmp_path.iterdir()
    )
