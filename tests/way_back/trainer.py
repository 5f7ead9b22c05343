"""A model with its optimizer, schedule and checkpoints on a rank, and what a trainer does with them."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from unittest import mock

import torch
from rigs.megatron.options import Interrupted, attempt
from rigs.train_step.models import infinite_forward_step

from megapatch.testing import Fault, MegatronLoop, mean_loss
from megapatch.testing._data import forward_step
from megapatch.testing._model import _gpt_of
from megapatch.train_step import TrainStep

from . import streams
from .checkpoints import checkpoints_of
from .faults import raises, raising
from .pictures import parts_of, picture, take_logged
from .plan import TRAIN

MEAN = functools.partial(forward_step, two_tuple=True)
COMPLETE = ("weights", "optimizer", "schedule", "streams")
LAST = (900, 901)  # the data of the two steps after a sequence
HOOKS = ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
_files = itertools.count()


class Trainer:
    """A trainer's state of one model, in a layout that is set up."""

    def __init__(self, layout, rank, folder):
        self.layout, self.rank, self.folder = layout, rank, folder
        self.slots, self.pending = [], None
        self.build()

    def build(self):
        self._companion = None
        self.model = self.layout.build()
        self.schedule = self.layout.schedule_of(self.model.optimizer)
        self.checkpoints = checkpoints_of(self)
        self.loop = None
        take_logged()
        streams.seed()  # building a model has drawn, too

    def models(self):
        return [_gpt_of(chunk) for chunk in self.model.chunks]

    def path(self):
        """Return a path that is new, and the same on all ranks."""
        return f"{self.folder}/{next(_files)}"

    # ------------------------------------------------------------------------ steps
    def step(self, data, kind="step"):
        """Do a step of any kind; return what it shows, by (kind, name)."""
        self.train_mode()
        if kind == "split step":
            self.split(data)
            return {}
        if kind == TRAIN:
            self.train(data)
            self.schedule.step(increment=1)
            return {}
        self.model.zero_grad()
        metrics = self.forward_backward(data, infinite_forward_step if kind == "step that overflows" else MEAN)
        succeeded, norm, _ = self.model.optimizer.step()
        if succeeded:
            self.schedule.step(increment=1)
        return {
            ("loss", str(data)): mean_loss(metrics),
            ("gradient norm", str(data)): float(norm if norm is not None else -1.0),
            ("succeeded", str(data)): float(succeeded),
            **{(kind, f"{name} {data}"): value for (kind, name), value in take_logged().items()},
        }

    def split(self, data, fault=None, last=False):
        with self.new_step() as step:
            one, other = self.calls(data)
            step.forward_backward(**one)
            step.forward_backward(**other, last=last)
            if fault == "dropped":
                if last:
                    assert attempt(step.set_aside)[0] == "MisuseError"
                step.abort()
                return
            step.finish(increment=1)
        take_logged()  # of all calls: a trainer logs it once a step

    def new_step(self):
        return TrainStep(self.model.chunks, self.model.optimizer, self.schedule)

    def calls(self, data):
        """Return the arguments of the two calls of a split step."""
        size = self.layout.parallel.get("pp", 1)  # the fewest that virtual stages take
        batches = self.model.microbatches(data, 2 * size)
        return [self.arguments(call, MEAN) for call in (batches[:size], batches[size:])]

    def train(self, data, fault=None):
        """Call Megatron's own train() for a step. It wants to set the hooks itself."""
        config = self.model.config
        for name in HOOKS:
            setattr(config, name, None)
        try:
            self.loop = self.loop or MegatronLoop(self.model, two_tuple=True)
            self.loop.train(1, microbatches=self.model.microbatches(data, 2), fault=fault)
        finally:
            config.timers = None
            self.model.set_hooks()
            if self.model.ddp_config.overlap_param_gather:  # train() leaves them off
                for chunk in self.model.chunks:
                    chunk.enable_forward_pre_hook()

    def train_and_raise(self, data):
        try:
            self.train(data, Fault(Interrupted(), microbatch=1, place="backward"))
        except Interrupted:
            return
        raise AssertionError("nothing was raised")

    def arguments(self, batches, function):
        iterators = [iter(batches) for _ in self.model.chunks]
        return {
            "forward_step_func": function,
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "num_microbatches": len(batches),
            "seq_length": self.model.seq,
            "micro_batch_size": 2,
        }

    def forward_backward(self, data, function=MEAN, forward_only=False):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            model=self.model.chunks,
            forward_only=forward_only,
            **self.arguments(self.model.microbatches(data, 2), function),
        )

    def train_mode(self):
        """As Megatron's train() does before its first step, and after an evaluation."""
        for chunk in self.model.chunks:
            chunk.train()

    # ------------------------------------------------------------------------ what leaves nothing
    def abort(self, data, way, place):
        self.train_mode()
        try:
            if way == "abort":
                with raising(self.model, place):
                    self.model.zero_grad()
                    self.forward_backward(data)
                    self.model.optimizer.step()
            else:
                with raising(self.model, place):
                    self.split(data)
        except Interrupted:
            return
        raise AssertionError(f"nothing was raised {place}")

    def reduce_and_raise(self, data):
        """Step the optimizer itself, after a TrainStep without a finish(), and raise there."""
        self.train_mode()
        with contextlib.suppress(Interrupted), raising(self.model, "in the optimizer"), self.new_step() as step:
            for call in self.calls(data):
                step.forward_backward(**call)
            step.reduce()
            self.model.optimizer.step()
            raise AssertionError("nothing was raised in the optimizer")

    def set_aside(self, data):
        """Set a step aside after a call, and drop it."""
        self.train_mode()
        step = self.new_step()
        step.begin()
        step.forward_backward(**self.calls(data)[0])
        step.set_aside()
        step.abort()

    def refuse_load(self, data):
        """Load the optimizer and the schedule in an open step."""
        self.train_mode()
        self.model.gather_parameters()
        with contextlib.suppress(Interrupted), self.new_step() as step:
            step.forward_backward(**self.calls(data)[0])
            for part in ("optimizer", "schedule"):
                assert not self.slots or attempt(self.load_part, self.slots[-1], part)[0] == "MisuseError"
            raise Interrupted

    def load_part(self, slot, part):
        getattr(self.checkpoints, f"load_{part}")(self.checkpoints.read(slot))

    def evaluate(self, data, raise_in=None):
        """As Megatron's evaluate(), which leaves the model in evaluation mode when it raises."""
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            if raise_in is None:
                self.forward_backward(data, forward_only=True)
                self.train_mode()
                return
            try:
                with raising(self.model, raise_in):
                    self.forward_backward(data, forward_only=True)
            except Interrupted:
                return
        raise AssertionError("nothing was raised")

    def log_probabilities(self, data, mode=torch.no_grad):
        """With dropout, as the slips of some trainers have it: it draws random numbers."""
        self.train_mode()
        with mode():
            self.forward_backward(data, forward_only=True)

    def generate(self, data):
        """Read three tokens of each sequence and generate two, keeping keys and values. The mode stays eval()."""
        from megatron.core.inference.contexts import StaticInferenceContext

        (chunk,) = self.model.chunks
        context, tokens = StaticInferenceContext(2, 5), torch.tensor([[1, 2, 3], [4, 5, 6]])
        chunk.eval()
        with torch.inference_mode():
            for start in (0, 3, 4):
                count = tokens.shape[1]
                later = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1) if start == 0 else None
                places = torch.arange(start, start + count).expand(2, -1)
                logits = chunk(tokens, places, later, inference_context=context, runtime_gather_output=True)
                context.sequence_len_offset += count
                if hasattr(context, "enable_decode_mode"):
                    context.enable_decode_mode()
                tokens = logits[:, -1:].argmax(-1) % self.model.vocab

    def swap(self, data):
        """Compute log probabilities of a reference: its weights come into the model, and go again."""
        self.model.gather_parameters()
        models = self.models()
        mine = [{name: value.clone() for name, value in weights_of(gpt).items()} for gpt in models]
        for gpt, weights in zip(models, mine, strict=True):
            gpt.load_state_dict({name: value * 0.5 for name, value in weights.items()}, strict=False)
        self.log_probabilities(data)
        for gpt, weights in zip(models, mine, strict=True):
            gpt.load_state_dict(weights, strict=False)

    def offload(self):
        """Move the optimizer's state and the gradients away and back, as far as this Megatron can."""
        optimizer = self.model.optimizer
        if hasattr(optimizer, "offload_to_cpu"):
            optimizer.offload_to_cpu()
            optimizer.restore_from_cpu()
        for chunk in self.model.chunks:
            if hasattr(chunk, "offload_grad_buffers"):
                chunk.offload_grad_buffers()
                chunk.restore_grad_buffers()

    def another_model(self, data):
        """Train another model in the same layout for a step, such as a critic, and let it go."""
        other = self.layout.build()
        other.train_step(data, two_tuple=True)
        take_logged()

    def companion(self):
        """Return a trainer of a model of another size, with its own optimizer, that is in the process as well."""
        if self._companion is None:
            before = streams.take()
            self._companion = Trainer(self.layout.of_another_size(), self.rank, self.folder)
            streams.put(before)
        return self._companion

    def let_companion_go(self):
        self._companion = None
        gc.collect()

    # ------------------------------------------------------------------------ loads
    def load(self, slot, parts=COMPLETE):
        weights_only = tuple(parts) == ("weights",)
        if not weights_only:
            self.make_loadable()
        self.model.gather_parameters()
        read = self.checkpoints.read(slot, weights_only)
        for part in parts:
            getattr(self.checkpoints, f"load_{part}")(read)

    def load_that_raises(self, slot):
        """Raise when the weights are loaded, and the optimizer is not."""
        with mock.patch.object(self.checkpoints, "load_optimizer", raises):
            assert attempt(self.load, slot)[0] == Interrupted.__name__

    def make_loadable(self):
        """Give a fresh optimizer state. Without Transformer Engine Megatron takes no other apart."""
        if self.layout.is_sharded and not any(part.optimizer.state for part in parts_of(self.model.optimizer)):
            self.model.train_step(999, two_tuple=True)
            take_logged()

    # ------------------------------------------------------------------------ what is compared
    def set_rate(self, steps):
        """Set the optimizer's rate to that of the schedule after this many steps."""
        self.schedule.num_steps = steps
        self.schedule.step(increment=0)

    def last_steps(self):
        """Do two more steps; return what they show and leave, by (kind, name)."""
        shown = {}
        for data in LAST:
            shown.update(self.step(data))
        return {**shown, **picture(self)}


def weights_of(gpt):
    """Return the tensors of a model's state."""
    return {name: value for name, value in gpt.state_dict().items() if torch.is_tensor(value)}
