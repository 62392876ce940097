"""What a recipe's loss does with a token: described, printed and drawn."""
