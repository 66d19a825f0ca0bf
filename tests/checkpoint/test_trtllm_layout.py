"""TensorRT-LLM's layout: every rank's file against an independent split in PyTorch, and back bit by bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.configs import published_spec
from tests.support.hf import ModelType, make_checkpoint
from tests.support.synthetic import write_sparse_checkpoint
from trtllm_mla.checkpoint import trtllm_convert
from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.trtllm_convert import WINDOW_BYTES, read_trtllm, write_trtllm
from trtllm_mla.checkpoint.trtllm_layout import RankGrid, check_grid, group_tensors, layout_groups
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

EVEN_SIZES: dict[str, Any] = {"num_attention_heads": 8, "moe_intermediate_size": 48, "n_routed_experts": 16}
GREEDY = {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
V3_EXPERTS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2}


class Case(NamedTuple):
    model_type: ModelType
    options: dict[str, Any]


CASES = {
    "v2": Case("deepseek_v2", {"rope": "yarn"}),
    "v2-lite": Case("deepseek_v2", {**GREEDY, "q_lora_rank": None, "dtype": "bfloat16"}),
    "v3": Case("deepseek_v3", {**V3_EXPERTS, "first_k_dense_replace": 1, "rope": "yarn", "dtype": "bfloat16"}),
    "kimi": Case("kimi_k2", {"dtype": "float16"}),
    "dense": Case("deepseek_v3", {"tie": True, "dtype": "bfloat16"}),
}
GRIDS = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 4), (8, 8)]


@pytest.fixture(scope="module", params=CASES)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param) / "checkpoint"
    return make_checkpoint(path, case.model_type, num_layers=3, seed=3, **(EVEN_SIZES | case.options)).path


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["v3"]
    path = tmp_path_factory.mktemp("v3") / "checkpoint"
    return make_checkpoint(path, case.model_type, num_layers=2, seed=4, **(EVEN_SIZES | case.options)).path


def load(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def rank_reference(hf: dict[str, torch.Tensor], config: dict[str, Any], tp: int, ep: int, rank: int) -> dict[str, Any]:
    """What rank ``rank`` of ``tp`` holds, as TensorRT-LLM's documentation of the layout says, in whole tensors."""
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    expected: dict[str, torch.Tensor] = {}

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp, dim)[rank]

    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        attention, out = f"{source}self_attn.", f"{target}attention."
        expected[f"{target}input_layernorm.weight"] = hf[f"{source}input_layernorm.weight"]
        expected[f"{target}post_layernorm.weight"] = hf[f"{source}post_attention_layernorm.weight"]
        fused = [hf[f"{attention}kv_a_proj_with_mqa.weight"]]
        query = f"{attention}q_proj.weight"
        if config["q_lora_rank"] is not None:
            fused.insert(0, hf[f"{attention}q_a_proj.weight"])
            expected[f"{out}q_a_layernorm.weight"] = hf[f"{attention}q_a_layernorm.weight"]
            query = f"{attention}q_b_proj.weight"
        expected[f"{out}kv_a_layernorm.weight"] = hf[f"{attention}kv_a_layernorm.weight"]
        expected[f"{out}fused_a.weight"] = torch.cat(fused)
        expected[f"{out}q_b_proj"] = part(hf[query].unflatten(0, (heads, -1)), 0).flatten(0, 1)
        up = part(hf[f"{attention}kv_b_proj.weight"].unflatten(0, (heads, nope + value)), 0)
        k, v = up.split((nope, value), dim=1)
        expected[f"{out}kv_b_proj"] = torch.cat((k.flatten(0, 1), v.flatten(0, 1)))
        expected[f"{out}k_b_proj_trans"] = k.transpose(1, 2).flatten(0, 1)
        expected[f"{out}dense.weight"] = part(hf[f"{attention}o_proj.weight"].unflatten(1, (heads, -1)), 1).flatten(1)

        mlp, out = f"{source}mlp.", f"{target}mlp."
        if f"{mlp}gate.weight" not in hf:
            expected[f"{out}fc.weight"] = part(hf[f"{mlp}gate_proj.weight"], 0)
            expected[f"{out}gate.weight"] = part(hf[f"{mlp}up_proj.weight"], 0)
            expected[f"{out}proj.weight"] = part(hf[f"{mlp}down_proj.weight"], 1)
            continue
        expected[f"{out}router.weight"] = hf[f"{mlp}gate.weight"].float()
        if f"{mlp}gate.e_score_correction_bias" in hf:
            expected[f"{out}e_score_correction_bias"] = hf[f"{mlp}gate.e_score_correction_bias"].float()
        up, gate, down = (
            torch.stack([hf[f"{mlp}experts.{e}.{name}_proj.weight"] for e in range(config["n_routed_experts"])])
            for name in ("up", "gate", "down")
        )
        mine, piece = rank % ep, rank // ep
        up, gate, down = (item.chunk(ep, 0)[mine] for item in (up, gate, down))
        up, gate = (item.chunk(tp // ep, 1)[piece] for item in (up, gate))
        expected[f"{out}fc.weight"] = torch.cat((up, gate), dim=1)
        expected[f"{out}proj.weight"] = down.chunk(tp // ep, 2)[piece]
        shared = {name: hf[f"{mlp}shared_experts.{name}_proj.weight"] for name in ("up", "gate", "down")}
        expected[f"{out}shared_expert.fc.weight"] = torch.cat((part(shared["up"], 0), part(shared["gate"], 0)))
        expected[f"{out}shared_expert.proj.weight"] = part(shared["down"], 1)

    embedding = hf["model.embed_tokens.weight"]
    head = embedding if config["tie_word_embeddings"] else hf["lm_head.weight"]
    padding = -len(head) % tp
    expected["transformer.vocab_embedding.weight"] = embedding
    expected["transformer.ln_f.weight"] = hf["model.norm.weight"]
    expected["lm_head.weight"] = part(torch.nn.functional.pad(head, (0, 0, 0, padding)), 0)
    return expected


@pytest.mark.parametrize(("tp", "ep"), GRIDS)
def test_every_rank_is_as_documented_and_the_checkpoint_comes_back(original, tmp_path, tp, ep):
    report = write_trtllm(Checkpoint.open(original), tmp_path / "ranks", RankGrid(tp, ep))
    assert report.rounded == ()
    assert report.nbytes == sum(file.stat().st_size for file in (tmp_path / "ranks").glob("*.safetensors"))
    files = {path.name for path in (tmp_path / "ranks").iterdir()}
    assert files == {"config.json", *(f"rank{rank}.safetensors" for rank in range(tp))}
    hf, config = load(original), json.loads((original / "config.json").read_text())
    for rank in range(tp):
        found = load_file(tmp_path / "ranks" / f"rank{rank}.safetensors")
        assert_same_bits(found, rank_reference(hf, config, tp, ep, rank))

    read_trtllm(tmp_path / "ranks", tmp_path / "back")
    assert_same_bits(load(tmp_path / "back"), hf)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((original / name).read_text())
    assert Checkpoint.open(tmp_path / "back").tensors.keys() == hf.keys()


def test_ranks_beyond_the_vocabulary_hold_zeros(tmp_path):
    options = EVEN_SIZES | CASES["v3"].options | {"vocab_size": 5}
    original = make_checkpoint(tmp_path / "checkpoint", "deepseek_v3", num_layers=2, **options).path
    write_trtllm(Checkpoint.open(original), tmp_path / "ranks", RankGrid(8))
    heads = [load_file(tmp_path / "ranks" / f"rank{rank}.safetensors")["lm_head.weight"] for rank in range(8)]
    assert torch.equal(torch.cat(heads)[:5], load(original)["lm_head.weight"])
    assert not torch.cat(heads[5:]).any()
    read_trtllm(tmp_path / "ranks", tmp_path / "back")
    assert_same_bits(load(tmp_path / "back"), load(original))


def test_shards_of_a_limited_size(v3, tmp_path, monkeypatch):
    write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(2))
    monkeypatch.setattr(trtllm_convert, "SHARD_BYTES", 150_000)
    report = read_trtllm(tmp_path / "ranks", tmp_path / "back")
    sizes = [file.stat().st_size for file in (tmp_path / "back").glob("*.safetensors")]
    assert report.files == len(sizes) > 3
    assert max(sizes) < 160_000  # no tensor is larger, and headers come on top
    assert_same_bits(load(tmp_path / "back"), load(v3))


def test_pieces_smaller_than_a_block(v3, tmp_path, monkeypatch):
    monkeypatch.setattr(trtllm_convert, "CHUNK_BYTES", 500)
    monkeypatch.setattr(trtllm_convert, "WINDOW_BYTES", 20_000)
    told: list[tuple[int, int]] = []
    write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(4, 2), progress=lambda *step: told.append(step))
    hf, config = load(v3), json.loads((v3 / "config.json").read_text())
    for rank in range(4):
        found = load_file(tmp_path / "ranks" / f"rank{rank}.safetensors")
        assert_same_bits(found, rank_reference(hf, config, 4, 2, rank))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    told.clear()
    read_trtllm(tmp_path / "ranks", tmp_path / "back", progress=lambda *step: told.append(step))
    assert_same_bits(load(tmp_path / "back"), hf)
    assert told[-1][0] == told[-1][1]


def test_transformers_loads_what_came_back(v3, tmp_path):
    from transformers import AutoModelForCausalLM

    write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(4, 2))
    read_trtllm(tmp_path / "ranks", tmp_path / "back")
    tokens = torch.tensor([[5, 17, 101, 3]])
    first, second = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
        for path in (v3, tmp_path / "back")
    )
    assert torch.equal(first, second)


