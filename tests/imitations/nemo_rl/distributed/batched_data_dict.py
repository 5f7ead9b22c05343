"""An imitation of NeMo-RL's module of this name. A batch is one global batch; all samples are of one length."""

import torch


class BatchedDataDict(dict):
    """Tensors by name, whose first dimension is that of the samples."""

    micro_batch_indices = micro_batch_lengths = elem_counts_per_gb = None

    @classmethod
    def from_batches(cls, batches):
        return cls({name: torch.cat([one[name] for one in batches]) for name in batches[0]})

    @property
    def size(self):
        return len(next(iter(self.values())))

    def slice(self, start, end):
        return BatchedDataDict({name: values[start:end] for name, values in self.items()})

    def select_indices(self, indices):
        return BatchedDataDict({name: values[list(indices)] for name, values in self.items()})

    def get_batch(self, batch_idx, batch_size=None):
        found = self.slice(0, self.elem_counts_per_gb[batch_idx] if self.elem_counts_per_gb else batch_size)
        found.micro_batch_indices, found.micro_batch_lengths = self.micro_batch_indices, self.micro_batch_lengths
        return found

    def shard_by_batch_size(self, shards, batch_size=None, dynamic_batching_args=None, sequence_packing_args=None):
        """As many parts; with either of the arguments in bins, and what order samples are in.

        With dynamic batching the bins of all parts are alike; else a part has its own.
        """
        size = self.size // shards
        parts = [self.slice(start, start + size) for start in range(0, self.size, size)]
        settings = dynamic_batching_args or sequence_packing_args
        if settings is None:
            return parts
        for alike in [parts] if dynamic_batching_args else [[part] for part in parts]:
            lengths = torch.stack([part[settings["input_lengths_key"]] for part in alike]).amax(0).tolist()
            bins = _bins(lengths, settings["max_tokens_per_microbatch"])
            for part in alike:
                part.micro_batch_indices = [bins]
                part.micro_batch_lengths = [[sum(lengths[start:end]) for start, end in bins]]
                part.elem_counts_per_gb = [size]
        return parts, list(range(self.size))


def _bins(lengths, most):
    found, tokens = [], most
    for index, length in enumerate(lengths):
        if tokens + length > most:
            found.append([index, index])
            tokens = 0
        found[-1][1] += 1
        tokens += length
    return found
