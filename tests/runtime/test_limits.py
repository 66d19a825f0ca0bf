import json
from pathlib import Path

import pytest

from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.runtime.limits import find_limits, pool_pages

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny-mla"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("limits") / "network"
    convert(CHECKPOINT, path, plugin=MlaPluginConfig(page_size=32))
    return NetworkDirectory.load(path)


class TestFindLimits:
    def test_a_network_has_the_sequence_length_of_its_model(self, network):
        positions = json.loads((CHECKPOINT / "config.json").read_text())["max_position_embeddings"]
        assert find_limits(network.path, None).max_seq_len == positions

    def test_a_named_config_replaces_the_defaults(self, network, tmp_path):
        path = tmp_path / "build.json"
        path.write_text(json.dumps({"max_seq_len": 77, "max_batch_size": 3}))
        limits = find_limits(network.path, path)
        assert (limits.max_seq_len, limits.max_batch_size) == (77, 3)

    def test_what_is_no_directory_of_ours_is_named(self, tmp_path):
        with pytest.raises(UserError, match=r"found no config\.json"):
            find_limits(tmp_path, None)


class TestPoolPages:
    LIMITS = BuildConfig(max_batch_size=3, max_seq_len=70)

    @pytest.mark.parametrize(("cache_tokens", "pages"), [(1, 1), (32, 1), (33, 2), (10**9, 9), (None, 9)])
    def test_tokens_become_pages_and_no_more_than_the_limits_can_fill(self, network, cache_tokens, pages):
        assert pool_pages(network, self.LIMITS, cache_tokens) == pages

    def test_left_out_a_quarter_of_the_memory_is_the_most(self, network, monkeypatch):
        row_bytes = (48 + 16) * 2
        memory = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4 * 5 * (2 * 4 * 32 * row_bytes) // 4096}
        monkeypatch.setattr("os.sysconf", memory.__getitem__)
        assert pool_pages(network, BuildConfig(max_batch_size=100, max_seq_len=256), None) == 5

    def test_no_tokens_are_refused(self, network):
        with pytest.raises(UserError, match="cache_tokens: found 0, expected at least 1"):
            pool_pages(network, self.LIMITS, 0)
