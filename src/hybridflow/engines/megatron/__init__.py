"""megatron-core as a training engine, where the package is installed; `engine` imports it."""
