"""An MLA operation with everything that is fixed when an engine is built: what a plugin computes with.

Nothing here knows TensorRT: shapes go in, launch plans come out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem, split_dim
from trtllm_mla.ops.expression import minimum
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import KernelVariant, LaunchPlan
from trtllm_mla.targets import Target, get_target

Shape = tuple[int, ...]

_PLANS_KEPT = 256


@dataclass(frozen=True)
class TargetTile:
    """The tile that an engine's kernels use on a target.

    Attributes:
        target: Name of the GPU generation.
        tile_s: Cached tokens a kernel works on at once.
        num_stages: Tiles in flight.
    """

    target: str
    tile_s: int
    num_stages: int

    @classmethod
    def choose(cls, spec: ModelSpec, plugin: MlaPluginConfig, target: Target) -> Self:
        """The plugin config's tile, or where it gives none the best for the target.

        Args:
            spec: The model; its ``dtype`` is the network's.
            plugin: The plugin config.
            target: The GPU generation.

        Raises:
            UserError: The config gives none, and rows are too wide for the target's shared memory.
        """
        if plugin.tile_s is not None and plugin.num_stages is not None:
            return cls(target.name, plugin.tile_s, plugin.num_stages)
        tile_s, num_stages = default_tile(
            kv_lora_rank=spec.kv_lora_rank,
            rope_dim=spec.qk_rope_head_dim,
            model_dtype=spec.dtype,
            cache_dtype=plugin.cache_dtype(spec.dtype),
            target=target,
        )
        return cls(target.name, tile_s, num_stages)


@dataclass(frozen=True)
class OperationSettings:
    """What the operations of an engine have in common.

    Attributes:
        model_dtype: The network's type.
        cache_dtype: The latent cache's type.
        tiles: The tile of each target that the engine is built for.
    """

    model_dtype: DType
    cache_dtype: CacheDType
    tiles: tuple[TargetTile, ...]

    def tile(self, target: Target) -> TargetTile:
        """The tile of a target.

        Raises:
            ValueError: The engine was not built for it.
        """
        for tile in self.tiles:
            if tile.target == target.name:
                return tile
        built = ", ".join(tile.target for tile in self.tiles)
        raise ValueError(f"found a GPU of generation {target.name}; the engine was built for {built}")


class Operation:
    """An operation, its attributes, and the settings of an engine. It has no state but a memory of results.

    Attributes:
        plan: ``plan(shapes, target, workspace_bytes)`` plans a step; see ``compute_plan``.
        workspace_bytes: ``workspace_bytes(max_shapes)`` is the workspace an engine needs; see
            ``compute_workspace_bytes``.

    Args:
        definition: The operation.
        attributes: The node's attributes.
        settings: The engine's settings.
    """

    def __init__(
        self, definition: OpDefinition, attributes: Mapping[str, Attribute], settings: OperationSettings
    ) -> None:
        if attributes.keys() != definition.attributes.keys():
            raise ValueError(
                f"{definition.name}: found the attributes {sorted(attributes)}, expected "
                f"{sorted(definition.attributes)}"
            )
        self.definition = definition
        self.attributes = dict(attributes)
        self.settings = settings
        # Shapes repeat from layer to layer and from step to step.
        self.plan = functools.lru_cache(maxsize=_PLANS_KEPT)(self.compute_plan)
        self.workspace_bytes = functools.lru_cache(maxsize=None)(self.compute_workspace_bytes)

    def variants(self, fixed_dims: Mapping[str, int], target: Target) -> tuple[KernelVariant, ...]:
        """Kernels to compile for a target.

        Args:
            fixed_dims: Sizes of the dimensions that are the same in every step.
            target: The GPU generation.
        """
        missing = self._dim_names() - self.definition.dynamic_dims - fixed_dims.keys()
        if missing:
            raise ValueError(f"{self.definition.name}: the sizes {sorted(missing)} must be fixed, found none")
        return self.definition.variants(self._problem(fixed_dims, target))

    def dims(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """Size of every dimension, from the shapes of the inputs in order."""
        names = (tensor.name for tensor in self.definition.inputs)
        return self.definition.resolve_dims(dict(zip(names, shapes, strict=True)))

    def compute_plan(self, shapes: tuple[Shape, ...], target: Target, workspace_bytes: int) -> LaunchPlan:
        """Plans a step, anew each time.

        Args:
            shapes: Shape of each input, in order.
            target: The GPU.
            workspace_bytes: Size of the workspace, as ``workspace_bytes`` gave it when the engine was built.

        Raises:
            ValueError: Shapes contradict the contract, or are beyond what the engine was built for.
        """
        limit = _largest_part(get_target(target.name)).multiprocessors
        part = dataclasses.replace(target, multiprocessors=minimum(target.multiprocessors, limit))
        problem = self._problem(self.dims(shapes), part)
        plan = self.definition.plan(problem)
        if plan.workspace_bytes > workspace_bytes:
            raise ValueError(
                f"{self.definition.name}: the shapes {shapes} need a workspace of {plan.workspace_bytes} bytes; found "
                f"{workspace_bytes}"
            )
        return plan

    def compute_workspace_bytes(self, max_shapes: tuple[Shape, ...]) -> int:
        """A workspace for every step whose shapes are at most ``max_shapes``, on every part of every target."""
        dims = self.dims(max_shapes)
        largest_parts = (_largest_part(get_target(tile.target)) for tile in self.settings.tiles)
        return max(self.definition.max_workspace_bytes(self._problem(dims, part)) for part in largest_parts)

    def _dim_names(self) -> set[str]:
        dims = (split_dim(dim)[0] for tensor in self.definition.inputs for dim in tensor.dims)
        return {name for name in dims if name is not None}

    def _problem(self, dims: Mapping[str, int], target: Target) -> Problem:
        tile = self.settings.tile(target)
        return Problem(
            dims,
            self.attributes,
            self.settings.model_dtype,
            self.settings.cache_dtype,
            target,
            tile.tile_s,
            tile.num_stages,
        )


def _largest_part(target: Target) -> Target:
    """The target with as many multiprocessors as plans use: workspaces, sized without the GPU, grow with them.

    Full chips of the listed generations have up to 1.2 times as many as the common part.
    """
    return dataclasses.replace(target, multiprocessors=target.multiprocessors * 5 // 4)
