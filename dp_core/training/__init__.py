"""Training: MLM pre-training with and without privacy, fine-tuning, measuring, devices."""
