"""Access to the Triton kernels behind a plan's variants, compiled or interpreted.

Importing Triton is left until a kernel is asked for.
"""

from __future__ import annotations

import functools
import importlib
import re
import types
from typing import TYPE_CHECKING, Any

from trtllm_mla.errors import MissingDependencyError

if TYPE_CHECKING:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction


def module_name(op: str) -> str:
    """Folder of an operation: ``latent_attention`` for ``LatentAttention``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", op).lower()


def jit_kernel(op: str, kernel: str) -> JITFunction[Any]:
    """The kernel function of an operation, for compilation.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    try:
        module = importlib.import_module(f"trtllm_mla.ops.{module_name(op)}.kernels")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingDependencyError("triton", "compile or interpret the MLA kernels", "reference") from error
    function: JITFunction[Any] = getattr(module, kernel)
    return function


def interpreted_kernel(op: str, kernel: str) -> InterpretedFunction[Any]:
    """The same kernel for Triton's interpreter, which runs it on CPU tensors.

    Triton decides between compiler and interpreter when a function is decorated, by an environment variable, for
    the functions of its own language (``tl.zeros``, ``tl.sum``) too. What is returned here is interpreted whatever
    that variable was, and leaves Triton's compiler usable in the same process.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    return _interpreted(jit_kernel(op, kernel).fn)


@functools.cache
def _interpreted(function: types.FunctionType) -> InterpretedFunction[Any]:
    import triton.language as tl

    # The interpreter adds names to a function's globals: it gets a copy. It replaces the language's functions in
    # those modules that it finds there: tl.core is added because tl's own functions reach the language by it.
    scope = {**function.__globals__, "tl_core": tl.core}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__annotations__ = function.__annotations__
    copy.__module__ = function.__module__
    return _interpreted_class()(copy)


@functools.cache
def _interpreted_class() -> type[InterpretedFunction[Any]]:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def call_interpreted(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        return _interpreted(self.fn).rewrite()(*args, **kwargs)

    class InterpretedKernel(InterpretedFunction):  # type: ignore[misc]
        """A kernel whose calls of compiled functions are interpreted while it runs."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiled_call = JITFunction.__call__
            JITFunction.__call__ = call_interpreted
            try:
                super().run(*args, grid=grid, warmup=warmup, **kwargs)
            finally:
                JITFunction.__call__ = compiled_call

    return InterpretedKernel
