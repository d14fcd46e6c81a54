"""Shared code of the engines with weights of their own: the engine over a `Runner`, HTTP calls to a server,
and the process of a server that this one starts.
"""
