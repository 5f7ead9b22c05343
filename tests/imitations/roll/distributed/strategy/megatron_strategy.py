"""An imitation of ROLL's strategy that trains with Megatron: what it sets up, and a step."""

from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from roll.third_party.megatron.scheduler import get_megatron_lr_scheduler


class MegatronTrainStrategy:
    def __init__(self, worker):
        self.worker = worker

    def initialize(self, model_provider):
        args = self.megatron_train_args
        self.model = model_provider(training_args=args, is_trainable=True)
        self.forward_backward_func = get_forward_backward_func()
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=args.overlap_grad_reduce, check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad
        )
        self.models_wrapped = self.model.models = [
            DistributedDataParallel(config, ddp_config, chunk) for chunk in self.model.get_models()
        ]
        optimizer_config = OptimizerConfig(
            optimizer=args.optimizer,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            fp16=args.fp16,
            bf16=args.bf16,
            clip_grad=args.max_grad_norm,
            params_dtype=config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.models_wrapped)
        self.scheduler = get_megatron_lr_scheduler(args, args.max_steps, optimizer=self.optimizer)
        if args.overlap_grad_reduce:
            assert config.no_sync_func is None, "config.no_sync_func must be None"
            config.no_sync_func = self.models_wrapped[0].no_sync

    def train_step(self, batch, loss_func):
        microbatches = batch.chunk(chunks=batch.batch.batch_size[0])
        scale = len(microbatches) * mpu.get_data_parallel_world_size()

        def forward_step(microbatches, model):
            data = next(microbatches)

            def loss_of(output):
                loss, metrics = loss_func(data, output)
                return loss * scale, metrics

            return model(data.batch["input_ids"], None, None), loss_of

        metrics = self.forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in self.model.get_models()],
            model=self.model.get_models(),
            num_microbatches=len(microbatches),
            seq_length=self.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        update_successful, grad_norm, _ = self.optimizer.step()
        if update_successful:
            self.scheduler.step()
        else:
            raise NotImplementedError("megatron optimizer step failed!")
        for model in self.models_wrapped:
            self._count_parameters_without_gradients(model)
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = {name: value for microbatch in metrics for name, value in microbatch.items()}
        return {**found, f"{self.worker_config.name}/grad_norm": grad_norm}

    def _count_parameters_without_gradients(self, model):
        """Keep the first step's count, where some parameter got no gradient, from failing an assertion."""
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            counts = getattr(group, "per_param_grad_ready_counts", {})
            if counts and group.is_first_batch:
                for parameter in group.params:
                    counts.setdefault(parameter, 1)
