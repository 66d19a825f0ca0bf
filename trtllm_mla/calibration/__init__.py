"""Calibration: the outer scales of a quantised latent cache, chosen from a text's latents."""
