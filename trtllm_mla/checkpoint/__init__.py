"""Hugging Face checkpoints: config, tensors, and where each network weight comes from."""
