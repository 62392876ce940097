"""What a machine has and what a run needs of it, a line a check, before anything is downloaded."""
