"""Weights pushed to inference engines, and what has to be right around it.

async with paused_generation(client):      # `with` where no event loop is running
    await broadcast_weights()
"""

from ._pause import paused_generation

__all__ = ["paused_generation"]
