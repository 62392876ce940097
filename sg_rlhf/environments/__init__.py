"""The domains as environments that other trainers step: ``sg-rlhf serve-env``.

`openenv` serves a domain over OpenEnv's protocol. Nothing here trains.
"""
