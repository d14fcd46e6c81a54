"""Weights from the ranks that train to the ranks that generate: what is missing travels, and what arrived is
proven.
"""
