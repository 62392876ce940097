"""What a run needs before it runs: memory, time and disk, by formulas with their assumptions."""
