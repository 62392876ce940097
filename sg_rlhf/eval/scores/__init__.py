"""From graded samples to scores with intervals, reports and comparisons."""
