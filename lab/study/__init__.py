"""Studies: plans of many runs, their runner, tables and pictures."""
