"""What a run is doing and why it ended: activity, timing, terminal, errors, stops.

Every process writes here; the driver's terminal reads it. The lowest package of the overlay.
"""
