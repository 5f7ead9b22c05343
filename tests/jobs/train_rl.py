"""Megatron's GRPO loop, train_rl.py of a checkout, with stand-ins for its inference engine and environments.

train_rl.py SCRIPT [flags]: each time the loop resumes the engine, it prints its model's logits for fixed tokens,
and of a later pipeline stage those for fixed hidden states. Rollouts are drawn by iteration. Attention on CPU
takes no packed sequences, and NullTokenizer has no padding.
"""

import functools
import os
import random
import runpy
import sys

if os.environ.get("JOB_IMPORT"):
    import megapatch  # noqa: F401 (as docs/megatron.md has it)
if __name__ != "__mp_main__":  # as in pretrain_gpt.py
    import torch
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.core.utils import unwrap_model
    from megatron.rl import rl_utils
    from megatron.rl.agent.api import RolloutGroup, TokenRollout
    from megatron.training import get_tokenizer
    from rigs.jobs.on_cpu import leave_a_note

PROMPT = 6


class Engine:
    def __init__(self, model):
        self.model = model

    def set_generation_epoch(self, epoch):
        self.epoch = epoch

    async def resume(self):
        tokens = torch.arange(64).reshape(2, 32) * 7 % 97 + 1
        stage = unwrap_model(self.model)
        if not stage.pre_process:
            stage.set_input_tensor(torch.ones(32, 2, stage.config.hidden_size, dtype=stage.config.params_dtype))
        with torch.no_grad():
            logits = self.model(tokens, torch.arange(32).expand(2, 32), None, runtime_gather_output=True)
        print(f"JOB epoch {self.epoch}: logits {logits.double().abs().sum().item():.6f}", flush=True)

    async def suspend(self):
        pass

    kill = suspend


@functools.cache
def engine_of(model):
    return Engine(model)


async def rollouts(args, inference_interface, n_prompts, samples_per_group):
    draw = random.Random(args.curr_iteration)
    for prompt in range(n_prompts):
        group = [rollout(draw, args.curr_iteration, prompt) for _ in range(samples_per_group)]
        yield RolloutGroup(rollouts=group, batch_id=args.curr_iteration, index_in_batch=prompt)


def rollout(draw, iteration, prompt):
    length = draw.randint(2 * PROMPT, 30)
    epochs = [[(iteration, length)]]
    return TokenRollout(
        trajectory=[[draw.randint(1, 100) for _ in range(length - 1)] + [get_tokenizer().eod]],
        reward=draw.random(),
        generation_mask=[[place >= PROMPT for place in range(length)]],
        logprobs=[[-4.0] * (length - PROMPT)],
        env_id="drawn",
        problem_id=f"{iteration}-{prompt}",
        policy_epoch=epochs,
        kv_cache_epoch=epochs,
        num_evictions=[0],
    )


def without_packing(get_logprobs):
    @functools.wraps(get_logprobs)
    def unpacked(*args, **kwargs):
        return get_logprobs(*args, **{**kwargs, "packed_seq_params": None})

    return unpacked


def stand_in():
    torch.Tensor.cpu = lambda self, *args, **kwargs: self.clone()  # what it is on a GPU, and rl_utils relies on
    rl_utils.get_inference_interface = lambda args, loop, model: engine_of(model[0])
    rl_utils.get_rollout_generator = rollouts
    rl_utils.evaluate_and_print_results_rl = lambda *args, **kwargs: None
    rl_utils.get_logprobs = without_packing(rl_utils.get_logprobs)
    rl_utils.PackedSeqParams = lambda **kwargs: None
    NullTokenizer.bos_id = None
    NullTokenizer.pad = NullTokenizer.pad_id = 0
    exit_at_once = os._exit

    def patched_exit(code):
        leave_a_note()
        exit_at_once(code)

    os._exit = patched_exit


if __name__ == "__main__":
    stand_in()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
