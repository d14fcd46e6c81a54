"""Copies of a policy for generation: allocated only while generating, quantized, or sharded over ranks."""
