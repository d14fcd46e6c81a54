"""Shared code of the engines that hold their own weights: the engine over an `EngineRunner`, HTTP calls to
a server, and the process of a server that this one starts.
"""
