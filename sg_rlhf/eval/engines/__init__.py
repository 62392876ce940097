"""What turns prompts into responses: one file an engine, `base` what they share, `start`."""
