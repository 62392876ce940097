"""The data command: `sg-rlhf data`."""
