"""The fastest that absorbed attention can be on a GPU: what memory, MMA and dequantisation allow."""
