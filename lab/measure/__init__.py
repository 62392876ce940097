"""Measurements of checkpoints: accuracy, sharpness, gradients of tokens and of minibatches."""
