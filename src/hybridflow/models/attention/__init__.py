"""How a layer attends: one function, its kernels, and the layouts of training and generation."""
