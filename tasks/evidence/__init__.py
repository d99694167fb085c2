"""The evidence pack, by which a third party can check a model's privacy claim independently."""
