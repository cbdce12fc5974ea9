"""Transfer: which pretrained model to start from for some data."""
