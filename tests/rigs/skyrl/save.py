"""SkyRL's own save_checkpoint(), up to what it gives to Megatron to write."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from megapatch.patches.skyrl.pipeline_seed import MODULES


class Saves:
    """SkyRL's MegatronStrategy, with our own state to write, and our own place."""

    def __init__(self, release):
        self.module = release.module_of(MODULES)
        self.strategy = object.__new__(self.module.MegatronStrategy)
        self.strategy.megatron_config = SimpleNamespace(
            async_dist_ckpt_save=False, async_dist_ckpt_strategy="mcore"
        )
        self.strategy.hf_config, self.strategy.is_lora = None, False
        self.strategy.get_rng_state = dict
        self.strategy.save_hf_configs = self.strategy.print = lambda *args, **kwargs: None
        self.strategy.is_rank_0 = lambda: False

    def __call__(self, model):
        """Save the model, and return what its shards held when Megatron was to write them."""
        found = {}

        def save(sharded_state_dict, *ignored, **also_ignored):
            state = sharded_state_dict["model"]
            found.update((name, part.data.clone()) for name, part in state.items() if _is_tensor(part))

        replaced = (
            "AsyncCallsQueue",
            "FullyParallelSaveStrategyWrapper",
            "_async_calls",
            "ckpt_base",  # the queue in it has moved in Megatron 0.17
            "get_default_save_sharded_strategy",
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(self.module.dist_checkpointing, "save", save))
            stack.enter_context(mock.patch.object(self.module, "io", mock.MagicMock()))
            for name in replaced:
                stack.enter_context(mock.patch.object(self.module, name, mock.Mock(), create=True))
            self.strategy.save_checkpoint(SimpleNamespace(actor_module=model.chunks), "nowhere", 0)
        assert found
        return found


def _is_tensor(part):
    return isinstance(getattr(part, "data", None), torch.Tensor)