def test_the_config_has_the_documented_keys(v3, tmp_path):
    write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(4, 2))
    config = json.loads((tmp_path / "ranks" / "config.json").read_text())
    hf = json.loads((v3 / "config.json").read_text())
    assert config["hf_config"] == hf
    expected = {
        "architecture": "DeepseekV3ForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_size": 96 + 32,
        "vocab_size": 131,
        "hidden_act": "swiglu",
        "norm_epsilon": hf["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "moe_inter_size": 48,
        "topk_method": "noaux_tc",
        "coring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "mapping": {"world_size": 4, "tp_size": 4, "pp_size": 1, "moe_tp_size": 2, "moe_ep_size": 2},
    }
    assert {name: config[name] for name in expected} == expected
    assert config["moe"] == {
        "num_experts": 16,
        "shared_expert_intermediate_size": 96,
        "top_k": 3,
        "normalization_mode": 3,
        "device_limited_n_group": 4,
        "device_limited_topk_group": 2,
        "device_limited_routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
    }
    assert config["rotary_scaling"] == {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    }
    assert config["hf_dtypes"] == {"model.layers.1.mlp.gate.weight": "bfloat16"}


def test_fewer_layers_in_another_type(original, tmp_path):
    hf, config = load(original), json.loads((original / "config.json").read_text())
    report = write_trtllm(
        Checkpoint.open(original), tmp_path / "ranks", RankGrid(2), dtype=DType.FLOAT32, num_layers=2
    )
    assert report.rounded == ()
    assert all(name.startswith("model.layers.2.") for name in report.skipped)
    read_trtllm(tmp_path / "ranks", tmp_path / "back")
    back = load(tmp_path / "back")
    kept = {name: tensor for name, tensor in hf.items() if not name.startswith("model.layers.2.")}
    assert_same_bits(back, kept)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 2
    assert config["num_hidden_layers"] == 3


def test_what_rounding_took_is_named(v3, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(v3, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1 + 2**-12, dtype=torch.float32)
    save_file(tensors, path / "model.safetensors")
    report = write_trtllm(Checkpoint.open(path), tmp_path / "ranks", RankGrid(2))
    assert report.rounded == ("model.norm.weight",)
    read_trtllm(tmp_path / "ranks", tmp_path / "back")
    back = load(tmp_path / "back")["model.norm.weight"]
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, tensors["model.norm.weight"].bfloat16())


def test_layers_for_multi_token_prediction_are_left_out(v3, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(v3, path)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(80, 160), "model.layers.2.enorm.weight": torch.ones(80)}
    save_file(load_file(path / "model.safetensors") | extra, path / "model.safetensors")
    report = write_trtllm(Checkpoint.open(path), tmp_path / "ranks", RankGrid(2))
    assert report.skipped == dict.fromkeys(extra, "multi-token prediction layer")


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "kimi_k2"])
def test_blocks_cover_every_element_once_at_published_sizes(name):
    """Of the copies that are no repeats; the first four layers, so that it takes a second."""
    spec = published_spec(name)
    spec = replace(spec, num_hidden_layers=4)
    grid = RankGrid(16, 8)
    check_grid(spec, RankGrid(16, 8), source=name)
    shapes = get_architecture(spec.model_type, source=name).tensors(spec)
    covered: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {tensor: [] for tensor in shapes}
    for group in layout_groups(spec):
        for rank in range(grid.tp_size):
            for tensor in group_tensors(spec, grid, rank, group):
                assert sum(block.size for block in tensor.blocks) * tensor.type.dtype.itemsize == tensor.type.nbytes
                if not tensor.repeats:
                    for block in tensor.blocks:
                        if block.tensor is not None:
                            covered[block.tensor].append((block.rows, block.columns))
    for tensor, (rows, *columns) in shapes.items():
        blocks = covered[tensor]
        assert len(set(blocks)) == len(blocks), tensor
        assert sum((r[1] - r[0]) * (c[1] - c[0]) for r, c in blocks) == rows * (columns[0] if columns else 1), tensor
        assert all(0 <= r[0] < r[1] <= rows for r, _ in blocks), tensor
        # Disjoint: every row that starts a block is cut into columns without overlap.
        for row in {r[0] for r, _ in blocks}:
            cuts = sorted(c for r, c in blocks if r[0] <= row < r[1])
            assert all(left[1] <= right[0] for left, right in pairwise(cuts)), tensor


