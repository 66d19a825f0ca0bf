"""Plugin config and build config: what users write in JSON or TOML, checked before anything else happens."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtllm_mla.cache_rows import CacheDType, tile_bytes
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import read_table
from trtllm_mla.targets import KIB, Target, get_target

PageSize = Literal[16, 32, 64, 128]
TileSize = Literal[16, 32, 64, 128]
KvCacheDType = Literal["auto", "bf16", "fp16", "fp32", "fp8", "nvfp4"]
BackendName = Literal["tensorrt-rtx", "tensorrt"]

MAX_CONFIG_BYTES = 1 << 20
MAX_PROBLEMS = 3  # named in one message

_MAX_COUNT = 2**31 - 1  # sizes and token counts are 32-bit numbers in the kernels
_Positive = Annotated[int, Field(gt=0, le=_MAX_COUNT, strict=True)]


class StrictModel(BaseModel):
    """Base of every config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MlaPluginConfig(StrictModel):
    """How the MLA operations are laid out and run. Sizes left out are taken from the checkpoint.

    Attributes:
        name: The kernel family.
        num_heads: Attention heads (``num_attention_heads``).
        head_dim_content: Width of the part of a head without rotary embedding (``qk_nope_head_dim``).
        latent_kv_dim: Width of the cached latent (``kv_lora_rank``).
        rope_dim: Width of the shared rotary key (``qk_rope_head_dim``).
        tile_s: Cached tokens a kernel works on at once; left out, the largest that fits the target.
        num_stages: Tiles in flight while one is worked on; left out, chosen with ``tile_s``.
        page_size: Tokens in a page of the latent cache.
        enable_matrix_absorption: Whether a generation group exists, whose attention reads latents directly.
        prefill_absorption_threshold: Prefill chunks of fewer new tokens than this join the generation group.
        max_context_passes: Passes of the context group's attention, each over at most ``max_context_kv_tokens`` cached
            tokens: with so many times that history, a chunk still runs decompressed. A pass costs a few launches a
            layer also in steps that have nothing for it to do.
        rope_compute_dtype: Type the rotary embedding is computed in; fp32 only.
        kv_cache_dtype: Type of the cached rows; ``auto`` is the network's type.
    """

    name: Literal["flash_mla_decode"] = "flash_mla_decode"
    num_heads: _Positive | None = None
    head_dim_content: _Positive | None = None
    latent_kv_dim: _Positive | None = None
    rope_dim: _Positive | None = None
    tile_s: TileSize | None = None
    num_stages: Annotated[int, Field(ge=1, le=8, strict=True)] | None = None
    page_size: PageSize = 64
    enable_matrix_absorption: Annotated[bool, Field(strict=True)] = True
    prefill_absorption_threshold: Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)] = 256
    max_context_passes: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    rope_compute_dtype: str = "fp32"
    kv_cache_dtype: KvCacheDType = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rope_compute_dtype != "fp32":
            raise ValueError(
                f"rope_compute_dtype: found '{self.rope_compute_dtype}', expected 'fp32': at long positions an angle "
                "needs more digits than a 16-bit type has, so the rotation is always computed in fp32"
            )
        if (self.tile_s is None) != (self.num_stages is None):
            raise ValueError("tile_s and num_stages: found one of them, expected both or neither")
        return self

    def cache_dtype(self, network_dtype: DType) -> CacheDType:
        """Type of the latent cache of a network of type ``network_dtype``."""
        return CacheDType.of(network_dtype) if self.kv_cache_dtype == "auto" else CacheDType(self.kv_cache_dtype)


