"""`sg-rlhf run`: train a domain on this machine, with its data, from one command."""
