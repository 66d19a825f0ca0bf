"""TensorRT-LLM's checkpoint layout for DeepSeek models: which part of which tensor each rank's file holds.

Tensors are named, fused, ordered and split as in TensorRT-LLM's ``deepseek_v2`` model
(https://github.com/NVIDIA/TensorRT-LLM, ``tensorrt_llm/models/deepseek_v2/convert.py``). Linear weights are [out, in].
Where versions differ:

- ``attention.k_b_proj_trans``, each head's key up projection transposed, stands beside ``kv_b_proj``. Older versions
  have ``fused_q_proj`` in its place: its product with ``q_b_proj``, three times the size of that and rounded again.
- Dense layers call Hugging Face's ``up_proj`` ``gate`` and its ``gate_proj`` ``fc``. Experts and shared experts have
  both in ``fc``: rows of the up projection first.

A projection is split by whole heads: in ``kv_b_proj`` a rank has the key rows of all its heads, then their value rows,
whereas Hugging Face alternates between them head by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_mla.checkpoint.safetensors_writer import TensorType
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec
from trtllm_mla.checkpoint.weights import EMBEDDING, FLOAT32_SUFFIXES, HEAD
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError


@dataclass(frozen=True)
class RankGrid:
    """How many ranks there are, and what they share out.

    Attention, dense MLPs, shared experts and the head are split over all ranks. Routed experts are dealt out to
    ``moe_ep_size`` groups, whose ``moe_tp_size`` ranks split each expert.

    Attributes:
        tp_size: Ranks.
        moe_ep_size: Groups of experts; 1, the default of TensorRT-LLM, splits every expert over all ranks.
    """

    tp_size: int
    moe_ep_size: int = 1

    @property
    def moe_tp_size(self) -> int:
        """Ranks that an expert is split over."""
        return self.tp_size // self.moe_ep_size

    def moe_ep_rank(self, rank: int) -> int:
        """Which group of experts a rank has: neighbours have different ones, as in TensorRT-LLM's ``Mapping``."""
        return rank % self.moe_ep_size

    def moe_tp_rank(self, rank: int) -> int:
        """Which part of each of these experts a rank has."""
        return rank // self.moe_ep_size


