import json

import pytest

from trtllm_mla.cli.limits import find_limits
from trtllm_mla.errors import UserError


def test_a_network_has_the_sequence_length_of_its_model(network, checkpoint):
    assert find_limits(network, None).max_seq_len == checkpoint[1].config.max_position_embeddings


def test_a_named_config_replaces_the_defaults(network, tmp_path):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"max_seq_len": 77, "max_batch_size": 3}))
    limits = find_limits(network, path)
    assert (limits.max_seq_len, limits.max_batch_size) == (77, 3)


def test_what_is_no_directory_of_ours_is_named(tmp_path):
    with pytest.raises(UserError, match=r"found no config\.json"):
        find_limits(tmp_path, None)
