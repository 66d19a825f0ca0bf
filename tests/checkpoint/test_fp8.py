"""FP8 checkpoints: what their config says, which tensors it is about, how they are checked and bound."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.quantizers.quantizers_utils import should_convert_module

from tests.support.configs import PUBLISHED, published_spec
from tests.support.fp8 import DEEPSEEK_CONFIG, dequantize, quantize, quantize_checkpoint
from tests.support.hf import HfCheckpoint, make_checkpoint
from trtllm_mla.checkpoint import fp8
from trtllm_mla.checkpoint.architectures import get_architecture, read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import weight_footprint
from trtllm_mla.checkpoint.pretrained_config import from_pretrained_config, to_pretrained_config
from trtllm_mla.checkpoint.spec import Fp8Spec, ModelSpec
from trtllm_mla.checkpoint.weights import BoundWeights, WeightMap, bind, build_weight_map, fp8_inputs
from trtllm_mla.dtypes import ByteDType, DType
from trtllm_mla.errors import UserError

ATTENTION = "model.layers.0.self_attn."
EXPERTS = "model.layers.1.mlp.experts."
SIZES: dict[str, Any] = {"hidden_size": 136, "intermediate_size": 300, "first_k_dense_replace": 1}

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]


def make(tmp_path: Path, edit: Edit | None = None, **options: Any) -> HfCheckpoint:
    """A model of a dense layer and one with experts, in FP8."""
    return quantize_checkpoint(make_checkpoint(tmp_path / "checkpoint", **SIZES), edit=edit, **options)


def bind_all(path: Path, dtype: DType = DType.FLOAT32, num_layers: int | None = None) -> BoundWeights:
    checkpoint = Checkpoint.open(path)
    return bind(build_weight_map(read_model_spec(checkpoint), num_layers), checkpoint, dtype)


def change_config(path: Path, **values: Any) -> None:
    """Changes keys of a checkpoint's ``quantization_config``."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | values
    (path / "config.json").write_text(json.dumps(config))


def spec_with(quantization_config: object) -> ModelSpec:
    config = PUBLISHED["deepseek_v3"] | {"quantization_config": quantization_config}
    return get_architecture("deepseek_v3", source="config.json").model_spec(config, None, source="config.json")


class TestConfig:
    @pytest.mark.parametrize(
        "config",
        [
            DEEPSEEK_CONFIG,
            DEEPSEEK_CONFIG | {"scale_fmt": "ue8m0"},
            {"quant_method": "fp8"},
            {"quant_method": "fp8", "activation_scheme": "DYNAMIC", "modules_to_not_convert": None},
        ],
    )
    def test_block_scaled_weights(self, config: dict[str, Any]) -> None:
        assert spec_with(config).quantization == Fp8Spec()
        assert spec_with(None).quantization is None

    @pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
    def test_modules_that_stay(self, key: str) -> None:
        spec = spec_with(DEEPSEEK_CONFIG | {key: ["lm_head", "model.layers.0"]})
        assert spec.quantization == Fp8Spec(("lm_head", "model.layers.0"))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method: found 'gptq', expected 'fp8'"),
            ({"quant_method": "compressed-tensors"}, "quant_method: found 'compressed-tensors', expected 'fp8'"),
            ({}, "quant_method: found None, expected 'fp8'"),
            ("fp8x", "quant_method: found 'fp8x', expected 'fp8'"),
            (DEEPSEEK_CONFIG | {"weight_block_size": None}, "weight_block_size: found null, which is one scale for"),
            (
                DEEPSEEK_CONFIG | {"weight_block_size": [1, 128]},
                "weight_block_size: found [1, 128], expected [128, 128]",
            ),
            (DEEPSEEK_CONFIG | {"fmt": "e5m2"}, "quantization_config.fmt"),
            (
                DEEPSEEK_CONFIG | {"activation_scheme": "static"},
                "activation_scheme: found 'static', expected 'dynamic'",
            ),
            (DEEPSEEK_CONFIG | {"expert_dtype": "fp4"}, "quantization_config.expert_dtype"),
            (DEEPSEEK_CONFIG | {"modules_to_convert": ["lm_head"]}, "quantization_config.modules_to_convert"),
            (DEEPSEEK_CONFIG | {"modules_to_not_convert": ["(a+)+b"]}, "modules_to_not_convert"),
            (DEEPSEEK_CONFIG | {"modules_to_not_convert": ["a"] * 10_000}, "modules_to_not_convert"),
        ],
    )
    def test_what_is_not_supported_is_refused_in_one_line(self, config: object, message: str) -> None:
        with pytest.raises(UserError) as caught:
            spec_with(config)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("exclude", [(), ("model.layers.3.self_attn", "lm_head")])
    def test_survives_in_the_networks_config(self, exclude: tuple[str, ...]) -> None:
        spec = dataclasses.replace(published_spec("deepseek_v3"), quantization=Fp8Spec(exclude))
        values = json.loads(json.dumps(to_pretrained_config(spec)))
        assert values["quantization"]["quant_algo"] == "FP8_BLOCK_SCALES"
        assert from_pretrained_config(values, source="test") == spec

    def test_a_list_without_quantisation_is_refused(self) -> None:
        values = to_pretrained_config(published_spec("deepseek_v3"))
        values["quantization"]["exclude_modules"] = ["lm_head"]
        with pytest.raises(UserError, match="exclude_modules"):
            from_pretrained_config(values, source="test")