class TestRefusals:
    @pytest.mark.parametrize(
        ("tp", "ep", "message"),
        [
            (16, 1, "num_attention_heads 8, which 16 ranks cannot share evenly (8 / 16 = 0.5)"),
            (3, 1, "num_attention_heads 8, which 3 ranks"),
            (8, 3, "found 3 groups of experts for 8 ranks, expected a divisor of 8"),
        ],
    )
    def test_heads_and_grids(self, v3, tmp_path, tp, ep, message):
        assert message in self.refusal(v3, tmp_path, RankGrid(tp, ep))

    @pytest.mark.parametrize(
        ("sizes", "grid", "message"),
        [
            ({"n_routed_experts": 12}, RankGrid(8, 8), "n_routed_experts 12, which 8 groups of experts"),
            ({"moe_intermediate_size": 44}, RankGrid(8), "moe_intermediate_size 44, which 8 ranks of a group"),
            ({"moe_intermediate_size": 42}, RankGrid(8, 8), "width of the shared experts 84, which 8 ranks"),
            ({"intermediate_size": 100}, RankGrid(8), "intermediate_size 100, which 8 ranks"),
        ],
    )
    def test_widths(self, tmp_path, sizes, grid, message):
        options = EVEN_SIZES | CASES["v3"].options | sizes
        path = make_checkpoint(tmp_path / "checkpoint", "deepseek_v3", num_layers=2, **options).path
        assert message in self.refusal(path, tmp_path, grid)

    @pytest.mark.parametrize(
        ("model_type", "options", "message"),
        [
            ("youtu", {}, "model_type 'youtu', expected one of deepseek_v2, deepseek_v3, kimi_k2"),
            ("glm4_moe_lite", {}, "model_type 'glm4_moe_lite', expected one of"),
            ("deepseek_v3", {"attention_bias": True}, "attention_bias true"),
            ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
            ("deepseek_v3", {"rope": "linear"}, "rope type 'linear'"),
            ("deepseek_v2", GREEDY | {"routed_scaling_factor": 2.0}, "routed_scaling_factor 2, expected 1"),
            (
                "deepseek_v3",
                {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.5}},
                "would scale cosines by 1.20794, this model by 1.5",
            ),
        ],
    )
    def test_models(self, tmp_path, model_type, options, message):
        path = make_checkpoint(tmp_path / "checkpoint", model_type, **options).path
        assert message in self.refusal(path, tmp_path, RankGrid(1))

    def test_tensors_in_fp8(self, v3, tmp_path):
        path = tmp_path / "checkpoint"
        shutil.copytree(v3, path)
        tensors = load_file(path / "model.safetensors")
        name = "model.layers.1.mlp.experts.9.down_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, path / "model.safetensors")
        message = self.refusal(path, tmp_path, RankGrid(2))
        assert name in message
        assert "F8_E4M3" in message

    def test_values_beyond_the_type_leave_nothing(self, v3, tmp_path):
        path = tmp_path / "checkpoint"
        shutil.copytree(v3, path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.layers.1.mlp.experts.9.down_proj.weight"][3, 5] = 1e30
        save_file(tensors, path / "model.safetensors")
        before = set(tmp_path.iterdir())
        with pytest.raises(UserError, match=r"experts\.9\.down_proj\.weight: found the value 1\.0\d*e\+30"):
            write_trtllm(Checkpoint.open(path), tmp_path / "ranks", RankGrid(2), dtype=DType.FLOAT16)
        assert set(tmp_path.iterdir()) == before

    def test_a_full_disk_is_found_before_anything_is_written(self, v3, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert "0.0 GB free on the disk" in self.refusal(v3, tmp_path, RankGrid(2))

    def test_outputs_are_not_replaced_unasked(self, v3, tmp_path):
        write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(2))
        with pytest.raises(UserError, match="not empty"):
            write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(4))
        write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(4), overwrite=True)
        assert (tmp_path / "ranks" / "rank3.safetensors").exists()
        with pytest.raises(UserError, match="would replace the checkpoint"):
            read_trtllm(tmp_path / "ranks", tmp_path / "ranks" / "..")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").touch()
        with pytest.raises(UserError, match="never replaced"):
            read_trtllm(tmp_path / "ranks", tmp_path / "other")

    @staticmethod
    def refusal(path: Path, tmp_path: Path, grid: RankGrid) -> str:
        with pytest.raises(UserError) as caught:
            write_trtllm(Checkpoint.open(path), tmp_path / "ranks", grid)
        assert not (tmp_path / "ranks").exists()
        return str(caught.value)


