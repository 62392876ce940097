"""Reports a run: activity log, terminal, timing, errors, graceful stop.

Every process writes the activity log; the driver shows it. The lowest package of the overlay.
"""
