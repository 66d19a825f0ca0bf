"""Kernels on disk and how they get there."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from triton.backends.nvidia.compiler import CUDABackend

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine import kernel_compiler
from trtllm_mla.engine.kernel_compiler import compile_kernels, default_cache_dir
from trtllm_mla.engine.kernel_store import KernelStore
from trtllm_mla.errors import UserError
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.targets import Target, get_target

DIMS = {"heads": 5, "kv_lora_rank": 128, "rope_dim": 64, "nope_dim": 48, "v_dim": 40, "width": 192, "page_size": 64}
DIMS |= {"experts": 6, "top_k": 2, "hidden_size": 72, "intermediate_size": 40, "gate_up_size": 80}
DIMS |= {"out_features": 300, "in_features": 260, "scale_rows": 3, "scale_columns": 3}
ATTRIBUTES = {"kv_lora_rank": 128, "rope_dim": 64, "rope_interleave": 1, "softmax_scale": 0.125, "latent_scale": 1.0}
ATTRIBUTES |= {"first_expert": 0}
SM_89 = get_target("sm_89")


def variants(op: str, target: Target = SM_89) -> tuple[KernelVariant, ...]:
    problem = Problem(DIMS, ATTRIBUTES, DType.BFLOAT16, CacheDType.BF16, target, 16, 2)
    return OPS[op].variants(problem)


GATHER = variants("GatherLatent")[0]


@pytest.fixture
def store(tmp_path: Path, cache_dir: Path) -> KernelStore:
    directory = tmp_path / "kernels"
    directory.mkdir()
    return compile_kernels([(GATHER, SM_89), (GATHER, get_target("sm_120"))], directory, cache_dir=cache_dir)


class TestCompileKernels:
    def test_writes_cubins_and_a_manifest(self, store: KernelStore, tmp_path: Path) -> None:
        directory = tmp_path / "kernels"
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        assert files == ["manifest.json", f"sm_120/{GATHER.key}.cubin", f"sm_89/{GATHER.key}.cubin"]
        manifest = json.loads((directory / "manifest.json").read_text())
        assert re.fullmatch(r"3\.\d+\.\d+", manifest["triton_version"])
        kernel = manifest["kernels"][0]
        assert kernel["entry"] == "gather_latent"
        assert kernel["variant"]["constants"] == [list(item) for item in GATHER.constants]

    def test_survives_the_way_through_the_files(self, store: KernelStore, tmp_path: Path) -> None:
        loaded = KernelStore.load(tmp_path / "kernels")
        assert loaded.cubins == store.cubins
        assert loaded.triton_version == store.triton_version
        assert loaded.targets == ("sm_89", "sm_120")
        assert loaded.for_target(SM_89)[GATHER.key].read().startswith(b"\x7fELF")

    def test_targets_differ(self, store: KernelStore) -> None:
        codes = {cubin.read() for cubin in store.cubins}
        assert len(codes) == 2

    def test_equal_jobs_are_compiled_once(self, tmp_path: Path, cache_dir: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        compile_kernels(
            [(GATHER, SM_89)] * 3, tmp_path, cache_dir=cache_dir, progress=lambda *event: seen.append(event)
        )
        assert seen == [("gather_latent for sm_89", 0, 1)]

    @pytest.mark.parametrize("op", sorted(OPS))
    def test_every_kernel_has_the_parameters_that_the_launcher_passes(
        self, op: str, tmp_path: Path, cache_dir: Path
    ) -> None:
        """The signature's, and two pointers to scratch memory that is not used."""
        with kernel_compiler.triton_cache(cache_dir):
            for variant in variants(op):
                ptx = kernel_compiler.compile_variant(variant, SM_89).asm["ptx"]
                entry = re.search(rf"\.entry {variant.kernel}\((.*?)\)", ptx, re.S)
                assert entry is not None
                found = re.findall(r"\.param \.(\w+)", entry[1])
                kinds = {"i32": "u32", "fp32": "f32"}
                expected = [kinds.get(kind, "u64") for _, kind in variant.signature]
                assert found == [*expected, "u64", "u64"]

    def test_pointers_count_as_aligned(self, cache_dir: Path) -> None:
        with kernel_compiler.triton_cache(cache_dir):
            ptx = kernel_compiler.compile_variant(GATHER, SM_89).asm["ptx"]
        assert re.search(r"ld\.global\S*\.v4", ptx)

    def test_too_much_shared_memory_is_refused(self, tmp_path: Path, cache_dir: Path) -> None:
        (attend, *_) = variants("LatentAttention")
        small = dataclasses.replace(SM_89, shared_memory_bytes=1024)
        with pytest.raises(
            UserError, match=r"LatentAttention: .*takes \d+ bytes .* sm_89 .* has 1024 bytes \(1 KiB\)"
        ):
            compile_kernels([(attend, small)], tmp_path, cache_dir=cache_dir)


