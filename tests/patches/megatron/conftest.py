"""Fixtures of tests of checkpoints."""

import pytest
from rigs.megatron.save import minor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if minor() == 12:
        pytest.skip("the writer of megatron-core 0.12 does not work with this torch")
    return tmp_path_factory.mktemp("checkpoints")
