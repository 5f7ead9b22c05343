"""Stand-ins and tools for tests of TrainPump: trainers, buffers, rollouts, simulated and killed runs."""
