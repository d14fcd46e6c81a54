"""An HTTP endpoint for the client of Tinker: LoRA training and sampling, driven by a loop elsewhere."""
