"""Tools for tests of TrainStep: models, layouts, FSDP2, timelines."""
