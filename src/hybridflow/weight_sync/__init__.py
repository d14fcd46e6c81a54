"""Weights from the ranks that train to the ranks that generate: each rank gets the parts that it lacks, and
checksums prove that they arrived.
"""
