"""Mixtures of experts: their layers, and the routes of tokens to them."""