@dataclass(frozen=True)
class Block:
    """A rectangle of a Hugging Face tensor, of which a vector is one column.

    Attributes:
        tensor: The tensor's name; None for zeros.
        rows: First row and the row behind the last.
        columns: The same for columns.
        transposed: Whether its elements are stored column by column.
    """

    tensor: str | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    transposed: bool = False

    @property
    def size(self) -> int:
        """Its elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class LayoutTensor:
    """A tensor of a rank's file: blocks, one behind the other.

    Attributes:
        name: Its name in the file.
        type: Element type and shape.
        blocks: What it consists of.
        repeats: Whether another tensor, or the same one of rank 0, holds these elements too.
    """

    name: str
    type: TensorType
    blocks: tuple[Block, ...]
    repeats: bool = False


@dataclass(frozen=True)
class _Rank:
    """Makes the tensors of one rank."""

    spec: ModelSpec
    grid: RankGrid
    rank: int

    def whole(
        self, name: str, tensor: str, rows: int, columns: int | None = None, dtype: DType | None = None
    ) -> LayoutTensor:
        """A tensor that every rank has whole."""
        shape = (rows,) if columns is None else (rows, columns)
        block = Block(tensor, (0, rows), (0, columns or 1))
        return LayoutTensor(name, TensorType(dtype or self.spec.dtype, shape), (block,), self.rank > 0)

    def stack(self, name: str, shape: tuple[int, ...], *blocks: Block, repeats: bool = False) -> LayoutTensor:
        """A tensor made of blocks."""
        return LayoutTensor(name, TensorType(self.spec.dtype, shape), blocks, repeats)

    def part(self, size: int) -> tuple[int, int]:
        """This rank's share of rows or columns that are split over all ranks."""
        share = size // self.grid.tp_size
        return self.rank * share, (self.rank + 1) * share

    def outer(self) -> Iterator[LayoutTensor]:
        """The tensors outside the layers."""
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        yield self.whole("transformer.vocab_embedding.weight", EMBEDDING, vocab, hidden)
        yield self.whole("transformer.ln_f.weight", "model.norm.weight", hidden)
        share = -(-vocab // self.grid.tp_size)
        first, stop = min(self.rank * share, vocab), min((self.rank + 1) * share, vocab)
        tied = self.spec.tie_word_embeddings
        rows = Block(EMBEDDING if tied else HEAD, (first, stop), (0, hidden))
        padding = Block(None, (0, share - (stop - first)), (0, hidden))
        yield self.stack(
            "lm_head.weight", (share, hidden), *(block for block in (rows, padding) if block.size), repeats=tied
        )

    def layer(self, layer: int) -> Iterator[LayoutTensor]:
        """The tensors of a layer."""
        source, target = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        hidden = self.spec.hidden_size
        yield self.whole(f"{target}input_layernorm.weight", f"{source}input_layernorm.weight", hidden)
        yield from self._attention(f"{source}self_attn.", f"{target}attention.")
        yield self.whole(f"{target}post_layernorm.weight", f"{source}post_attention_layernorm.weight", hidden)
        if self.spec.moe is not None and self.spec.is_moe_layer(layer):
            yield from self._experts(f"{source}mlp.", f"{target}mlp.", self.spec.moe)
        else:
            yield from self._dense(f"{source}mlp.", f"{target}mlp.")

    def _attention(self, source: str, target: str) -> Iterator[LayoutTensor]:
        spec = self.spec
        hidden, latent, nope, value = spec.hidden_size, spec.kv_lora_rank, spec.qk_nope_head_dim, spec.v_head_dim
        first, stop = self.part(spec.num_attention_heads)
        heads = stop - first
        compressed = [("kv_a_proj_with_mqa", spec.latent_width)]
        query, query_width = "q_proj", hidden
        if spec.q_lora_rank is not None:
            compressed.insert(0, ("q_a_proj", spec.q_lora_rank))
            query, query_width = "q_b_proj", spec.q_lora_rank
            yield self.whole(f"{target}q_a_layernorm.weight", f"{source}q_a_layernorm.weight", spec.q_lora_rank)
        yield self.whole(f"{target}kv_a_layernorm.weight", f"{source}kv_a_layernorm.weight", latent)
        yield self.stack(
            f"{target}fused_a.weight",
            (sum(rows for _, rows in compressed), hidden),
            *(Block(f"{source}{name}.weight", (0, rows), (0, hidden)) for name, rows in compressed),
            repeats=self.rank > 0,
        )
        width = spec.qk_head_dim
        yield self.stack(
            f"{target}q_b_proj",
            (heads * width, query_width),
            Block(f"{source}{query}.weight", (first * width, stop * width), (0, query_width)),
        )
        up, rows = f"{source}kv_b_proj.weight", nope + value
        starts = range(first * rows, stop * rows, rows)
        yield self.stack(
            f"{target}kv_b_proj",
            (heads * rows, latent),
            *(Block(up, (start, start + nope), (0, latent)) for start in starts),
            *(Block(up, (start + nope, start + rows), (0, latent)) for start in starts),
        )
        yield self.stack(
            f"{target}k_b_proj_trans",
            (heads * latent, nope),
            *(Block(up, (start, start + nope), (0, latent), transposed=True) for start in starts),
            repeats=True,
        )
        yield self.stack(
            f"{target}dense.weight",
            (hidden, heads * value),
            Block(f"{source}o_proj.weight", (0, hidden), (first * value, stop * value)),
        )

    def _dense(self, source: str, target: str) -> Iterator[LayoutTensor]:
        hidden = self.spec.hidden_size
        first, stop = self.part(self.spec.intermediate_size)
        for name, projection in (("fc", "gate_proj"), ("gate", "up_proj")):
            rows = Block(f"{source}{projection}.weight", (first, stop), (0, hidden))
            yield self.stack(f"{target}{name}.weight", (stop - first, hidden), rows)
        columns = Block(f"{source}down_proj.weight", (0, hidden), (first, stop))
        yield self.stack(f"{target}proj.weight", (hidden, stop - first), columns)

    def _experts(self, source: str, target: str, moe: MoeSpec) -> Iterator[LayoutTensor]:
        hidden = self.spec.hidden_size
        yield self.whole(
            f"{target}router.weight", f"{source}gate.weight", moe.num_experts, hidden, dtype=DType.FLOAT32
        )
        if moe.correction_bias:
            name = "e_score_correction_bias"
            yield self.whole(f"{target}{name}", f"{source}gate.{name}", moe.num_experts, dtype=DType.FLOAT32)
        count = moe.num_experts // self.grid.moe_ep_size
        group, part = self.grid.moe_ep_rank(self.rank), self.grid.moe_tp_rank(self.rank)
        experts = [f"{source}experts.{expert}." for expert in range(group * count, (group + 1) * count)]
        share = moe.intermediate_size // self.grid.moe_tp_size
        split = (part * share, (part + 1) * share)
        yield self.stack(
            f"{target}fc.weight",
            (count, 2 * share, hidden),
            *(
                Block(f"{expert}{projection}.weight", split, (0, hidden))
                for expert in experts
                for projection in ("up_proj", "gate_proj")
            ),
        )
        yield self.stack(
            f"{target}proj.weight",
            (count, hidden, share),
            *(Block(f"{expert}down_proj.weight", (0, hidden), split) for expert in experts),
        )
        if moe.shared_intermediate_size:
            first, stop = self.part(moe.shared_intermediate_size)
            yield self.stack(
                f"{target}shared_expert.fc.weight",
                (2 * (stop - first), hidden),
                *(
                    Block(f"{source}shared_experts.{projection}.weight", (first, stop), (0, hidden))
                    for projection in ("up_proj", "gate_proj")
                ),
            )
            yield self.stack(
                f"{target}shared_expert.proj.weight",
                (hidden, stop - first),
                Block(f"{source}shared_experts.down_proj.weight", (0, hidden), (first, stop)),
            )


def layout_groups(spec: ModelSpec) -> list[int | None]:
    """The layers, and None for what is outside them. A group's tensors have their elements from the group's."""
    return [None, *range(spec.num_hidden_layers)]


def group_tensors(spec: ModelSpec, grid: RankGrid, rank: int, group: int | None) -> Iterator[LayoutTensor]:
    """The tensors of one rank's file that belong to a group; each rank has the same names and shapes.

    Args:
        spec: The model; its ``dtype`` is that of the files. Routers and their biases are float32.
        grid: A grid that ``check_grid`` accepted.
        rank: The rank.
        group: One of ``layout_groups``.
    """
    maker = _Rank(spec, grid, rank)
    return maker.outer() if group is None else maker.layer(group)


def layout_dtype(spec: ModelSpec, tensor: str) -> DType:
    """Type in which the layout stores a Hugging Face tensor's values."""
    return DType.FLOAT32 if tensor.endswith(FLOAT32_SUFFIXES) else spec.dtype


def rank_types(spec: ModelSpec, grid: RankGrid) -> dict[str, TensorType]:
    """Type and shape of every tensor in a rank's file; all ranks' are the same."""
    return {
        tensor.name: tensor.type for group in layout_groups(spec) for tensor in group_tensors(spec, grid, 0, group)
    }


def check_grid(spec: ModelSpec, grid: RankGrid, *, source: str) -> None:
    """Checks that a model's heads, experts and widths can be shared out evenly.

    Args:
        spec: The model.
        grid: The ranks.
        source: Where the grid comes from, for messages.

    Raises:
        UserError: They cannot; the message has the numbers.
    """
    if grid.tp_size % grid.moe_ep_size:
        raise UserError(
            f"{source}: found {grid.moe_ep_size} groups of experts for {grid.tp_size} ranks, expected a divisor of "
            f"{grid.tp_size}."
        )
    problem = uneven_split(spec, grid)
    if problem is not None:
        raise UserError(f"{source}: found {problem}. Choose a number that divides it.")


def uneven_split(spec: ModelSpec, grid: RankGrid) -> str | None:
    """What of a model ranks cannot share out evenly, in words; None if there is no such thing."""
    size, moe = grid.tp_size, spec.moe
    split: list[tuple[str, int, int, str]] = [("num_attention_heads", spec.num_attention_heads, size, "ranks")]
    if moe is None or spec.num_moe_layers(spec.num_hidden_layers) < spec.num_hidden_layers:
        split.append(("intermediate_size", spec.intermediate_size, size, "ranks"))
    if moe is not None:
        split.append(("n_routed_experts", moe.num_experts, grid.moe_ep_size, "groups of experts"))
        split.append(("moe_intermediate_size", moe.intermediate_size, grid.moe_tp_size, "ranks of a group"))
        split.append(("width of the shared experts", moe.shared_intermediate_size, size, "ranks"))
    for name, value, parts, what in split:
        if value % parts:
            return f"{name} {value}, which {parts} {what} cannot share evenly ({value} / {parts} = {value / parts:g})"
    return None
