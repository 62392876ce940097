"""Print and plot a recipe's token weighting before training."""
