"""What is asked of each release."""

import pytest
from skyrl_rig import RELEASES


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def release(request):
    return request.param
