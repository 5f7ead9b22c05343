"""The end of each WARNING and ERROR that megapatch logs: the address of its entry in docs/troubleshooting.md."""

_PAGE = "https://github.com/megapatch/megapatch/blob/main/docs/troubleshooting.md"


def see(entry: str) -> str:
    """Return the end of a message: where its entry is.

    Args:
        entry: the anchor of the entry. It has no percent sign, so the end of a format can have it.
    """
    return f" (see {_PAGE}#{entry})"
