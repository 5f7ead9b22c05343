"""An imitation of NeMo-RL (which is not on PyPI): what megapatch's patches for its Megatron worker meet, written
for the tests.

NEMO_RL_SHAPE says what it is like: "main" has begin_train_step and the like, with the faults that patches are for;
a "release" (the default) has none of these methods, and another is_oob_ratio.
"""

import os

MAIN = os.environ.get("NEMO_RL_SHAPE") == "main"
