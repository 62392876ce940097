"""What every room may use: files, rows, statistics, command lines, the run directory, Ray."""
