"""When batches are generated, and under which weights."""
