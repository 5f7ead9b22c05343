"""A name of Megatron's that a patch looks at, and that has another name, is never taken for "not needed"."""

import pytest
from rigs.megatron.options import UNPATCHED
from rigs.renames import assert_renames_are_seen


@pytest.mark.every_patch("megatron")
@pytest.mark.nightly
def test_a_renamed_name_is_not_taken_for_a_repair():
    assert_renames_are_seen("megatron", at_least=1200, env=UNPATCHED)
