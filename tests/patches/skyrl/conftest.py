"""Fixtures that run once for each release."""

import pytest
from rigs.skyrl.releases import RELEASES


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def release(request):
    return request.param