class TestWhichTensors:
    MODULES = (
        *(f"model.layers.{layer}.self_attn.{name}" for layer in (1, 11) for name in ("q_a_proj", "kv_b_proj")),
        "model.layers.1.self_attn.kv_a_proj_with_mqa",
        "model.layers.1.mlp.gate_proj",
        "model.layers.11.mlp.experts.7.gate_proj",
        "model.layers.11.mlp.experts.70.down_proj",
        "model.layers.11.mlp.shared_experts.up_proj",
    )

    @pytest.mark.parametrize(
        "exclude",
        [
            (),
            ("model.layers.1",),
            ("model.layers.11.mlp.experts.7",),
            ("kv_b_proj",),
            ("self_attn.q_a_proj", "up_proj"),
            ("mlp.gate",),
            ("gate",),
            ("model",),
            ("odel.layers",),
            ("lm_head",),
            ("model.layers.1.self_attn.kv_a_proj_with_mqa",),
        ],
    )
    def test_names_are_compared_as_transformers_does(self, exclude: tuple[str, ...]) -> None:
        spec = Fp8Spec(exclude)
        found = [module for module in self.MODULES if spec.applies(f"{module}.weight")]
        assert found == [module for module in self.MODULES if should_convert_module(module, list(exclude))]

    def test_a_dot_at_the_end_changes_nothing(self) -> None:
        assert not Fp8Spec(("model.layers.1.",)).applies("model.layers.1.mlp.up_proj.weight")
        assert Fp8Spec(("model.layers.1.",)).applies("model.layers.11.mlp.up_proj.weight")

    @pytest.mark.parametrize(
        "tensor",
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.3.mlp.gate.weight",
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "model.layers.3.self_attn.kv_a_layernorm.weight",
            "model.layers.3.self_attn.o_proj.bias",
        ],
    )
    def test_the_rest_is_never_quantised(self, tensor: str) -> None:
        assert not Fp8Spec().applies(tensor)

    def test_deepseek_v3(self) -> None:
        spec = spec_with(DEEPSEEK_CONFIG)
        inputs = fp8_inputs(spec)
        # Of each layer 4 projections of attention, and 3 of the MLP or the shared expert; all others in 2 of experts.
        assert len(inputs) == 61 * 7 + 58 * 2
        assert len(fp8_inputs(spec, 4)) == 4 * 7 + 2
        assert fp8_inputs(published_spec("deepseek_v3")) == frozenset()
        shapes, dtypes = build_weight_map(spec).shapes, build_weight_map(spec).dtypes(DType.BFLOAT16)
        # 576 rows have 5 rows of scales.
        name = f"{ATTENTION}kv_a_proj_with_mqa.weight"
        assert shapes[f"{name}_scale_inv"] == (5, 56)
        assert (dtypes[name], dtypes[f"{name}_scale_inv"]) == (ByteDType.INT8, DType.FLOAT32)
        experts = "model.layers.60.mlp.experts."
        assert shapes[f"{experts}gate_up_proj_scale_inv"] == (256, 2 * 16, 56)
        assert shapes[f"{experts}down_proj_scale_inv"] == (256, 56, 16)
        assert {name for name, dtype in dtypes.items() if dtype is ByteDType.INT8} == inputs
        plain, quantized = weight_footprint(published_spec("deepseek_v3")), weight_footprint(spec)
        assert quantized.parameters == plain.parameters
        scales = sum(4 * np.prod(shapes[f"{name}_scale_inv"]) for name in inputs)
        assert plain.weight_bytes - quantized.weight_bytes == sum(np.prod(shapes[name]) for name in inputs) - scales


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (576, 300)])
def test_dequantised_numbers_are_those_of_torch(shape: tuple[int, int]) -> None:
    codes, scales = quantize(torch.randn(shape))
    assert fp8.scale_shape(shape) == tuple(scales.shape)
    found = fp8.dequantize(codes.view(torch.uint8).numpy(), scales.numpy())
    assert np.array_equal(found, dequantize(codes, scales).numpy())


