"""What follows from a recipe: placement of models, passes for log-probs, limits of async runs."""
