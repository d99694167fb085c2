"""BERT, DistilBERT and GPT-2 in plain TensorFlow: named parameters, forward passes, weight files."""
