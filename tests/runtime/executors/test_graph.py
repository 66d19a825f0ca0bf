import numpy as np
import onnx_ir
import pytest

from tests.runtime.networks import make_network
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.graph import build_network
from trtllm_mla.runtime.executors.graph import GraphSignature


@pytest.mark.parametrize("absorption", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cache"), [(DType.FLOAT32, "bf16"), (DType.BFLOAT16, "auto"), (DType.FLOAT16, "fp32")]
)
def test_signature(dtype, cache, absorption):
    spec = make_network("yarn").spec
    plugin = MlaPluginConfig(kv_cache_dtype=cache, enable_matrix_absorption=absorption)
    model = onnx_ir.to_proto(build_network(spec, plugin, dtype, num_layers=1))
    assert GraphSignature.of(model) == GraphSignature(
        dtype=dtype,
        cache_dtype=plugin.cache_dtype(dtype),
        num_layers=1,
        latent_width=96 + 32,
        vocab_size=131,
        absorption=absorption,
    )


@pytest.mark.parametrize("cache_dtype", DType)
def test_pools_are_apart_and_hold_nan(cache_dtype):
    signature = GraphSignature(DType.FLOAT32, cache_dtype, 2, 24, 10, absorption=True)
    first, second = signature.make_pools(3, 5)
    assert first.shape == (3, 5, 24)
    assert first.dtype == cache_dtype.numpy
    assert np.isnan(first.astype(np.float32)).all()
    assert not np.shares_memory(first, second)


def test_a_pool_larger_than_memory_is_refused_before_it_is_made():
    signature = GraphSignature(DType.FLOAT32, DType.BFLOAT16, 60, 576, 10, absorption=True)
    with pytest.raises(UserError, match="2000000000 pages of 1 tokens takes 138,240,000,000,000 bytes"):
        signature.make_pools(2_000_000_000, 1)
