"""All but the metrics needs torch."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_[!m]*.py"]
