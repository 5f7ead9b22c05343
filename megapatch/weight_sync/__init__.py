"""Around a weight sync: generation paused (`paused_generation`), parameters whole (`gathered_parameters`).

async with paused_generation(client):      # `with` where no event loop is running
    with gathered_parameters(model):
        await broadcast_weights()
"""

from ._gathered import gathered_parameters
from ._pause import paused_generation

__all__ = ["gathered_parameters", "paused_generation"]