class BuildConfig(StrictModel):
    """Limits and targets of an engine. Names follow TensorRT-LLM's ``build_config`` where it has one.

    Attributes:
        max_batch_size: Requests in one step.
        max_num_tokens: New tokens in one step, over both groups.
        max_input_len: Tokens of one prompt; left out, ``max_seq_len - 1``.
        max_seq_len: Tokens of one request, prompt and output together.
        opt_batch_size: Requests the engine is tuned for; left out, ``max_batch_size`` but at most 8.
        opt_num_tokens: New tokens the engine is tuned for; left out, ``max_num_tokens`` but at most 256.
        max_context_kv_tokens: Cached tokens that the context group may decompress in one pass, the new ones included.
            A chunk whose history needs more passes than the network has goes through the generation group.
        backend: ``tensorrt-rtx`` builds without a GPU; ``tensorrt`` builds for the GPU at hand.
        targets: Compute capabilities to build for; left out, the backend's default.
        mla_plugin: Settings that override those of the network: page size, threshold, tile and stages.
    """

    max_batch_size: _Positive = 16
    max_num_tokens: _Positive = 2048
    max_input_len: _Positive | None = None
    max_seq_len: _Positive = 4096
    opt_batch_size: _Positive | None = None
    opt_num_tokens: _Positive | None = None
    max_context_kv_tokens: _Positive = 16384
    backend: BackendName = "tensorrt-rtx"
    targets: tuple[str, ...] | None = None
    mla_plugin: MlaPluginConfig = MlaPluginConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        limits = (
            ("max_batch_size", self.max_batch_size, "max_num_tokens", self.max_num_tokens),
            ("opt_batch_size", self.opt_batch_size, "max_batch_size", self.max_batch_size),
            ("opt_num_tokens", self.opt_num_tokens, "max_num_tokens", self.max_num_tokens),
            ("max_input_len", self.max_input_len, "max_seq_len - 1", self.max_seq_len - 1),
        )
        for name, value, limit_name, limit in limits:
            if value is not None and value > limit:
                raise ValueError(f"{name}: found {value}, expected at most {limit_name} = {limit}")
        for target in self.targets or ():
            get_target(target)
        return self

    @property
    def effective_max_input_len(self) -> int:
        """Tokens of the longest prompt that is accepted."""
        return self.max_input_len or self.max_seq_len - 1

    @property
    def effective_opt_batch_size(self) -> int:
        """Requests that the engine is tuned for."""
        return self.opt_batch_size or min(self.max_batch_size, 8)

    @property
    def effective_opt_num_tokens(self) -> int:
        """New tokens that the engine is tuned for."""
        return self.opt_num_tokens or min(self.max_num_tokens, 256)

    @property
    def pages_per_request(self) -> int:
        """Width of the page table: pages of the longest request."""
        return -(-self.max_seq_len // self.mla_plugin.page_size)


class PluginConfigFile(StrictModel):
    """The file given to ``--plugin-config``: one section, ``mla_plugin``."""

    mla_plugin: MlaPluginConfig


_Model = TypeVar("_Model", bound=BaseModel)


def load_config(path: Path, model: type[_Model]) -> _Model:
    """Reads a JSON or TOML file into a config.

    Raises:
        UserError: The file cannot be read, is no JSON or TOML, or does not describe a ``model``; the message names
            the key, what was found and what was expected.
    """
    return parse_config(read_table(path, max_bytes=MAX_CONFIG_BYTES), model, source=str(path))


def parse_config(values: object, model: type[_Model], *, source: str) -> _Model:
    """Checks plain values against a config model.

    Args:
        values: What a JSON or TOML file held.
        model: The config class.
        source: Where the values come from, for messages.

    Raises:
        UserError: A key is unknown or a value is not what the model expects.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        items = error.errors()
        problems = [_describe(item, model) for item in items[:MAX_PROBLEMS]]
        if len(items) > MAX_PROBLEMS:
            problems.append(f"and {len(items) - MAX_PROBLEMS} more problems")
        raise UserError(f"{source}: {'; '.join(problems)}.") from None
    except UnicodeError:
        raise UserError(
            f"{source}: found a text with half of a surrogate pair, expected valid Unicode. Correct its escape "
            "\\ud800 to \\udfff."
        ) from None


def _describe(error: Any, model: type[BaseModel]) -> str:
    """One pydantic error as 'key: found X, expected Y'."""
    where = ".".join(part if (part := str(item)).isprintable() else repr(part) for item in error["loc"])[:200]
    kind, found = error["type"], error.get("input")
    if kind == "extra_forbidden":
        keys = _keys_at(model, error["loc"][:-1])
        return f"{where}: unknown key" + (f"; the keys here are {', '.join(keys)}" if keys else "")
    if kind == "missing":
        return f"{where}: missing; add this key"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{where}.{message}" if where else message
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: found {_repr(found)}, expected: {message.removeprefix('input should be ')}"


def _repr(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # a hexadecimal number in TOML may have more decimal digits than Python converts
        return f"a {type(value).__name__} with a number of thousands of digits"


def _keys_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Keys of the model at a location; none where the location leads through a list or a free-form table."""
    for part in location:
        field = model.model_fields.get(str(part))
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)


def merge_plugin_configs(network: MlaPluginConfig, build: MlaPluginConfig) -> MlaPluginConfig:
    """The network's plugin config with what the build config sets explicitly.

    Args:
        network: Config the network was made with.
        build: The build config's section; only keys that were written count.

    Raises:
        UserError: A key that the network's graph depends on is set to something else.
    """
    changes = {name: getattr(build, name) for name in build.model_fields_set}
    free = {"tile_s", "num_stages", "page_size", "prefill_absorption_threshold"}
    for name in sorted(changes.keys() - free):
        if changes[name] not in (None, "auto", getattr(network, name)):
            raise UserError(
                f"mla_plugin.{name}: the build config says {changes[name]!r}, the network was converted with "
                f"{getattr(network, name)!r}. Convert again with --plugin-config, or leave the key out of the build "
                "config."
            )
    return network.model_copy(update={name: value for name, value in changes.items() if name in free})


def check_tile(tile_s: int, num_stages: int, row_bytes: int, target: Target) -> None:
    """Checks that the tiles in flight fit the target's shared memory.

    Args:
        tile_s: Cached tokens in a tile.
        num_stages: Tiles in flight.
        row_bytes: Bytes of one cached row, latent and rotary key together.
        target: The GPU generation.

    Raises:
        UserError: They do not fit; the message gives the bytes and a pair that fits.
    """
    needed = tile_bytes(tile_s, num_stages, row_bytes)
    if needed <= target.shared_memory_bytes:
        return
    fitting = largest_fitting_tile(row_bytes, target, at_most=(tile_s, num_stages))
    advice = f"Use tile_s {fitting[0]} with num_stages {fitting[1]}" if fitting else "No tile of such rows fits"
    raise UserError(
        f"tile_s {tile_s} with num_stages {num_stages} takes {needed} bytes ({needed / KIB:g} KiB) of shared memory "
        f"for rows of {row_bytes} bytes; {target.name} ({target.example}) has {target.shared_memory_bytes} bytes "
        f"({target.shared_memory_bytes / KIB:g} KiB). {advice}."
    )


def largest_fitting_tile(
    row_bytes: int, target: Target, *, at_most: tuple[int, int] = (128, 8)
) -> tuple[int, int] | None:
    """The (tile_s, num_stages) within ``at_most`` that fits and keeps the most bytes in flight, or None.

    Among equals, one that loads a tile while it works on another comes first, then the larger tile.
    """
    candidates = [
        (tile, stages)
        for tile in get_args(TileSize)
        for stages in range(1, at_most[1] + 1)
        if tile <= at_most[0] and tile_bytes(tile, stages, row_bytes) <= target.shared_memory_bytes
    ]
    return max(candidates, key=lambda pair: (pair[0] * pair[1], min(pair[1], 2), pair[0]), default=None)
