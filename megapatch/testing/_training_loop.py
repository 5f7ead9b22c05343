"""Megatron's own train(), driven step by step on a tiny GPT."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed

from ..errors import MisuseError
from . import _data
from ._availability import megatron_training_available
from ._model import TinyGPT


@dataclass(frozen=True)
class Fault:
    """An exception to raise in the middle of `MegatronLoop.train`, on the ranks that pass it.

    Args:
        exception: the exception.
        microbatch: index of the microbatch on this rank, from 0 on, counted over the whole call.
        place: "data": when its data is requested; "loss": in the loss function; "backward": when its loss is
            differentiated. With pipeline parallelism only the last stage has a loss.
    """

    exception: BaseException
    microbatch: int = 0
    place: Literal["data", "loss", "backward"] = "loss"


@dataclass
class MegatronLoop:
    """Sets up Megatron's global state for one model, and calls its train() as often as needed.

    This changes neither the exceptions of train() nor the state that an interrupted or finished call leaves
    behind. Another loop's global state in this process is taken down first.

    Args:
        model: built with ``hooks=False``: train() sets the hooks, and refuses a config that has them.
        num_microbatches: of a step, on each data parallel rank.
        micro_batch_size: samples of a microbatch.
        rerun_mode: of Megatron's rerun state machine, which repeats a step whose result looks wrong.
        two_tuple: the loss function returns (mean, metrics) instead of (sum, tokens, metrics).
        masked: about a third of the tokens do not count.
        flags: more of Megatron's command line.
        iteration: steps done; the next call begins there. Only a call that returns changes it.
        checkpointing_context: the context that train() and Megatron's save_checkpoint() keep between checkpoints.

    Attributes:
        args: Megatron's arguments, as get_args() returns them.

    Raises:
        MisuseError: megatron.training is not installed.
    """

    model: TinyGPT
    num_microbatches: int = 2
    micro_batch_size: int = 2
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    two_tuple: bool = False
    masked: bool = False
    flags: Sequence[str] = ()
    iteration: int = 0
    checkpointing_context: dict[str, Any] = field(default_factory=dict)
    args: Any = field(init=False)

    def __post_init__(self) -> None:
        if not megatron_training_available():
            raise MisuseError("this megatron-core comes without megatron.training (wheels have it from 0.17 on)")
        import megatron.training.training  # noqa: F401  (this class drives it)
        from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.global_vars import set_global_variables

        _take_down_global_state()
        # parse_args() prints hundreds of lines.
        with _command_line(self._arguments()), contextlib.redirect_stdout(None), _no_help_texts():
            self.args = parse_args()
            validate_args(self.args)
        # Megatron sets these when it builds the tokenizer and sets up model and optimizer.
        self.args.padded_vocab_size = self.model.vocab
        self.args.num_floating_point_operations_so_far = 0
        set_global_variables(self.args, build_tokenizer=False)
        initialize_rerun_state_machine(mode=RerunMode(self.rerun_mode))

    def train(
        self, steps: int = 2, *, microbatches: Iterable[torch.Tensor] | None = None, fault: Fault | None = None
    ) -> list[float]:
        """Call Megatron's train(). A collective: call it on all ranks.

        Args:
            steps: number of steps.
            microbatches: all data of this rank for the call, as tensors of shape (micro_batch_size, seq + 1),
                instead of the data of the steps from `iteration` on.
            fault: an exception to raise on this rank.

        Returns:
            The mean loss per token of the global batch, by step.

        Raises:
            Exception: any exception of train(), including that of `fault`.
        """
        from megatron.core.rerun_state_machine import RerunDataIterator

        recorder = _ForwardStep(self, fault)
        samples = list(microbatches) if microbatches is not None else self._samples(steps)
        iterators = [RerunDataIterator(recorder.watched(samples)) for _ in self.model.chunks]
        self.args.iteration = self.iteration
        self.args.train_iters = self.iteration + steps
        # Looked up now, on the module: the function that Megatron's pretrain() would call.
        self.iteration, operations = sys.modules["megatron.training.training"].train(
            recorder,
            self.model.chunks,
            self.model.optimizer,
            _ConstantRate(),
            iterators if len(iterators) > 1 else iterators[0],
            None,  # validation data
            None,  # process_non_loss_data_func
            self.model.config,
            self.checkpointing_context,
            None,  # non_loss_data_func
        )
        self.args.num_floating_point_operations_so_far = operations
        return recorder.mean_losses(range(self.iteration - steps, self.iteration))

    def _samples(self, steps: int) -> list[torch.Tensor]:
        return [
            sample
            for step in range(self.iteration, self.iteration + steps)
            for sample in self.model.microbatches(
                step, self.num_microbatches, micro_batch_size=self.micro_batch_size
            )
        ]

    def _arguments(self) -> list[str]:
        from megatron.core import parallel_state

        model, config, ddp = self.model, self.model.config, self.model.ddp_config
        dp = parallel_state.get_data_parallel_world_size()
        values = {
            "num-layers": config.num_layers,
            "hidden-size": config.hidden_size,
            "num-attention-heads": config.num_attention_heads,
            "seq-length": model.seq,
            "max-position-embeddings": model.seq,
            "tensor-model-parallel-size": config.tensor_model_parallel_size,
            "pipeline-model-parallel-size": config.pipeline_model_parallel_size,
            "context-parallel-size": config.context_parallel_size,
            "expert-model-parallel-size": config.expert_model_parallel_size,
            "micro-batch-size": self.micro_batch_size,
            "global-batch-size": self.micro_batch_size * self.num_microbatches * dp,
            "train-iters": 1_000_000,  # each call sets its own
            "lr": model.optimizer.param_groups[0]["lr"],
            "tokenizer-type": "NullTokenizer",
            "vocab-size": model.vocab - 1,
            "position-embedding-type": "rope",
            "transformer-impl": "local",
            "distributed-backend": torch.distributed.get_backend(),
            "eval-iters": 0,
            "log-interval": 1_000_000,
            "rerun-mode": self.rerun_mode,
        }
        if config.virtual_pipeline_model_parallel_size:
            values["num-virtual-stages-per-pipeline-rank"] = config.virtual_pipeline_model_parallel_size
        if config.num_moe_experts:
            values["num-experts"] = config.num_moe_experts
        switches = {
            "bf16": config.bf16,
            "fp16": config.fp16,
            "calculate-per-token-loss": config.calculate_per_token_loss,
            "overlap-grad-reduce": ddp.overlap_grad_reduce,
            "overlap-param-gather": ddp.overlap_param_gather,
            "use-distributed-optimizer": ddp.use_distributed_optimizer,
            "no-align-grad-reduce": not model.align_grad_reduce,
            "no-align-param-gather": not model.align_param_gather,
            "untie-embeddings-and-output-weights": not model.has_tied_embeddings,
            "no-gradient-accumulation-fusion": True,
            "no-masked-softmax-fusion": True,
            "no-rope-fusion": True,
            "no-persist-layer-norm": True,
            "disable-bias-linear": not config.add_bias_linear,
            "use-cpu-initialization": True,
        }
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return flags + [f"--{name}" for name, on in switches.items() if on] + list(self.flags)


class _ForwardStep:
    """The usual forward step function, which also keeps the losses of one call and raises the fault."""

    def __init__(self, loop: MegatronLoop, fault: Fault | None) -> None:
        self._loop = loop
        self._fault = fault
        self._calls = 0  # of the loss function
        self._losses: dict[int, list[torch.Tensor]] = defaultdict(list)  # by iteration: [sum, number of tokens]

    def watched(self, samples: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, sample in enumerate(samples):
            self._raise_at("data", index)
            yield sample

    def __call__(self, iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, _data.LossFunction]:
        output, usual = _data.forward_step(
            iterator, model, two_tuple=self._loop.two_tuple, masked=self._loop.masked
        )

        def loss_function(output: torch.Tensor) -> tuple[Any, ...]:
            index, self._calls = self._calls, self._calls + 1
            self._raise_at("loss", index)
            loss, *rest = usual(output)
            self._losses[self._loop.args.curr_iteration].append(rest[-1]["loss"])
            _validate(loss)
            if self._fault is not None and loss.requires_grad:
                loss.register_hook(lambda gradient: self._raise_at("backward", index))
            return (loss, *rest)

        return output, loss_function

    def mean_losses(self, iterations: Iterable[int]) -> list[float]:
        """Return the mean over tokens and ranks, by iteration. A collective; only the last stage has losses."""
        last = -self._loop.num_microbatches  # if an iteration was repeated, only its last run counts
        zero = torch.zeros(2, device="cuda")
        sums = [sum(self._losses[iteration][last:], start=zero).double() for iteration in iterations]
        if not sums:
            return []
        totals = torch.stack(sums)
        torch.distributed.all_reduce(totals)
        means: list[float] = (totals[:, 0] / totals[:, 1]).tolist()
        return means

    def _raise_at(self, place: str, index: int) -> None:
        if self._fault is not None and (self._fault.place, self._fault.microbatch) == (place, index):
            raise self._fault.exception


def _validate(loss: torch.Tensor) -> None:
    """Hand the loss to the rerun state machine, as the loss function of Megatron's pretrain_gpt.py does."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    get_rerun_state_machine().validate_result(
        result=loss.detach(),
        rejection_func=torch.isnan,
        message="found NaN in the loss",
        tolerance=0.0,
        fatal=True,
    )


class _ConstantRate:
    """A learning rate scheduler that leaves the learning rate alone."""

    def step(self, increment: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _no_help_texts() -> contextlib.AbstractContextManager[object]:
    """Keep Megatron from parsing its own sources for the help of its options: 0.2 s for each command line."""
    # A private name (seen in megatron-core 0.17 to 0.19). Without it, parsing takes longer.
    factory = getattr(sys.modules.get("megatron.training.argument_utils"), "ArgumentGroupFactory", None)
    if not hasattr(factory, "_get_field_docstrings"):
        return contextlib.nullcontext()
    return mock.patch.object(factory, "_get_field_docstrings", return_value={})


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Set sys.argv, which is all that Megatron's parser reads."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _take_down_global_state() -> None:
    """Take down the state of another loop in this process; Megatron refuses to set it up twice."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
