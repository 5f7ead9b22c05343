"""An imitation of NeMo-RL's module of this name."""

import numpy as np


class NamedSharding:
    """Where each worker is in a layout whose axes have names."""

    def __init__(self, layout, names):
        self.layout, self.names = np.array(layout), list(names)

    def get_worker_coords(self, worker_id):
        (found,) = np.argwhere(self.layout == worker_id).tolist()
        return dict(zip(self.names, found, strict=True))

    def get_axis_size(self, name):
        return self.layout.shape[self.names.index(name)]
