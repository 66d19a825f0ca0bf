"""What the rest of the package knows of a model: sizes, scales and rotary embedding, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtllm_mla.dtypes import DType

RopeType = Literal["default", "linear", "yarn"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the shared key and of each query head's rotary part.

    Attributes:
        dim: Rotated dimensions (``qk_rope_head_dim``), an even number.
        theta: Base of the wavelengths.
        rope_type: Which scaling is applied to the frequencies.
        interleaved: Pairs are (0, 1), (2, 3), ... as in DeepSeek checkpoints; otherwise (0, dim / 2), ...
        factor: Context extension factor; 1 for ``default``.
        original_max_position_embeddings: Positions before extension; YaRN's ramp depends on it.
        beta_fast: YaRN: rotations above which a frequency is kept.
        beta_slow: YaRN: rotations below which a frequency is divided by ``factor``.
        truncate: YaRN: the ramp's ends are rounded to whole dimensions.
        attention_factor: Multiplies the cosines and sines.
    """

    dim: int
    theta: float
    rope_type: RopeType
    interleaved: bool
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A dense MLA decoder.

    Attributes:
        model_type: Architecture, as in ``config.json``.
        hf_architecture: Class name in ``config.json``'s ``architectures``.
        dtype: Type the checkpoint's config declares.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads; all of them share one latent.
        q_lora_rank: Width of the query latent, or None where queries are projected directly.
        kv_lora_rank: Width of the cached latent.
        qk_nope_head_dim: Width of a head's part without rotary embedding.
        qk_rope_head_dim: Width of the rotary part.
        v_head_dim: Width of a value head.
        softmax_scale: Factor on the attention scores, YaRN's ``mscale`` included.
        rms_norm_eps: Epsilon of the layers' norms and the final norm.
        latent_norm_eps: Epsilon of the norms on the query and key-value latents.
        hidden_act: Activation of the gated MLP.
        attention_bias: Whether ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj`` have biases.
        tie_word_embeddings: Whether the head is the embedding.
        max_position_embeddings: Positions the model was made for.
        rope: The rotary embedding.
        bos_token_id: First token of a prompt, if the model has one.
        eos_token_ids: Tokens that end a generation.
    """

    model_type: str
    hf_architecture: str
    dtype: DType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rms_norm_eps: float
    latent_norm_eps: float
    hidden_act: str
    attention_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeSpec
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Elements of one cached row: the latent, then the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim
