"""OpenEnv, both ways: our domains for other trainers, and others' environments for ours.

`command` and `openenv` serve a domain (`sg-rlhf serve-env`). `openenv_domain` and `session` reach
an environment by its URL.
"""
