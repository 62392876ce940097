"""Statistics of token weights and gradients. Used by the learner's metrics."""