class TestDamagedLayouts:
    @pytest.fixture
    def ranks(self, v3: Path, tmp_path: Path) -> Path:
        write_trtllm(Checkpoint.open(v3), tmp_path / "ranks", RankGrid(2))
        return tmp_path / "ranks"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hf_config": None}, "hf_config: "),
            ({"mapping": {"tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 1}}, "moe_tp_size * moe_ep_size = 2"),
            (
                {"mapping": {"tp_size": 8, "moe_tp_size": 8, "moe_ep_size": 1}},
                "found BF16 [66, 80], expected BF16 [17",
            ),
            ({"mapping": {"tp_size": 1 << 40, "moe_tp_size": 1 << 40, "moe_ep_size": 1}}, "mapping.tp_size"),
            ({"mapping": {"tp_size": 2, "pp_size": 2, "moe_tp_size": 2, "moe_ep_size": 1}}, "pp_size"),
            ({"dtype": "float16"}, "found BF16"),
            ({"quantization": {"quant_algo": "FP8"}}, "quant_algo"),
            ({"hf_dtypes": {"model.norm.weight": "float16"}}, "hf_dtypes: found 'model.norm.weight' as float16"),
            ({"hf_dtypes": {"../../etc/passwd": "float16"}}, "hf_dtypes"),
        ],
    )
    def test_config(self, ranks, tmp_path, changes, message):
        config = json.loads((ranks / "config.json").read_text())
        (ranks / "config.json").write_text(json.dumps(config | changes))
        assert message in self.refusal(ranks, tmp_path)

    def test_a_missing_file(self, ranks, tmp_path):
        (ranks / "rank1.safetensors").unlink()
        assert "rank1.safetensors: not a regular file" in self.refusal(ranks, tmp_path)

    def test_a_layout_from_elsewhere(self, ranks, tmp_path):
        config = json.loads((ranks / "config.json").read_text())
        del config["hf_config"]
        (ranks / "config.json").write_text(json.dumps(config))
        assert "found no key hf_config" in self.refusal(ranks, tmp_path)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("transformer.ln_f.weight", None, "rank1.safetensors: misses tensor 'transformer.ln_f.weight'"),
            ("transformer.new", torch.ones(2), "does not belong to the model, 'transformer.new'"),
            ("transformer.ln_f.weight", torch.ones(81).bfloat16(), "found BF16 [81], expected BF16 [80]"),
            ("transformer.ln_f.weight", torch.ones(80), "found F32 [80], expected BF16 [80]"),
            ("transformer.vocab_embedding.weight", -1, "differ from those of transformer.vocab_embedding.weight in "),
            ("transformer.layers.1.attention.k_b_proj_trans", -1, "both to hold model.layers.1.self_attn.kv_b_proj"),
            ("transformer.layers.1.mlp.router.weight", -1, "both to hold model.layers.1.mlp.gate.weight"),
        ],
    )
    def test_weights(self, ranks, tmp_path, name, change, message):
        tensors = load_file(ranks / "rank1.safetensors")
        if change is None:
            del tensors[name]
        elif isinstance(change, int):
            tensors[name].view(-1)[-1] *= change
        else:
            tensors[name] = change
        save_file(tensors, ranks / "rank1.safetensors")
        assert message in self.refusal(ranks, tmp_path)

    @staticmethod
    def refusal(ranks: Path, tmp_path: Path) -> str:
        before = set(tmp_path.iterdir())
        with pytest.raises(UserError) as caught:
            read_trtllm(ranks, tmp_path / "back")
        assert set(tmp_path.iterdir()) == before
        return str(caught.value)


