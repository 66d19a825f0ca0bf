"""Weight maps: complete, exact, strict when read back, and bound without copies where possible."""

from __future__ import annotations

import dataclasses
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.configs import published_spec
from tests.support.hf import ModelType, make_checkpoint
from trtllm_mla.checkpoint.architectures import read_model_spec
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import WeightMap, bind, build_weight_map, check_checkpoint
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

LAYER = "model.layers.0.self_attn."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint").path


def change(path: Path, *, add: dict[str, torch.Tensor] | None = None, remove: tuple[str, ...] = ()) -> Checkpoint:
    """Rewrites a checkpoint's weights with tensors added, replaced or removed."""
    file = path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in remove}
    save_file(tensors | (add or {}), file)
    return Checkpoint.open(path)


def spec_of(path: Path) -> ModelSpec:
    return read_model_spec(Checkpoint.open(path))


def refusal(path: Path, checkpoint: Checkpoint, num_layers: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        bind(build_weight_map(spec_of(path), num_layers), checkpoint, DType.FLOAT32)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestBuild:
    @pytest.mark.parametrize("model_type", ["deepseek_v3", "youtu"])
    @pytest.mark.parametrize("variant", [{}, {"q_lora_rank": None}, {"attention_bias": True}])
    @pytest.mark.parametrize("tie", [False, True])
    def test_bound_values_are_the_models(
        self, tmp_path: Path, model_type: ModelType, variant: dict[str, Any], tie: bool
    ) -> None:
        path, model = make_checkpoint(tmp_path, model_type, tie=tie, num_attention_heads=6, **variant)
        spec = spec_of(path)
        weight_map = build_weight_map(spec)
        bound = bind(weight_map, Checkpoint.open(path), DType.FLOAT32)
        parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn."
            up = parameters.pop(f"{name}kv_b_proj.weight").reshape(6, 48 + 40, 96)
            parameters[f"{name}k_up"], parameters[f"{name}v_up"] = np.split(up, [48], axis=1)
        assert bound.keys() == parameters.keys()
        assert len(bound) == len(parameters)
        for name, expected in parameters.items():
            assert bound[name].shape == weight_map.shapes[name] == expected.shape
            assert bound[name].flags.c_contiguous
            np.testing.assert_array_equal(bound[name], expected)

    def test_needs_no_weights(self, path: Path) -> None:
        (path / "model.safetensors").unlink()
        spec = spec_of(path)
        assert build_weight_map(spec).shapes[f"{LAYER}k_up"] == (5, 48, 96)
        assert "no weights" in refusal(path, Checkpoint.open(path))

    @pytest.mark.parametrize("num_layers", [0, -1, 3])
    def test_number_of_layers(self, path: Path, num_layers: int) -> None:
        with pytest.raises(UserError, match="expected 1 to the model's 2"):
            build_weight_map(spec_of(path), num_layers)


class TestCheck:
    def test_nothing_is_skipped_in_a_plain_checkpoint(self, path: Path) -> None:
        assert check_checkpoint(build_weight_map(spec_of(path)), Checkpoint.open(path)) == {}

    def test_missing_tensors(self, path: Path) -> None:
        names = [
            f"{LAYER}{part}" for part in ("kv_b_proj.weight", "o_proj.weight", "q_a_proj.weight", "q_b_proj.weight")
        ]
        message = refusal(path, change(path, remove=tuple(names)))
        assert "4 tensors missing" in message
        assert "1 more" in message
        assert names[0] in message

    def test_missing_head_of_an_untied_model(self, path: Path) -> None:
        assert "1 tensor missing: lm_head.weight" in refusal(path, change(path, remove=("lm_head.weight",)))

    @pytest.mark.parametrize(
        "name",
        [
            f"{LAYER}extra.weight",
            f"{LAYER}q_proj.weight",
            f"{LAYER}o_proj.bias",
            "model.layers.2.mlp.up_proj.weight",
            "other.weight",
        ],
    )
    def test_extra_tensor(self, path: Path, name: str) -> None:
        message = refusal(path, change(path, add={name: torch.ones(3)}))
        assert f"1 tensor not part of the network: {name}" in message

    def test_extra_name_with_control_characters(self, path: Path) -> None:
        assert "\x1b" not in refusal(path, change(path, add={"\x1b[2J": torch.ones(3)}))

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            (f"{LAYER}kv_b_proj.weight", (96, 5 * 88)),
            (f"{LAYER}kv_b_proj.weight", (5 * 88 - 1, 96)),
            ("model.norm.weight", (80, 1)),
            ("lm_head.weight", (132, 80)),
        ],
    )
    def test_shape(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        message = refusal(path, change(path, add={name: torch.ones(shape)}))
        assert f"{name} (found {list(shape)}" in message
        assert "1 tensor of another shape" in message

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
    def test_dtype(self, path: Path, dtype: torch.dtype) -> None:
        checkpoint = change(path, add={"model.norm.weight": torch.ones(80).to(dtype)})
        assert "model.norm.weight" in refusal(path, checkpoint)

    def test_skipped_with_a_reason(self, path: Path) -> None:
        add = {
            f"{LAYER}rotary_emb.inv_freq": torch.ones(16),
            "model.layers.2.eh_proj.weight": torch.ones(2, 2),
            "model.layers.2.shared_head.head.weight": torch.ones(2),
        }
        skipped = check_checkpoint(build_weight_map(spec_of(path)), change(path, add=add))
        assert skipped.keys() == add.keys()
        assert "multi-token prediction" in skipped["model.layers.2.shared_head.head.weight"]

    @pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe_lite", "kimi_k2", "sarvam_mla", "youtu"])
    def test_prediction_layers_of_any_architecture(self, tmp_path: Path, model_type: ModelType) -> None:
        path, _ = make_checkpoint(tmp_path, model_type)
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        checkpoint = change(path, add={"model.layers.2.eh_proj.weight": torch.ones(2, 2), name: torch.ones(2, 2)})
        assert "multi-token prediction" in check_checkpoint(build_weight_map(spec_of(path)), checkpoint)[name]

    def test_fewer_layers(self, path: Path) -> None:
        weight_map = build_weight_map(spec_of(path), num_layers=1)
        skipped = check_checkpoint(weight_map, Checkpoint.open(path))
        assert all(name.startswith("model.layers.1.") and reason for name, reason in skipped.items())
        assert len(skipped) == sum(name.startswith("model.layers.1.") for name in Checkpoint.open(path).tensors)
        assert not any(name.startswith("model.layers.1.") for name in weight_map.weights)

    def test_tied_head_that_is_stored_too(self, tmp_path: Path) -> None:
        path, model = make_checkpoint(tmp_path, tie=True, dtype="bfloat16")
        embedding = model.model.embed_tokens.weight.detach().to(torch.bfloat16)
        checkpoint = change(path, add={"lm_head.weight": embedding.clone()})
        weight_map = build_weight_map(spec_of(path))
        assert "lm_head.weight" in check_checkpoint(weight_map, checkpoint)
        assert "lm_head.weight" not in weight_map.weights
        embedding[130, 79] += 1
        assert "differs" in refusal(path, change(path, add={"lm_head.weight": embedding.clone()}))
        assert "differs" in refusal(path, change(path, add={"lm_head.weight": embedding.float()}))

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ({"start": 0, "stop": 47}, "row 47 of each head is not consumed"),
            ({"start": 1, "stop": 48}, "row 0 of each head is not consumed"),
            ({"start": 0, "stop": 49}, "row 48 of each head is consumed twice"),
        ],
    )
    def test_rows_that_do_not_tile_a_tensor(self, path: Path, rows: dict[str, int], expected: str) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json")
        values["weights"][f"{LAYER}k_up"] |= rows | {"shape": [5, rows["stop"] - rows["start"], 96]}
        with pytest.raises(UserError, match=expected):
            check_checkpoint(WeightMap.model_validate(values), Checkpoint.open(path))

    def test_last_rows_that_are_not_consumed(self, path: Path) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json")
        del values["weights"][f"{LAYER}v_up"]
        with pytest.raises(UserError, match="row 48 of each head is not consumed"):
            check_checkpoint(WeightMap.model_validate(values), Checkpoint.open(path))

    def test_tensor_that_is_consumed_whole_and_in_part(self, path: Path) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json")
        name = f"{LAYER}kv_b_proj.weight"
        values["weights"]["copy"] = {"kind": "tensor", "tensor": name, "shape": [5 * 88, 96]}
        with pytest.raises(UserError, match="divided into heads in two ways"):
            check_checkpoint(WeightMap.model_validate(values), Checkpoint.open(path))

    def test_tensor_that_is_consumed_twice(self, path: Path) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json")
        values["weights"]["copy"] = values["weights"]["model.norm.weight"]
        with pytest.raises(UserError, match="consumed twice"):
            check_checkpoint(WeightMap.model_validate(values), Checkpoint.open(path))


