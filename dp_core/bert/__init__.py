"""BERT, DistilBERT and GPT-2 in plain TensorFlow: named arrays, forward passes, weight files."""
