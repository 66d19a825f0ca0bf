"""Network stage: the ONNX graph of a model and the directory it is kept in."""
