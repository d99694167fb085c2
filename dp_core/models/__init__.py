"""BERT, DistilBERT and GPT-2, and their Hugging Face folders."""
