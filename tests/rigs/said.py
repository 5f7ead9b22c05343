"""What is logged meanwhile, also in a rank's process, where pytest's caplog is not."""

import contextlib
import logging


@contextlib.contextmanager
def said(logger="", level=logging.NOTSET):
    """Yield a list that gets the messages which reach this logger, from this level on."""
    lines, handler = [], logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)
