"""Properties that the numbers of any trainer should have, each from public reports of numbers that were
silently wrong.

    adapter (ours, TRL, verl, a file of your own) ──run──► held, failed with the input, or not offered

    adapter         the functions that a trainer may offer, with shapes
    checking        properties, how one is checked, what came of it
    advantages, losses, distributions, runs      the properties
    adapters/       trainers by name; each is imported where it is asked for

Nothing here but `adapters/ours.py` imports another part of the package, or more than torch.
"""
