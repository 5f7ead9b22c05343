"""Log messages of this process, for tests in ranks too, which have no caplog."""

from __future__ import annotations

import logging


class Log(logging.Handler):
    """Keeps the messages that reach a logger, from a level on; as a context manager, only until its end."""

    def __init__(self, logger="megapatch", level=logging.NOTSET):
        super().__init__(level)
        self.texts = []
        self.logger = logging.getLogger(logger)
        self.logger.addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.logger.removeHandler(self)