class TestExperts:
    """Experts, one tensor a projection on disk, stacked when they are bound."""

    MLP = "model.layers.1.mlp."

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return make_checkpoint(tmp_path / "checkpoint", "deepseek_v2", dtype="bfloat16").path

    @pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "sarvam_mla"])
    def test_inputs_are_the_parameters_of_transformers(self, tmp_path: Path, model_type: ModelType) -> None:
        path, model = make_checkpoint(tmp_path, model_type, first_k_dense_replace=1)
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.FLOAT32)
        state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if ".mlp." in name}
        assert {name for name in bound if ".mlp." in name} == state.keys()
        for name, expected in state.items():
            assert bound[name].flags.c_contiguous
            np.testing.assert_array_equal(bound[name], expected)

    def test_the_router_is_float32_in_every_network(self, path: Path) -> None:
        weight_map = build_weight_map(spec_of(path))
        stored = load_file(path / "model.safetensors")[f"{self.MLP}gate.weight"]
        assert stored.dtype is torch.bfloat16
        for dtype in DType:
            bound = bind(weight_map, Checkpoint.open(path), dtype)
            assert {name for name, found in weight_map.dtypes(dtype).items() if found is not dtype} == (
                set() if dtype is DType.FLOAT32 else {f"{self.MLP}gate.weight"}
            )
            assert bound[f"{self.MLP}gate.weight"].dtype == np.float32
            np.testing.assert_array_equal(bound[f"{self.MLP}gate.weight"], stored.float().numpy())
            assert all(bound[name].dtype == found.numpy for name, found in weight_map.dtypes(dtype).items())

    def test_a_bias_keeps_digits_that_the_network_has_not(self, tmp_path: Path) -> None:
        path, model = make_checkpoint(tmp_path, "kimi_k2", dtype="bfloat16")
        bias = model.model.layers[1].mlp.gate.e_score_correction_bias.numpy()
        assert (bias != bias.astype(ml_dtypes.bfloat16)).any()
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.BFLOAT16)
        np.testing.assert_array_equal(bound[f"{self.MLP}gate.e_score_correction_bias"], bias)

    @pytest.mark.parametrize("dtype", list(DType))
    def test_parts_are_the_input_in_order(self, path: Path, dtype: DType) -> None:
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), dtype)
        for name in bound:
            parts = list(bound.parts(name))
            assert all(part.flags.c_contiguous and part.dtype == bound[name].dtype for part in parts)
            np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), bound[name].ravel())
        assert len(list(bound.parts(f"{self.MLP}experts.gate_up_proj"))) == 2 * 12
        assert {part.shape for part in bound.parts(f"{self.MLP}experts.gate_up_proj")} == {(36, 80)}

    def test_parts_of_the_stored_type_are_views_of_the_file(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        bound = bind(build_weight_map(spec_of(path)), checkpoint, DType.BFLOAT16)
        (first, *_, last) = bound.parts(f"{self.MLP}experts.down_proj")
        for part, expert in ((first, 0), (last, 11)):
            assert np.shares_memory(part, checkpoint.read(f"{self.MLP}experts.{expert}.down_proj.weight"))

    def test_parts_take_the_memory_of_one_expert(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, "deepseek_v2", n_routed_experts=64, moe_intermediate_size=500)
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.FLOAT16)
        name, expert_bytes = f"{self.MLP}experts.gate_up_proj", 500 * 80 * 2
        tracemalloc.start()
        assert sum(part.nbytes for part in bound.parts(name)) == 128 * expert_bytes
        assert tracemalloc.get_traced_memory()[1] < 10 * expert_bytes
        tracemalloc.stop()

    @pytest.mark.parametrize("projection", ["gate", "up", "down"])
    def test_missing_expert(self, path: Path, projection: str) -> None:
        name = f"{self.MLP}experts.11.{projection}_proj.weight"
        assert f"1 tensor missing: {name}" in refusal(path, change(path, remove=(name,)))

    def test_one_expert_too_many(self, path: Path) -> None:
        name = f"{self.MLP}experts.12.up_proj.weight"
        assert f"not part of the network: {name}" in refusal(path, change(path, add={name: torch.ones(36, 80)}))

    def test_shape_of_an_expert(self, path: Path) -> None:
        name = f"{self.MLP}experts.7.down_proj.weight"
        message = refusal(path, change(path, add={name: torch.ones(36, 80)}))
        assert f"{name} (found [36, 80], expected [80, 36])" in message

    def test_expert_that_is_consumed_twice(self, path: Path) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json")
        values["weights"]["copy"] = values["weights"][f"{self.MLP}experts.down_proj"]
        with pytest.raises(UserError, match=r"12 tensors not consumed exactly once.*consumed twice"):
            check_checkpoint(WeightMap.model_validate(values), Checkpoint.open(path))

    def test_value_beyond_fp16_names_the_expert(self, path: Path) -> None:
        name = f"{self.MLP}experts.5.up_proj.weight"
        checkpoint = change(path, add={name: torch.full((36, 80), 1e6, dtype=torch.bfloat16)})
        bound = bind(build_weight_map(spec_of(path)), checkpoint, DType.FLOAT16)
        with pytest.raises(UserError, match=rf"{name}: found the value .* range of float16"):
            bound[f"{self.MLP}experts.gate_up_proj"]

    @pytest.mark.parametrize(
        "edit",
        [
            {"shape": [4097, 72, 80]},
            {"shape": [12, 71, 80]},
            {"shape": [12, 72]},
            {"projections": []},
            {"projections": ["a", "b", "c"]},
            {"prefix": "../"},
            {"dtype": "float8"},
        ],
    )
    def test_edited_by_a_stranger(self, path: Path, tmp_path: Path, edit: dict[str, Any]) -> None:
        values = build_weight_map(spec_of(path)).model_dump(mode="json", exclude_none=True)
        values["weights"][f"{self.MLP}experts.gate_up_proj"] |= edit
        (tmp_path / "weights.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match="gate_up_proj"):
            WeightMap.load(tmp_path / "weights.json")

    def test_round_trip(self, path: Path, tmp_path: Path) -> None:
        weight_map = build_weight_map(spec_of(path))
        weight_map.save(tmp_path / "weights.json")
        assert WeightMap.load(tmp_path / "weights.json") == weight_map

    def test_full_size_map_is_small_and_quick(self) -> None:
        """46,000 tensors of 256 experts in 58 layers."""
        start = time.process_time()
        weight_map = build_weight_map(published_spec("deepseek_v3"))
        assert time.process_time() - start < 2
        assert len(weight_map.model_dump_json()) < 1 << 20
        assert sum(len(source.tensors) for source in weight_map.weights.values()) > 45_000


class TestFile:
    def test_round_trip(self, path: Path, tmp_path: Path) -> None:
        for num_layers in (None, 1):
            for tie in (False, True):
                spec = dataclasses.replace(spec_of(path), tie_word_embeddings=tie)
                weight_map = build_weight_map(spec, num_layers)
                weight_map.save(tmp_path / "weights.json")
                assert WeightMap.load(tmp_path / "weights.json") == weight_map
                assert list(WeightMap.load(tmp_path / "weights.json").weights) == list(weight_map.weights)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda v: v.update(version=2),
            lambda v: v.update(more=1),
            lambda v: v.pop("weights"),
            lambda v: v.update(weights={}),
            lambda v: v.update(weights=[]),
            lambda v: v["weights"].update({"../x": v["weights"]["model.norm.weight"]}),
            lambda v: v["weights"].update({"a\n": v["weights"]["model.norm.weight"]}),
            lambda v: v["weights"].update(x={"kind": "pickle", "tensor": "a", "shape": [1]}),
            lambda v: v["weights"].update(x={"tensor": "a", "shape": [1]}),
            lambda v: v["weights"].update(x=None),
            lambda v: v["weights"]["model.norm.weight"].update(tensor=""),
            lambda v: v["weights"]["model.norm.weight"].update(tensor="x" * 1000),
            lambda v: v["weights"]["model.norm.weight"].update(tensor=["model.norm.weight"]),
            lambda v: v["weights"]["model.norm.weight"].update(shape=[]),
            lambda v: v["weights"]["model.norm.weight"].update(shape=[-1]),
            lambda v: v["weights"]["model.norm.weight"].update(shape=[1 << 40]),
            lambda v: v["weights"]["model.norm.weight"].update(shape=["80"]),
            lambda v: v["weights"]["model.norm.weight"].update(shape=[1] * 50),
            lambda v: v["weights"]["model.norm.weight"].update(scale=2.0),
            lambda v: v["weights"][f"{LAYER}k_up"].update(start=-1),
            lambda v: v["weights"][f"{LAYER}k_up"].update(stop=1000),
            lambda v: v["weights"][f"{LAYER}k_up"].update(start=50),
            lambda v: v["weights"][f"{LAYER}k_up"].update(shape=[5, 47, 96]),
            lambda v: v["weights"][f"{LAYER}k_up"].update(shape=[5, 48]),
            lambda v: v["skipped"].append({"kind": "regex", "pattern": ".*", "reason": "x"}),
            lambda v: v["skipped"].append({"kind": "suffix", "suffix": "x", "reason": ""}),
            lambda v: v["skipped"].append({"kind": "layers", "first": -1, "reason": "x"}),
        ],
    )
    def test_edited_by_a_stranger(self, path: Path, tmp_path: Path, edit: Any) -> None:
        file = tmp_path / "weights.json"
        build_weight_map(spec_of(path)).save(file)
        values = json.loads(file.read_text())
        edit(values)
        file.write_text(json.dumps(values))
        with pytest.raises(UserError) as caught:
            WeightMap.load(file)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1500

    def test_not_json(self, tmp_path: Path) -> None:
        (tmp_path / "weights.json").write_text("{")
        with pytest.raises(UserError, match="not valid JSON"):
            WeightMap.load(tmp_path / "weights.json")


