"""False alarms of the audit in programs of the grid, which it is to learn. One that is gone fails its test."""

from __future__ import annotations

from .layouts import LAYOUTS

LOADED_ON_PURPOSE = (
    "the optimizer alone is loaded",
    "quantized to 3 levels",
    "quantized to 4 bits",
    "quantized to 8 bits",
    "another policy evaluated between backward and step",
    "the policy of a checkpoint evaluated between backward and step",
    "another policy evaluated between backward and step before a gather",
    "a new model loads trained weights from memory",
)
RULES = {
    **dict.fromkeys(LOADED_ON_PURPOSE, ("main-params-agree",)),
    "local sgd averages weights every two steps": ("ranks-agree", "reduced-once"),
    "the first rank loads and broadcasts": ("gathered-when-read",),
}


def false_alarms(program, layout):
    """Return the rules that the audit reports of this program in this layout."""
    rules = set(RULES.get(program, ()))
    if not LAYOUTS[layout].has_main_parameters:
        rules -= {"main-params-agree"}
    if not LAYOUTS[layout].options.get("overlap_param_gather"):
        rules -= {"gathered-when-read"}
    return rules
