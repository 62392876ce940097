"""Figures and summaries of run directories; reads their files and nothing else."""
