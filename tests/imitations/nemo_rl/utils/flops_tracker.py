"""An imitation of NeMo-RL's module of this name."""

from types import SimpleNamespace


class FLOPTracker:
    def __init__(self, model_name, base_config=None, flops_formula=None):
        self.flops_formula, self.total_flops = flops_formula, 0

    def track_batch(self, sequence_lengths):
        self.total_flops += sum(
            self.flops_formula(SimpleNamespace(gbs=1, enc_seq_len=length)) for length in sequence_lengths
        )

    def reset(self):
        self.total_flops = 0