@pytest.mark.parametrize("place", [(0, 0), (1023, 2), (1024, 1), (2499, 0)])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_first_nan_is_found(place: tuple[int, int], code: int) -> None:
    codes = np.full((2500, 3), 0x7E, np.uint8)
    assert fp8.first_nan(codes) is None
    codes[place] = codes[-1, -1] = code
    assert fp8.first_nan(codes) == place


class TestBind:
    @pytest.mark.parametrize("dtype", DType)
    def test_values(self, tmp_path: Path, dtype: DType) -> None:
        checkpoint = make(tmp_path)
        stored = load_file(checkpoint.path / "model.safetensors")
        bound = bind_all(checkpoint.path, dtype)
        state = checkpoint.model.state_dict()
        for name, value in bound.items():
            if name.startswith(EXPERTS):
                continue  # see below
            if name.endswith((".k_up", ".v_up")):
                heads = state[name[: name.rindex(".")] + ".kv_b_proj.weight"].reshape(5, 48 + 40, 96)
                expected = heads[:, :48] if name.endswith(".k_up") else heads[:, 48:]
            elif stored.get(name, torch.empty(0)).dtype == torch.float8_e4m3fn:
                assert value.dtype == np.int8
                assert np.array_equal(value, stored[name].view(torch.int8).numpy())
                continue
            elif name.endswith("_scale_inv"):
                assert value.dtype == np.float32
                assert np.array_equal(value, stored[name].numpy())
                continue
            else:
                expected = state[name]
            wanted = torch.float32 if ".mlp.gate." in name else getattr(torch, dtype)
            assert np.array_equal(value.astype(np.float32), expected.to(wanted).float().numpy()), name
        assert (
            sum(name.endswith("_scale_inv") for name in bound)
            == len(fp8_inputs(read_model_spec(Checkpoint.open(checkpoint.path))))
            == 14 + 2
        )

    def test_codes_are_not_copied(self, tmp_path: Path) -> None:
        bound = bind_all(make(tmp_path).path)
        assert not bound[f"{ATTENTION}o_proj.weight"].flags.owndata

    @pytest.mark.parametrize("intermediate_size", [36, 128, 192])
    def test_experts_are_stacked_byte_for_byte(self, tmp_path: Path, intermediate_size: int) -> None:
        """Gate above up, and in the scales all rows of the gate above those of up, the last of which may be short."""
        path = quantize_checkpoint(
            make_checkpoint(tmp_path / "checkpoint", **SIZES, moe_intermediate_size=intermediate_size)
        ).path
        bound, stored = bind_all(path, DType.BFLOAT16), load_file(path / "model.safetensors")
        for name, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for suffix, kind in (("", torch.int8), ("_scale_inv", torch.float32)):
                expected = [
                    torch.cat([stored[f"{EXPERTS}{expert}.{part}.weight{suffix}"].view(kind) for part in projections])
                    for expert in range(12)
                ]
                value = bound[f"{EXPERTS}{name}{suffix}"]
                assert value.dtype == expected[0].numpy().dtype
                assert np.array_equal(value, torch.stack(expected).numpy())

    def test_experts_are_read_one_by_one(self, tmp_path: Path) -> None:
        """Each part is the mapped file itself."""
        bound = bind_all(make(tmp_path).path, DType.BFLOAT16)
        parts = list(bound.parts(f"{EXPERTS}gate_up_proj"))
        assert len(parts) == 2 * 12
        assert {(part.shape, part.dtype) for part in parts} == {((36, 136), np.dtype(np.int8))}
        assert not any(part.flags.owndata for part in parts)

    def test_modules_that_stay(self, tmp_path: Path) -> None:
        experts = [f"{EXPERTS}{expert}.{part}_proj" for expert in range(12) for part in ("gate", "up", "down")]
        checkpoint = make(tmp_path, exclude=(*experts, "o_proj", "kv_b_proj"))
        # The config may name what is above the experts, instead of each of them.
        change_config(checkpoint.path, modules_to_not_convert=[EXPERTS.removesuffix("."), "o_proj", "kv_b_proj"])
        bound, state = bind_all(checkpoint.path), checkpoint.model.state_dict()
        for name in (f"{EXPERTS}gate_up_proj", f"{ATTENTION}o_proj.weight"):
            assert np.array_equal(bound[name], state[name].numpy())
        assert f"{ATTENTION}q_a_proj.weight_scale_inv" in bound

    def test_some_experts_that_stay(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"found only some of the projections model\.layers\.1\.mlp\.experts"):
            bind_all(make(tmp_path, exclude=("gate_proj",)).path)

    def test_fewer_layers_leave_the_others_scales_out(self, tmp_path: Path) -> None:
        bound = bind_all(make(tmp_path).path, num_layers=1)
        assert not any(".layers.1." in name for name in bound)

    def test_layers_for_multi_token_prediction_are_skipped(self, tmp_path: Path) -> None:
        def add(tensors: Tensors) -> None:
            for name, tensor in list(tensors.items()):
                if ".layers.1." in name:
                    tensors[name.replace(".1.", ".2.", 1)] = tensor.clone()
            codes, scales = quantize(torch.randn(136, 272))
            tensors |= {"model.layers.2.eh_proj.weight": codes, "model.layers.2.eh_proj.weight_scale_inv": scales}

        assert not any(".layers.2." in name for name in bind_all(make(tmp_path, add).path))

    def test_scales_of_other_float_types_are_widened(self, tmp_path: Path) -> None:
        name = f"{ATTENTION}q_a_proj.weight_scale_inv"
        checkpoint = make(tmp_path, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
        stored = load_file(checkpoint.path / "model.safetensors")[name]
        assert np.array_equal(bind_all(checkpoint.path)[name], stored.float().numpy())

    def test_a_map_read_back_binds_the_same(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(make(tmp_path).path)
        weight_map = build_weight_map(read_model_spec(checkpoint))
        weight_map.save(tmp_path / "weights.json")
        assert WeightMap.load(tmp_path / "weights.json") == weight_map


def remove(name: str) -> Edit:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, make_tensor: Callable[[Tensors], torch.Tensor]) -> Edit:
    return lambda tensors: tensors.update({name: make_tensor(tensors)})


def broken(name: str, place: tuple[int, int], value: float) -> Edit:
    """Writes NaN, or a value, into a copy of a tensor."""

    def edit(tensors: Tensors) -> None:
        changed = tensors[name].float()
        changed[place] = value
        tensors[name] = changed.to(tensors[name].dtype)

    return edit


Q_A, KV_B, EXPERT = f"{ATTENTION}q_a_proj.weight", f"{ATTENTION}kv_b_proj.weight", f"{EXPERTS}7.down_proj.weight"
NAN = float("nan")


class TestRefusals:
    @pytest.mark.parametrize("name", [Q_A, KV_B, EXPERT])
    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda name: remove(f"{name}_scale_inv"), "missing: {name}_scale_inv"),
            (
                lambda name: put(f"{name}_scale_inv", lambda tensors: tensors[f"{name}_scale_inv"].T.repeat(2, 3)),
                "of another shape than the network's: {name}_scale_inv (found [",
            ),
            (
                lambda name: put(f"{name}_scale_inv", lambda tensors: tensors[f"{name}_scale_inv"].to(torch.int8)),
                "of a type other than F32, F16, BF16: {name}_scale_inv (I8)",
            ),
            (lambda name: put(name, lambda tensors: tensors[name].bfloat16()), "other than F8_E4M3: {name} (BF16)"),
            (lambda name: broken(name, (17, 5), NAN), "tensor {name}: found no finite number at [17, 5]"),
            (
                lambda name: broken(f"{name}_scale_inv", (0, 0), float("inf")),
                "tensor {name}_scale_inv: found no finite number at [0, 0]",
            ),
        ],
        ids=["no scale", "shape", "type", "no codes", "NaN", "scale"],
    )
    def test_a_tensor_is_named(self, tmp_path: Path, name: str, edit: Callable[[str], Edit], message: str) -> None:
        checkpoint = make(tmp_path, edit(name))
        with pytest.raises(UserError) as caught:
            list(bind_all(checkpoint.path).values())
        assert message.format(name=name) in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.gate.weight"])
    def test_a_scale_too_many(self, tmp_path: Path, name: str) -> None:
        checkpoint = make(tmp_path, put(f"{name}_scale_inv", lambda tensors: torch.ones(1, 1)))
        with pytest.raises(UserError, match=f"not part of the network: {name}_scale_inv"):
            bind_all(checkpoint.path)

    def test_fp8_where_the_config_says_nothing(self, tmp_path: Path) -> None:
        checkpoint = make(tmp_path)
        path = checkpoint.path / "config.json"
        config = json.loads(path.read_text())
        del config["quantization_config"]
        path.write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"not part of the network: model\.layers\.0.*_scale_inv"):
            bind_all(checkpoint.path)

    def test_plain_weights_where_the_config_says_fp8(self, tmp_path: Path) -> None:
        checkpoint = make_checkpoint(tmp_path / "checkpoint", **SIZES)
        change_config(checkpoint.path, **DEEPSEEK_CONFIG)
        with pytest.raises(UserError, match=r"missing: model\.layers\.0.*_scale_inv"):
            bind_all(checkpoint.path)

    def test_scales_that_are_used_twice(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(make(tmp_path).path)
        values = build_weight_map(read_model_spec(checkpoint)).model_dump(mode="json")
        values["weights"]["again"] = {"kind": "tensor", "tensor": f"{KV_B}_scale_inv", "shape": [4, 1]}
        with pytest.raises(UserError, match=r"not consumed exactly once .*kv_b_proj\.weight_scale_inv"):
            bind(WeightMap.model_validate_json(json.dumps(values)), checkpoint, DType.FLOAT32)
