"""An OpenAI-compatible HTTP server over `LLMClient`."""
