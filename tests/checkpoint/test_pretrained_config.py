"""``pretrained_config``: TensorRT-LLM's keys, an exact round trip, and strict reading."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_mla.checkpoint.pretrained_config import from_pretrained_config, to_pretrained_config
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec, RopeSpec
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

SPEC = ModelSpec(
    model_type="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    dtype=DType.BFLOAT16,
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=0.1352337788608801,
    rms_norm_eps=1e-6,
    latent_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=163840,
    rope=RopeSpec(
        dim=64,
        theta=10000.0,
        rope_type="yarn",
        interleaved=True,
        factor=40.0,
        original_max_position_embeddings=4096,
    ),
    bos_token_id=0,
    eos_token_ids=(1,),
)

MOE = MoeSpec(
    num_experts=256,
    top_k=8,
    intermediate_size=2048,
    shared_intermediate_size=2048,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    correction_bias=True,
    first_k_dense_replace=3,
    moe_layer_freq=1,
)

positive = st.floats(1e-6, 1e6)
dimensions = st.integers(1, 1 << 20)


@st.composite
def moe_specs(draw: st.DrawFn) -> MoeSpec:
    method = draw(st.sampled_from(["greedy", "group_limited_greedy", "noaux_tc"]))
    groups = 1 if method == "greedy" else draw(st.integers(1, 16))
    experts_per_group = draw(st.integers(2, 32))
    chosen = draw(st.integers(1, groups))
    shortcut = draw(st.booleans())
    return MoeSpec(
        num_experts=groups * experts_per_group,
        top_k=draw(st.integers(1, chosen * experts_per_group)),
        intermediate_size=draw(dimensions),
        shared_intermediate_size=draw(st.just(0) | dimensions),
        scoring_func=draw(st.sampled_from(["softmax", "sigmoid"])),
        topk_method=method,
        n_group=groups,
        topk_group=chosen,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(positive),
        correction_bias=draw(st.booleans()),
        first_k_dense_replace=draw(st.integers(0, 60)),
        moe_layer_freq=2 if shortcut else draw(st.integers(1, 4)),
        output_norm=draw(st.booleans()),
        num_identity_experts=draw(st.integers(0, 300)) if groups == 1 else 0,
        shortcut=shortcut,
    )


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    half = draw(st.integers(1, 64))
    rope_type = draw(st.sampled_from(["default", "linear", "yarn", "longrope"]))
    rope = RopeSpec(2 * half, draw(st.floats(1.5, 1e9)), rope_type, draw(st.booleans()))
    if rope_type == "linear":
        rope = dataclasses.replace(rope, factor=draw(positive))
    if rope_type == "yarn":
        rope = dataclasses.replace(
            rope,
            factor=draw(positive),
            original_max_position_embeddings=draw(dimensions),
            beta_fast=draw(positive),
            beta_slow=draw(positive),
            truncate=draw(st.booleans()),
            attention_factor=draw(positive),
        )
    if rope_type == "longrope":
        rope = dataclasses.replace(
            rope,
            factor=draw(positive),
            original_max_position_embeddings=draw(dimensions),
            attention_factor=draw(positive),
            frequency_factors=tuple(draw(st.lists(positive, min_size=half, max_size=half))),
        )
    return dataclasses.replace(
        SPEC,
        model_type=draw(st.sampled_from(["deepseek_v3", "youtu"])),
        dtype=draw(st.sampled_from(list(DType))),
        num_hidden_layers=62,
        q_lora_rank=draw(st.none() | dimensions),
        kv_lora_rank=draw(dimensions),
        qk_rope_head_dim=2 * half,
        softmax_scale=draw(positive),
        rms_norm_eps=draw(st.floats(1e-12, 0.1)),
        latent_norm_eps=draw(st.floats(1e-12, 0.1)),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        rope=rope,
        bos_token_id=draw(st.none() | st.integers(0, 1000)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 1000), max_size=3))),
        moe=draw(st.none() | moe_specs()),
        embedding_multiplier=draw(positive),
        residual_multiplier=draw(positive),
        logits_scaling=draw(positive),
        query_scaling_beta=draw(st.floats(0, 1e3)) if rope_type in ("yarn", "longrope") else 0.0,
        query_multiplier=draw(positive),
        latent_multiplier=draw(positive),
    )


@given(specs())
def test_round_trip_through_json_is_exact(spec: ModelSpec) -> None:
    assert from_pretrained_config(json.loads(json.dumps(to_pretrained_config(spec))), source="test") == spec


def test_keys_that_tensorrt_llm_reads() -> None:
    config = to_pretrained_config(SPEC)
    expected = {
        "architecture": "DeepseekV3ForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 129280,
        "num_key_value_heads": 1,
        "head_size": 576,
        "hidden_act": "swiglu",
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": None},
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rotary_scaling"]["type"] == "yarn"
    assert config["rotary_scaling"]["factor"] == 40.0


def test_keys_of_experts_that_tensorrt_llm_reads() -> None:
    config = to_pretrained_config(dataclasses.replace(SPEC, moe=MOE))
    assert config["moe"] == {
        "num_experts": 256,
        "shared_expert_intermediate_size": 2048,
        "num_identity_experts": 0,
        "top_k": 8,
        "normalization_mode": 4,
        "device_limited_n_group": 8,
        "device_limited_topk_group": 4,
        "device_limited_routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
    }
    expected = {"moe_inter_size": 2048, "scoring_func": "sigmoid", "first_k_dense_replace": 3, "moe_layer_freq": 1}
    assert {name: config[name] for name in expected} == expected
    assert to_pretrained_config(SPEC)["moe"] is None


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("moe", "num_identity_experts", 1),
        ("moe", "num_identity_experts", -1),
        (None, "moe_shortcut", True),
        (None, "moe_output_norm", None),
        ("moe", "num_experts", 0),
        ("moe", "num_experts", 1 << 20),
        ("moe", "num_experts", 255),
        ("moe", "top_k", 129),
        ("moe", "normalization_mode", 1),
        ("moe", "normalization_mode", 2),
        ("moe", "topk_method", "greedy"),
        ("moe", "device_limited_n_group", 256),
        ("moe", "device_limited_topk_group", 9),
        ("moe", "device_limited_routed_scaling_factor", 0),
        ("moe", "shared_expert_intermediate_size", -1),
        (None, "moe", None),
        (None, "moe_inter_size", None),
        (None, "scoring_func", "tanh"),
        (None, "first_k_dense_replace", -1),
        (None, "moe_layer_freq", 0),
        (None, "e_score_correction_bias", "yes"),
    ],
)
def test_unusable_value_of_experts(table: str | None, key: str, value: object) -> None:
    config = to_pretrained_config(dataclasses.replace(SPEC, moe=MOE))
    (config[table] if table else config)[key] = value
    with pytest.raises(UserError, match=r"config\.json: ") as caught:
        from_pretrained_config(config, source="network/config.json")
    assert str(caught.value).startswith("network/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unknown", 1),
        ("num_key_value_heads", 128),
        ("head_size", 575),
        ("vocab_size", -1),
        ("vocab_size", "129280"),
        ("hidden_size", 1 << 30),
        ("hidden_act", "gelu"),
        ("dtype", "float8"),
        ("softmax_scale", 0),
        ("softmax_scale", float("nan")),
        ("norm_epsilon", float("inf")),
        ("architecture", "a b"),
        ("model_type", "llama"),
        ("rotary_scaling", {"type": "yarn"}),
        ("rotary_scaling", "yarn"),
        ("embedding_multiplier", 0),
        ("residual_multiplier", float("inf")),
        ("logits_scaling", 0),
        ("query_scaling_beta", -1),
        ("query_multiplier", 0),
        ("latent_multiplier", "2"),
        ("mapping", {"world_size": 2}),
        ("mapping", {"cp_size": 1}),
        ("quantization", {"quant_algo": "FP8", "kv_cache_quant_algo": None}),
        ("eos_token_id", 1),
        ("tie_word_embeddings", "no"),
    ],
)
def test_unusable_value(key: str, value: object) -> None:
    config = to_pretrained_config(SPEC) | {key: value}
    with pytest.raises(UserError, match=key.split("_")[0]) as caught:
        from_pretrained_config(config, source="network/config.json")
    assert str(caught.value).startswith("network/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "softmax_scale", "rotary_scaling", "q_lora_rank", "rope_interleave"])
def test_missing_key(key: str) -> None:
    config = to_pretrained_config(SPEC)
    del config[key]
    with pytest.raises(UserError, match=f"{key}: missing"):
        from_pretrained_config(config, source="test")


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "truncate"])
def test_yarn_needs_its_keys(key: str) -> None:
    config: dict[str, Any] = to_pretrained_config(SPEC)
    config["rotary_scaling"][key] = None
    with pytest.raises(UserError, match=key):
        from_pretrained_config(config, source="test")


@pytest.mark.parametrize(("kind", "count"), [("yarn", 32), ("longrope", 0), ("longrope", 31)])
def test_frequency_factors_of_other_counts(kind: str, count: int) -> None:
    config: dict[str, Any] = to_pretrained_config(SPEC)
    config["rotary_scaling"] |= {"type": kind, "frequency_factors": [1.0] * count}
    with pytest.raises(UserError, match=f"found {count} frequency_factors"):
        from_pretrained_config(config, source="test")


def test_query_scaling_needs_positions() -> None:
    config = to_pretrained_config(SPEC) | {"query_scaling_beta": 0.1, "rotary_scaling": None}
    with pytest.raises(UserError, match="query_scaling_beta"):
        from_pretrained_config(config, source="test")


def test_odd_rotary_dimension() -> None:
    config = to_pretrained_config(SPEC) | {"qk_rope_head_dim": 63, "head_size": 575}
    with pytest.raises(UserError, match="even"):
        from_pretrained_config(config, source="test")


@pytest.mark.parametrize("values", [None, [], "x", 3])
def test_not_a_table(values: object) -> None:
    with pytest.raises(UserError):
        from_pretrained_config(values, source="test")


def test_activation_without_a_name() -> None:
    with pytest.raises(ValueError, match="hidden_act"):
        to_pretrained_config(dataclasses.replace(SPEC, hidden_act="gelu"))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (spec, field)
        for spec in (SPEC, MOE, SPEC.rope)
        for field in dataclasses.fields(spec)
        if type(field.default) in (int, float, bool)
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
def test_no_attribute_that_is_off_by_default_is_lost(
    spec: ModelSpec | MoeSpec | RopeSpec, field: dataclasses.Field[Any]
) -> None:
    """Such as one that a new architecture adds: an engine is built from what the config says of it."""
    value: Any = not field.default if isinstance(field.default, bool) else field.default + 1
    changed = dataclasses.replace(spec, **{field.name: value})
    if isinstance(changed, MoeSpec):
        # Identity experts have no groups, and the shortcut takes pairs of layers.
        moe = dataclasses.replace(changed, n_group=1, topk_group=1, moe_layer_freq=2)
        whole = dataclasses.replace(SPEC, num_hidden_layers=60, moe=moe)
    else:
        whole = changed if isinstance(changed, ModelSpec) else dataclasses.replace(SPEC, rope=changed)
    assert from_pretrained_config(to_pretrained_config(whole), source="test") == whole
