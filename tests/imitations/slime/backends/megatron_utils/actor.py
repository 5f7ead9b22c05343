"""An imitation of slime's module of this name: it holds train() and save() by name, and its actor loads several
models into one and pushes what is there.

The test rig puts in here, as into the real module: initialize_model_and_optimizer, load_checkpoint
and get_data_iterator.
"""

from .model import save, train

__all__ = ["MegatronTrainRayActor", "save", "train"]

initialize_model_and_optimizer = load_checkpoint = get_data_iterator = None


class WeightUpdater:
    def __init__(self, model):
        self.model = model

    def update_weights(self):
        self._update_bucket_weights_from_distributed(named_params(self.model))


class TensorBackuper:
    def __init__(self, source_getter):
        self._source_getter, self.backups = source_getter, {}

    def get(self, tag):
        return self.backups[tag]

    def backup(self, tag):
        self.backups[tag] = {name: param.detach().clone() for name, param in self._source_getter()}

    def restore(self, tag):
        for name, param in self._source_getter():
            param.data.copy_(self.backups[tag][name])


def named_params(model):
    return [each for chunk in model for each in chunk.named_parameters()]


class MegatronTrainRayActor:
    def init(self, args, role, with_ref=False, with_opd_teacher=False):
        self.args = args
        self.model, *_, loaded_rollout_id = initialize_model_and_optimizer(args, role)
        self.weights_backuper = TensorBackuper(lambda: named_params(self.model))
        self._active_model_tag = "actor"
        self.weights_backuper.backup("actor")
        if with_ref:
            self.load_other_checkpoint("ref", args.ref_load)
        self.weight_updater = WeightUpdater(self.model)
        if self.args.offload_train:
            self._switch_model("actor")
            self.sleep()
        return loaded_rollout_id + 1

    def train_actor(self, rollout_id, rollout_data, external_data=None):
        data_iterator = get_data_iterator(rollout_data)
        parts = self.model, self.optimizer, self.opt_param_scheduler
        sizes = rollout_data["num_microbatches"], rollout_data["global_batch_sizes"]
        train(rollout_id, *parts, data_iterator, *sizes)
        self.weights_backuper.backup("actor")

    def sleep(self):
        pass

    def _switch_model(self, target_tag):
        self.weights_backuper.restore(target_tag)
        self._active_model_tag = target_tag

    def update_weights(self):
        self.weight_updater.update_weights()

    def load_other_checkpoint(self, model_tag, path):
        load_checkpoint(self.model, None, None)
        self.weights_backuper.backup(model_tag)
        self._active_model_tag = model_tag
