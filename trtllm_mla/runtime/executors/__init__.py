"""Executors: what runs a step of a network."""
