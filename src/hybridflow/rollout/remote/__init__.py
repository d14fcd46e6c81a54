"""What engines with weights of their own share: the engine over a `Runner`, HTTP to a server, the process of
one that we start.
"""
