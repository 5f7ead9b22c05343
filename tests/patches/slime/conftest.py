"""Every result of these tests says whose code it is about."""

import pytest
from rigs.slime.train import CHECKOUT, FRAMEWORK


@pytest.fixture(autouse=True, params=[FRAMEWORK if CHECKOUT else f"imitation of {FRAMEWORK}"])
def whose_code(request):
    return request.param
