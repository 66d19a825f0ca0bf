import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.aot import compile_variant
from tests.ops.gather_latent.test_plan import PROBLEM
from trtllm_mla.errors import MissingDependencyError
from trtllm_mla.ops import kernels
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.targets import TARGETS


@pytest.mark.parametrize(
    ("op", "folder"), [("LatentAttention", "latent_attention"), ("GatherLatent", "gather_latent")]
)
def test_module_name(op: str, folder: str) -> None:
    assert kernels.module_name(op) == folder


def gather_first_row() -> torch.Tensor:
    """Runs GatherLatent on a pool of one page, whose first row is asked for."""
    cache, latent, k_pe = torch.rand(1, 16, 24), torch.empty(1, 16), torch.empty(1, 8)
    kernel = kernels.interpreted_kernel("GatherLatent", "gather_latent")
    kernel[(1, 1, 1)](cache, torch.tensor([0], dtype=torch.int32), latent, k_pe, 1, 16, 16, 8, 16, 8, 8, True)
    assert torch.equal(torch.cat([latent, k_pe], dim=1), cache[0, :1])
    return latent


def test_interpreting_leaves_the_compiler_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces parts of Triton's language while it runs; each must be back in place afterwards."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    def language() -> dict[str, object]:
        owners = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor, "JITFunction": JITFunction}
        return {f"{owner}.{name}": value for owner, place in owners.items() for name, value in vars(place).items()}

    module = importlib.import_module("trtllm_mla.ops.gather_latent.kernels")
    names, before = set(vars(module)), language()
    gather_first_row()
    after = language()
    assert {name for name in before if after.get(name) is not before[name]} == set()
    assert set(vars(module)) == names

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (variant,) = GATHER_LATENT.variants(PROBLEM)
    assert "st.global" in compile_variant(variant, TARGETS["sm_80"], tmp_path).ptx
    gather_first_row()


def test_a_kernel_that_fails_leaves_the_compiler_usable() -> None:
    from triton.runtime.errors import InterpreterError
    from triton.runtime.jit import JITFunction

    compiled_call = JITFunction.__call__
    kernel = kernels.interpreted_kernel("GatherLatent", "gather_latent")
    memory = torch.empty(16)
    with pytest.raises(InterpreterError):
        # A block of 3 is no power of two.
        kernel[(1, 1, 1)](memory, memory.int(), memory, memory, 1, 1, 3, 3, 3, 3, 3, True)
    assert JITFunction.__call__ is compiled_call
    gather_first_row()


def test_interpreted_functions_of_the_language_are_plain_calls() -> None:
    """ContextAttention uses ``tl.zeros``, ``tl.max`` and helpers of its own: all must run without a compiler."""
    source = Path(kernels.__file__).parent / "context_attention" / "kernels.py"
    assert "tl.zeros(" in source.read_text()
    kernel = kernels.interpreted_kernel("ContextAttention", "context_attention")
    q, v = torch.ones(1, 1, 16), torch.rand(1, 1, 16)
    offsets, output, log_sum_exp = torch.tensor([0, 1], dtype=torch.int32), torch.empty(1, 1, 16), torch.empty(1, 1)
    kernel[(1, 1, 1)](
        q, q, q, q, v, offsets, offsets, output, log_sum_exp, 1, 1, 1, 1, 1.0, 1, 16, 16, 16, 16, 16, 16, 16, 16, True
    )  # fmt: skip
    assert torch.equal(output, v)


def test_missing_triton_is_a_users_mistake_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == "triton" or name.startswith(("triton.", "trtllm_mla.ops.gather_latent.kernels")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "trtllm_mla.ops.device_functions", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'trtllm-mla\[reference\]'"):
        kernels.jit_kernel("GatherLatent", "gather_latent")


def test_planning_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys; from trtllm_mla.ops import OPS; import trtllm_mla.ops.interpreter, trtllm_mla.ops.kernels; "
        "print([name for name in ('triton', 'torch') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert result.stdout.strip() == "[]"
