"""Second modules of a policy, which generate: with memory only then, in fewer bits, or cut among ranks."""
