from __future__ import annotations

import pytest

from tests.validation.cases import Case, make_case


@pytest.fixture(scope="session")
def yarn_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """DeepSeek-V3 in small, with YaRN: its positions beyond 64 and its softmax scale are not those of plain RoPE."""
    return make_case(tmp_path_factory.mktemp("yarn"), rope="yarn", seed=11)


@pytest.fixture(scope="session")
def passes_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same with three passes of the context group."""
    return make_case(tmp_path_factory.mktemp("passes"), rope="yarn", seed=11, context_passes=3)
