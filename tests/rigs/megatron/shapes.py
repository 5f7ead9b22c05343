"""Models for tests of loads: several chunks, optimizers, tied embeddings and learning rates, at 2 ranks.

A patch that looks at the first of each only is right for a dense GPT.
"""

SHAPES = {  # options of init_parallel() and of tiny_gpt()
    "dense": ({}, {}),
    "experts, tied": ({"ep": 2}, {"experts": 4, "tied_embeddings": True}),
    "stages, tied": ({"pp": 2}, {"tied_embeddings": True}),
    "two chunks": ({"pp": 2, "vpp": 2}, {"layers": 4, "tied_embeddings": True}),
}


def shaped(name, **options):
    """Return the layout of a shape, and its options with more of them."""
    layout, its_own = SHAPES[name]
    return layout, {**its_own, **options}


def set_two_rates(optimizer, rate):
    """Give groups without weight decay twice this learning rate, whatever their schedule has."""
    groups = [group for group in optimizer.param_groups if not group["wd_mult"]]
    assert 0 < len(groups) < len(optimizer.param_groups)
    for group in groups:
        group |= {"max_lr": 2 * rate, "min_lr": 2 * rate / 10}
