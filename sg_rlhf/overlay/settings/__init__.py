"""What a run's arguments mean: layout, async rollouts, workers' settings, optional packages.

Each check refuses a combination before anything starts. ``worker_settings`` carries settings to
Ray workers through environment variables. Read by every other sub-package; imports none of them
but ``cpu`` and ``reporting``.
"""
