"""What slime's patches look at on slime's modules."""

import pytest
from rigs.megatron.options import UNPATCHED
from rigs.renames import assert_renames_are_seen
from rigs.slime.train import find_slime


@pytest.mark.every_patch("slime")
def test_a_renamed_name_is_not_taken_for_a_repair():
    assert_renames_are_seen("slime", at_least=20, setup=find_slime, env=UNPATCHED)
