"""Timing a network or engine."""
