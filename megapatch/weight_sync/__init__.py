"""Around a weight sync: generation paused (`paused_generation`), parameters whole (`gathered_parameters`).

`lent_weights` is for weights that come in the other direction, and do not stay.

async with paused_generation(client):      # `with` where no event loop is running
    with gathered_parameters(model):
        await broadcast_weights()
"""

from .._mcore.main_params import lent_weights
from ._gathered import gathered_parameters
from ._pause import paused_generation

__all__ = ["gathered_parameters", "lent_weights", "paused_generation"]
