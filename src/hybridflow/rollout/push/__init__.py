"""Pushes of weights to an engine that has its own, in another process or in this one: bucket by bucket, each
tensor with its checksum.
"""
