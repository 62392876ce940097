"""Derived from a run's arguments: rollouts, optimizer steps, and the workers' settings."""
