"""SkyRL's worker, dispatch, engines, weight syncs and checkpoints."""
