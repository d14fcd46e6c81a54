"""The native engine: generation by the very module that trains."""
