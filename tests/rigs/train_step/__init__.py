"""Tools for tests of TrainStep: models, layouts, timelines."""
