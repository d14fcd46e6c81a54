"""The hf engine: `transformers` generate behind the protocol of all engines."""
