"""Settings that follow from a run's arguments: layout, async rollouts, workers, optional packages.

Each check refuses a combination before anything starts. ``worker_settings`` carries settings to
Ray workers in one environment variable. Imports only ``cpu`` and ``reporting`` of the overlay.
"""
