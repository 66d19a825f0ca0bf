"""From a network to an engine: kernels compiled ahead of time, TensorRT plugins, and the engine directory."""
