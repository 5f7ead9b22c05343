"""Generation paused while new weights are pushed to inference engines: see `paused_generation`.

async with paused_generation(client):      # `with` where no event loop is running
    await broadcast_weights()
"""

from ._pause import paused_generation

__all__ = ["paused_generation"]
