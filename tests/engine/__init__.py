"""Tests of the engine stage."""
