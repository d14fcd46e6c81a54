"""Shared code of the engines that hold their own weights: the engine over a `Runner`, HTTP calls to a server,
and the process of a server that this one starts.
"""
