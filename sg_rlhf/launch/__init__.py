"""One recipe as a job of SLURM, KubeRay or SkyPilot."""
