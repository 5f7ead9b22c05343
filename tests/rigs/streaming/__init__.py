"""What TrainPump is tested with: trainers, buffers, rollouts, simulated and killed runs."""