class TestBind:
    @pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("dtype", list(DType))
    def test_conversions_round_as_torch_does(self, tmp_path: Path, stored: Any, dtype: DType) -> None:
        path, _ = make_checkpoint(tmp_path, dtype=stored)
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), dtype)
        tensors = load_file(path / "model.safetensors")
        for name in ("model.embed_tokens.weight", f"{LAYER}o_proj.weight", "model.norm.weight"):
            expected = tensors[name].to(getattr(torch, dtype))
            assert bound[name].dtype == dtype.numpy
            np.testing.assert_array_equal(bound[name].astype(np.float32), expected.float().numpy())
        up = tensors[f"{LAYER}kv_b_proj.weight"].to(getattr(torch, dtype)).float().reshape(5, 88, 96)
        np.testing.assert_array_equal(bound[f"{LAYER}v_up"].astype(np.float32), up[:, 48:].numpy())

    def test_same_type_is_a_view_of_the_file(self, path: Path) -> None:
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.FLOAT32)
        first, second = bound["model.embed_tokens.weight"], bound["model.embed_tokens.weight"]
        assert np.shares_memory(first, second)
        assert not first.flags.writeable

    def test_binding_reads_nothing(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, vocab_size=20_000)
        checkpoint = Checkpoint.open(path)
        weight_map = build_weight_map(spec_of(path))
        tracemalloc.start()
        bind(weight_map, checkpoint, DType.FLOAT16)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # the embedding alone takes 6.4 MB
        tracemalloc.stop()

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
    def test_value_beyond_fp16(self, path: Path, stored: torch.dtype) -> None:
        weight = torch.ones(80, dtype=stored)
        weight[7] = -131072
        checkpoint = change(path, add={"model.norm.weight": weight})
        bound = bind(build_weight_map(spec_of(path)), checkpoint, DType.FLOAT16)
        assert bound["lm_head.weight"].dtype == np.float16
        with pytest.raises(UserError, match=r"model\.norm\.weight: found the value 131072, .* range of float16"):
            bound["model.norm.weight"]

    def test_largest_fp16_value_and_infinity_pass(self, path: Path) -> None:
        weight = torch.ones(80)
        weight[0], weight[1] = 65504.0, torch.inf
        checkpoint = change(path, add={"model.norm.weight": weight})
        bound = bind(build_weight_map(spec_of(path)), checkpoint, DType.FLOAT16)
        np.testing.assert_array_equal(bound["model.norm.weight"][:3], np.array([65504, np.inf, 1], np.float16))

    def test_value_beyond_bf16(self, path: Path) -> None:
        weight = torch.full((80,), torch.finfo(torch.float32).max)
        checkpoint = change(path, add={"model.norm.weight": weight})
        bound = bind(build_weight_map(spec_of(path)), checkpoint, DType.BFLOAT16)
        with pytest.raises(UserError, match="range of bfloat16"):
            bound["model.norm.weight"]

    def test_data_at_an_odd_address_is_aligned(self, path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length] + b" "
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.FLOAT32)
        expected = load_file(file)
        assert bound["model.norm.weight"].flags.aligned
        np.testing.assert_array_equal(bound["model.norm.weight"], expected["model.norm.weight"].numpy())

    def test_unknown_input(self, path: Path) -> None:
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.FLOAT32)
        with pytest.raises(KeyError):
            bound["model.nothing"]

    def test_bf16_arrays_have_the_ml_dtypes_type(self, tmp_path: Path) -> None:
        path, _ = make_checkpoint(tmp_path, dtype="bfloat16")
        bound = bind(build_weight_map(spec_of(path)), Checkpoint.open(path), DType.BFLOAT16)
        assert bound[f"{LAYER}k_up"].dtype == ml_dtypes.bfloat16
