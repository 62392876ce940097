"""Derived from a run's arguments: rollouts, optimizer steps, and the workers' settings.

``rollout_plan`` counts them; ``worker_settings`` carries settings to Ray workers in one environment
variable; ``lookup`` reads the arguments by dotted keys. Checks are in ``sg_rlhf.config.checks``.
Imports only ``reporting`` of the overlay.
"""
