"""Comparing a network or engine with the PyTorch reference."""
