"""What the rest of the package knows of a model: sizes, scales and rotary embedding, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trtllm_mla.dtypes import DType

RopeType = Literal["default", "linear", "yarn", "longrope"]
ScoringFunction = Literal["softmax", "sigmoid"]
TopkMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]


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
        frequency_factors: LongRoPE: what each pair's frequency is divided by, [dim / 2]; empty for other types.
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
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: gated MLPs, of which a router chooses a few for each token.

    Attributes:
        num_experts: Routed experts of a layer.
        top_k: Experts that a token goes to.
        intermediate_size: Width of an expert.
        shared_intermediate_size: Width of the expert that every token goes to; 0 without one.
        scoring_func: What makes scores of the router's logits.
        topk_method: How experts are chosen. ``greedy`` takes the best; the others first choose ``topk_group`` of the
            groups, by their best expert (``group_limited_greedy``, DeepSeek-V2) or by the sum of their best two
            (``noaux_tc``, DeepSeek-V3).
        n_group: Groups of equally many experts.
        topk_group: Groups that a token's experts may be in.
        norm_topk_prob: Whether the chosen experts' scores are divided by their sum.
        routed_scaling_factor: Factor on the chosen experts' weights.
        correction_bias: Whether a bias is added to the scores for the choice, but not for the weights.
        first_k_dense_replace: Layers before this one have a dense MLP.
        moe_layer_freq: Of the others, those whose number it divides have experts.
        output_norm: Whether what the experts add to the residual stream goes through a norm first.
        num_identity_experts: Experts behind the others, without weights, that give back their input.
        shortcut: Whether layers with experts have a dense MLP too, and what the experts give is added to the residual
            stream at the end of the layer after theirs.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    scoring_func: ScoringFunction
    topk_method: TopkMethod
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    correction_bias: bool
    first_k_dense_replace: int
    moe_layer_freq: int
    output_norm: bool = False
    num_identity_experts: int = 0
    shortcut: bool = False

    @property
    def group_limited(self) -> bool:
        """Whether the choice of groups leaves any expert out."""
        return self.topk_method != "greedy" and self.topk_group < self.n_group


@dataclass(frozen=True)
class Fp8Spec:
    """Weights in E4M3 with an fp32 scale for each block of 128 x 128: the projections of attention, MLPs and experts.

    Attributes:
        exclude_modules: Names of modules that stay as they are, or of what is above them, or ends of their names.
    """

    exclude_modules: tuple[str, ...] = ()

    def applies(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is quantised.

        Names are compared as transformers does (``should_convert_module``).
        """
        if not tensor.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            return False
        module = tensor.removesuffix(".weight")
        return not module.endswith(self.exclude_modules) and not f"{module}.".startswith(self._prefixes)

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(f"{name.removesuffix('.')}." for name in self.exclude_modules)


@dataclass(frozen=True)
class ModelSpec:
    """An MLA decoder.

    Attributes:
        model_type: Architecture, as in ``config.json``.
        hf_architecture: Class name in ``config.json``'s ``architectures``.
        dtype: Type the checkpoint's config declares.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of a dense layer's gated MLP.
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
        hidden_act: Activation of gated MLPs and experts.
        attention_bias: Whether ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj`` have biases.
        tie_word_embeddings: Whether the head is the embedding.
        max_position_embeddings: Positions the model was made for.
        rope: The rotary embedding.
        bos_token_id: First token of a prompt, if the model has one.
        eos_token_ids: Tokens that end a generation.
        moe: The mixture of experts, or None if every layer's MLP is dense.
        embedding_multiplier: Factor on the embedding.
        residual_multiplier: Factor on what attention and MLP add to the residual stream.
        logits_scaling: What the head's input is divided by.
        query_scaling_beta: Queries are multiplied by ``1 + beta * log(1 + floor(position / positions))``, where
            ``positions`` are the rotary embedding's original ones; 0 is off.
        query_multiplier: Factor on the queries.
        latent_multiplier: Factor on the key-value latent, behind its norm.
        quantization: Which weights are stored in FP8; None if none are.
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
    moe: MoeSpec | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    query_scaling_beta: float = 0.0
    query_multiplier: float = 1.0
    latent_multiplier: float = 1.0
    quantization: Fp8Spec | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Elements of one cached row: the latent, then the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_k_dense_replace and layer % moe.moe_layer_freq == 0

    def has_dense_mlp(self, layer: int) -> bool:
        """Whether a layer has a dense MLP: in place of experts, or beside them."""
        return not self.is_moe_layer(layer) or (self.moe is not None and self.moe.shortcut)

    def num_moe_layers(self, num_layers: int) -> int:
        """How many of the first ``num_layers`` layers have a mixture of experts."""
        return sum(self.is_moe_layer(layer) for layer in range(num_layers))
