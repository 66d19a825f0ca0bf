"""Calibration of a network against latents and perplexities of the transformers model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.calibration.calibrate import CalibrationReport, calibrate
from trtllm_mla.calibration.scale_search import choose_scale
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.tokenizer import read_text
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.ops.row_codec import decode_rows, encode_rows
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.perplexity import executor_perplexity

EXAMPLES = Path(__file__).parents[2] / "examples"
CALIBRATION_TEXT = EXAMPLES / "calibration.txt"
HELD_OUT = EXAMPLES / "tiny-mla" / "held_out.txt"
NUM_LAYERS, KV_LORA_RANK = 4, 48
SMALL = 2.0**-10
WINDOW = 128


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """The example, and a checkpoint of the same function whose latents are a thousandth as large."""
    small = tmp_path_factory.mktemp("small") / "checkpoint"
    shutil.copytree(EXAMPLES / "tiny-mla", small)
    tensors = load_file(small / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("kv_a_layernorm.weight"):
            tensor *= SMALL
        if name.endswith("kv_b_proj.weight"):
            tensor /= SMALL
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    return {1.0: EXAMPLES / "tiny-mla", SMALL: small}


class HfModel:
    """The transformers model, whose latents can be read, or replaced by what a quantised cache makes of them."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @contextmanager
    def hooked(self, hook: Any) -> Iterator[None]:
        """Calls ``hook(layer, latents)`` behind each layer's norm; what it returns takes their place."""
        handles = [
            layer.self_attn.kv_a_layernorm.register_forward_hook(
                lambda module, inputs, output, index=index: hook(index, output)
            )
            for index, layer in enumerate(self.model.model.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, token_ids: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of each window but for its last token, and the tokens that follow."""
        for start in range(0, len(token_ids), WINDOW):
            tokens = torch.tensor([token_ids[start : start + WINDOW]])
            with torch.inference_mode():
                yield self.model(tokens).logits[0, :-1], tokens[0, 1:]

    def latents(self, token_ids: list[int]) -> list[np.ndarray]:
        """Each layer's latents: [tokens, kv_lora_rank]."""
        found: dict[int, list[np.ndarray]] = {}
        with self.hooked(lambda layer, output: found.setdefault(layer, []).append(output[0].numpy())):
            list(self.logits(token_ids))
        return [np.concatenate(found[layer]) for layer in range(NUM_LAYERS)]

    def perplexity(self, token_ids: list[int], dtype: CacheDType | None, scales: tuple[float, ...]) -> float:
        """Perplexity with latents that went through a cache of this type, or as they are."""

        def quantize(layer: int, output: torch.Tensor) -> torch.Tensor | None:
            if dtype is None:
                return None
            layout = dtype.layout(KV_LORA_RANK, rope_dim=0)
            return torch.from_numpy(
                decode_rows(encode_rows(output.numpy(), layout, scales[layer]), layout, scales[layer])
            )

        with self.hooked(quantize):
            losses = [
                torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
                for logits, targets in self.logits(token_ids)
            ]
        return float(torch.cat(losses).mean().exp())


@pytest.fixture(scope="module")
def hf_models(checkpoints: dict[float, Path]) -> dict[float, HfModel]:
    return {size: HfModel(path) for size, path in checkpoints.items()}


@pytest.fixture(scope="module")
def calibrated(
    checkpoints: dict[float, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[float, CacheDType], tuple[NetworkDirectory, NetworkDirectory, CalibrationReport]]:
    """By size of the latents and cache: the network before, and after, and the report."""
    result = {}
    for size, checkpoint in checkpoints.items():
        for dtype in (CacheDType.FP8, CacheDType.NVFP4):
            path = tmp_path_factory.mktemp("networks")
            plugin = MlaPluginConfig(kv_cache_dtype=dtype.value)
            before = convert(checkpoint, path / "before", plugin=plugin, dtype=DType.FLOAT32)
            report = calibrate(
                before.path,
                checkpoint,
                CALIBRATION_TEXT,
                output=path / "after",
                window=WINDOW,
                max_tokens=1000,
                num_threads=1,
            )
            result[size, dtype] = (before, NetworkDirectory.load(path / "after"), report)
    return result


CASES = [(size, dtype) for size in (1.0, SMALL) for dtype in (CacheDType.FP8, CacheDType.NVFP4)]


@pytest.mark.parametrize("case", CASES)
def test_scales_are_those_of_the_transformers_models_latents(hf_models, checkpoints, calibrated, case):
    size, dtype = case
    before, after, report = calibrated[case]
    token_ids = read_text(CALIBRATION_TEXT, checkpoints[size])[:1000]
    expected = [choose_scale(latents, dtype) for latents in hf_models[size].latents(token_ids)]
    assert len(report.layers) == NUM_LAYERS
    for found, wanted in zip(report.layers, expected, strict=True):
        assert found.latent_scale == wanted.latent_scale
        for name in ("amax", "error_before", "error_after"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3)
    assert before.latent_scales == (1.0,) * NUM_LAYERS
    assert after.latent_scales == tuple(item.latent_scale for item in expected)
    assert (report.tokens, report.kv_cache_dtype) == (1000, dtype)


def test_small_latents_need_calibration_in_nvfp4_only(calibrated):
    _, _, report = calibrated[SMALL, CacheDType.NVFP4]
    for layer in report.layers:
        assert layer.error_before > 0.9
        assert layer.error_after < 0.09
    as_trained, small = (calibrated[size, CacheDType.FP8][2].layers for size in (1.0, SMALL))
    assert [layer.error_before for layer in small] == pytest.approx([layer.error_before for layer in as_trained])


def executor_value(network: NetworkDirectory, checkpoint: Path, token_ids: list[int], threshold: int) -> float:
    plugin = network.plugin.model_copy(update={"prefill_absorption_threshold": threshold})
    num_pages = -(-WINDOW // plugin.page_size)
    config = SchedulerConfig.from_build_config(BuildConfig(), plugin, vocab_size=258, num_pages=num_pages)
    opened = Checkpoint.open(checkpoint)
    executor = make_executor("onnxruntime", network, opened, num_pages=num_pages, num_threads=1)
    try:
        return executor_perplexity(executor, config, token_ids, window=WINDOW).perplexity
    finally:
        executor.close()


@pytest.mark.parametrize("threshold", [0, WINDOW + 1], ids=["context group", "generation group"])
@pytest.mark.parametrize("case", CASES)
def test_perplexity_is_that_of_the_transformers_model_with_such_a_cache(
    hf_models, checkpoints, calibrated, case, threshold
):
    """Scales that are stored are the ones that run: in both groups, and within the bounds that users are promised."""
    size, dtype = case
    _, after, _ = calibrated[case]
    token_ids = read_text(HELD_OUT, checkpoints[size])[:2048]
    exact = hf_models[1.0].perplexity(token_ids, None, ())
    expected = hf_models[size].perplexity(token_ids, dtype, after.latent_scales)
    found = executor_value(after, checkpoints[size], token_ids, threshold)
    # A latent at a rounding boundary may fall to either side, and the cache's rotary keys are bf16.
    assert found == pytest.approx(expected, rel=1e-3)
    assert found <= exact * {CacheDType.FP8: 1.005, CacheDType.NVFP4: 1.03}[dtype]


@pytest.mark.parametrize(("dtype", "bound"), [(CacheDType.FP8, 1.005), (CacheDType.NVFP4, 1.03)])
def test_the_example_keeps_its_perplexity_without_calibration(checkpoints, calibrated, tmp_path, dtype, bound):
    plugin = MlaPluginConfig(kv_cache_dtype="bf16")
    plain = convert(checkpoints[1.0], tmp_path / "plain", plugin=plugin, dtype=DType.FLOAT32)
    token_ids = read_text(HELD_OUT, checkpoints[1.0])[:4096]
    expected, found = (
        executor_value(network, checkpoints[1.0], token_ids, 0) for network in (plain, calibrated[1.0, dtype][0])
    )
    assert found != expected
    assert found <= expected * bound


def test_without_calibration_nvfp4_ruins_small_latents(hf_models, checkpoints, calibrated):
    before, _, _ = calibrated[SMALL, CacheDType.NVFP4]
    token_ids = read_text(HELD_OUT, checkpoints[SMALL])[:512]
    exact = hf_models[SMALL].perplexity(token_ids, None, ())
    assert executor_value(before, checkpoints[SMALL], token_ids, 0) > 1.5 * exact


def test_nothing_but_the_scales_differs(calibrated):
    before, after, _ = calibrated[SMALL, CacheDType.NVFP4]
    assert {path.name for path in after.path.iterdir()} == {path.name for path in before.path.iterdir()}
    assert (after.path / "weights.json").read_bytes() == (before.path / "weights.json").read_bytes()
    old, new = (json.loads((network.path / "config.json").read_text()) for network in (before, after))
    assert new == old | {"latent_scales": list(after.latent_scales)}


def test_in_place(checkpoints, calibrated, tmp_path):
    before, after, _ = calibrated[SMALL, CacheDType.NVFP4]
    path = tmp_path / "network"
    shutil.copytree(before.path, path)
    lines: list[str] = []
    options: dict[str, Any] = {"window": WINDOW, "max_tokens": 1000, "num_threads": 1, "on_progress": lines.append}
    calibrate(path, checkpoints[SMALL], CALIBRATION_TEXT, **options)
    for name in ("config.json", "network.onnx", "weights.json"):
        assert (path / name).read_bytes() == (after.path / name).read_bytes()
    assert "ran 1000 of 1000 tokens" in lines
    # Scales that are there have no say in what is chosen.
    calibrate(path, checkpoints[SMALL], CALIBRATION_TEXT, **options)
    assert (path / "network.onnx").read_bytes() == (after.path / "network.onnx").read_bytes()


def refused(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=match):
        calibrate(*args, **options)


def test_refusals_leave_everything_as_it_was(checkpoints, calibrated, tmp_path):
    network = calibrated[1.0, CacheDType.NVFP4][0]
    checkpoint = checkpoints[1.0]
    path = tmp_path / "network"
    shutil.copytree(network.path, path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    refused("no such file", path, checkpoint, tmp_path / "absent.txt")
    short = tmp_path / "short.txt"
    short.write_text("")
    refused("found 1 tokens, expected at least 2", path, checkpoint, short)
    refused("window: found 1,", path, checkpoint, CALIBRATION_TEXT, window=1)
    refused("window: found 1000000000, expected 2 to 1024", path, checkpoint, CALIBRATION_TEXT, window=10**9)
    refused("would replace the network", path, checkpoint, CALIBRATION_TEXT, output=path)
    refused("would replace the network", path, checkpoint, CALIBRATION_TEXT, output=tmp_path, overwrite=True)
    refused("never replaced", path, checkpoint, CALIBRATION_TEXT, output=EXAMPLES, overwrite=True)

    bare = tmp_path / "bare"
    bare.mkdir()
    for file in checkpoint.glob("*.json"):
        shutil.copyfile(file, bare / file.name)
    refused("found no weights", path, bare, CALIBRATION_TEXT)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_latents_that_are_not_finite_are_refused(checkpoints, calibrated, tmp_path):
    broken = tmp_path / "checkpoint"
    shutil.copytree(checkpoints[1.0], broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.self_attn.kv_a_layernorm.weight"][5] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    network = calibrated[1.0, CacheDType.FP8][0]
    options: dict[str, Any] = {"output": tmp_path / "out", "window": WINDOW, "max_tokens": 300}
    refused("not finite in layer 2", network.path, broken, CALIBRATION_TEXT, **options)
    assert not (tmp_path / "out").exists()