MEMORY_PROGRAM = """
import resource, sys
from pathlib import Path
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.trtllm_convert import read_trtllm, write_trtllm
from trtllm_mla.checkpoint.trtllm_layout import RankGrid

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path = Path(sys.argv[1])
checkpoint = Checkpoint.open(path / "checkpoint")
before = peak()
report = write_trtllm(checkpoint, path / "ranks", RankGrid(4, 2))
read_trtllm(path / "ranks", path / "back")
print(report.nbytes, peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """1.5 GB of memory are allowed for 20 GB of weights; a tenth of both, and what is mapped at a time on top.

    Slow, since it writes 3 GB. ``bench/convert_speed.py --sparse`` does the same at full size.
    """
    config = {"model_type": "deepseek_v3", "dtype": "bfloat16", "num_hidden_layers": 2, "first_k_dense_replace": 1}
    write_sparse_checkpoint(
        tmp_path / "checkpoint", config | {"vocab_size": 16384, "n_routed_experts": 8, "n_group": 4}, 2
    )
    program = [sys.executable, "-c", MEMORY_PROGRAM, tmp_path]
    nbytes, peak = map(int, subprocess.run(program, capture_output=True, text=True, check=True).stdout.split())
    assert nbytes > 1.5e9
    assert peak < 1.5e9 / 10 + WINDOW_BYTES
