"""What TrainStep is tested with: models, layouts, FSDP2, timelines."""
