"""Conversion of a checkpoint into a Hugging Face folder."""

from hybridflow.merger.merge import compare, merge

__all__ = ["compare", "merge"]
