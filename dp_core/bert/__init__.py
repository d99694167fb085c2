"""BERT in plain TensorFlow operations: parameters by name, a forward pass, heads, weight files."""
