import numpy as np
import onnx_ir
import pytest

from tests.runtime.networks import make_network
from trtllm_mla.cache_rows import CacheDType
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
        layout=plugin.cache_dtype(dtype).layout(96, 32),
        latent_scales=(1.0,),
        vocab_size=131,
        absorption=absorption,
    )


@pytest.mark.parametrize("cache_dtype", [item for item in CacheDType if not item.is_quantized])
def test_pools_are_apart_and_hold_nan(cache_dtype):
    signature = GraphSignature(DType.FLOAT32, cache_dtype.layout(20, 4), (1.0, 1.0), 10, absorption=True)
    first, second = signature.make_pools(3, 5)
    assert first.shape == (3, 5, 24)
    assert first.dtype == cache_dtype.numpy
    assert np.isnan(first.astype(np.float32)).all()
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("cache_dtype", [CacheDType.FP8, CacheDType.NVFP4])
def test_quantized_pools_hold_nan_in_every_part_of_a_row(cache_dtype):
    signature = GraphSignature(DType.FLOAT32, cache_dtype.layout(40, 6), (1.0, 0.5), 10, absorption=True)
    (pool, _) = signature.make_pools(3, 5)
    assert pool.dtype == np.int8
    assert np.isnan(signature.read_pool(1, pool)).all()


def test_a_pool_larger_than_memory_is_refused_before_it_is_made():
    signature = GraphSignature(DType.FLOAT32, CacheDType.BF16.layout(512, 64), (1.0,) * 60, 10, absorption=True)
    with pytest.raises(UserError, match="2000000000 pages of 1 tokens takes 138,240,000,000,000 bytes"):
        signature.make_pools(2_000_000_000, 1)