class TestCache:
    def test_a_second_build_compiles_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("first", "second", "third"):
            (tmp_path / name).mkdir()
        cache = tmp_path / "cache"
        first = compile_kernels([(GATHER, SM_89)], tmp_path / "first", cache_dir=cache)

        def refuse(*args: Any) -> bytes:
            raise AssertionError("compiled")

        monkeypatch.setattr(CUDABackend, "make_cubin", refuse)
        second = compile_kernels([(GATHER, SM_89)], tmp_path / "second", cache_dir=cache)
        assert second.cubins[0].read() == first.cubins[0].read()
        other = dataclasses.replace(GATHER, num_warps=1)
        with pytest.raises(AssertionError, match="compiled"):
            compile_kernels([(other, SM_89)], tmp_path / "third", cache_dir=cache)

    def test_lies_in_the_xdg_cache_directory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TRTLLM_MLA_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert default_cache_dir() == tmp_path / "xdg" / "trtllm-mla"
        monkeypatch.setenv("TRTLLM_MLA_CACHE_DIR", str(tmp_path / "named"))
        assert default_cache_dir() == tmp_path / "named"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("TRTLLM_MLA_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_cache_dir() == tmp_path / ".cache" / "trtllm-mla"

    def test_a_place_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"file/cache: compiled kernels cannot be kept.*TRTLLM_MLA_CACHE_DIR"):
            compile_kernels([(GATHER, SM_89)], tmp_path, cache_dir=tmp_path / "file" / "cache")


class TestKernelStore:
    def test_a_changed_kernel_is_refused(self, store: KernelStore, tmp_path: Path) -> None:
        path = store.cubins[1].path
        code = bytearray(path.read_bytes())
        code[len(code) // 2] ^= 1
        path.write_bytes(code)
        with pytest.raises(UserError, match=r"sm_120/gather_latent-\w+\.cubin: found .* SHA-256 digest .*changed"):
            KernelStore.load(tmp_path / "kernels")

    def test_a_missing_kernel_is_refused(self, store: KernelStore, tmp_path: Path) -> None:
        store.cubins[0].path.unlink()
        with pytest.raises(UserError, match=r"sm_89/gather_latent-\w+\.cubin: no such file; .*incomplete"):
            KernelStore.load(tmp_path / "kernels")

    def test_a_kernel_changed_after_loading_is_refused_when_read(self, store: KernelStore) -> None:
        store.cubins[0].path.write_bytes(b"\x7fELF")
        with pytest.raises(UserError, match="SHA-256"):
            store.cubins[0].read()

    def test_no_kernels_for_the_gpu(self, store: KernelStore) -> None:
        with pytest.raises(UserError, match=r"kernels for sm_89, sm_120; found .* sm_90.*--targets sm_90"):
            store.for_target(get_target("sm_90"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"target": "../../etc"}, "target"),
            ({"target": "sm_75"}, "target"),
            ({"entry": "a b"}, "entry"),
            ({"sha256": "0"}, "sha256"),
            ({"shared_bytes": -1}, "shared_bytes"),
            ({"path": "/etc/passwd"}, "path"),
            ({"variant": {"kernel": "../x"}}, "variant.kernel"),
            ({"variant": {"signature": [["q", "*u8"]]}}, "variant.signature"),
            ({"variant": {"num_warps": 64}}, "variant.num_warps"),
        ],
    )
    def test_a_malformed_manifest_is_refused(
        self, store: KernelStore, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        path = tmp_path / "kernels" / "manifest.json"
        manifest = json.loads(path.read_text())
        variant = change.pop("variant", {})
        manifest["kernels"][0].update(change)
        manifest["kernels"][0]["variant"].update(variant)
        path.write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=rf"manifest\.json: kernels\.0\.{re.escape(message)}"):
            KernelStore.load(tmp_path / "kernels")

    def test_a_changed_variant_no_longer_finds_its_cubin(self, store: KernelStore, tmp_path: Path) -> None:
        path = tmp_path / "kernels" / "manifest.json"
        path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))
        with pytest.raises(UserError, match="no such file"):
            KernelStore.load(tmp_path / "kernels")
