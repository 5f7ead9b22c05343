"""An imitation of slime (which is not on PyPI): what megapatch's patches for it meet, written for the tests."""
