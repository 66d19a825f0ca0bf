"""Runs networks and engines: paged latent cache, in-flight batching, executors."""
