"""Generation: the vLLM engines, and the controller's side of talking to them.

``engine`` runs in each engine's actor. ``generator``, ``dispatch``, ``engine_pool``,
``engine_health`` and ``async_buffer`` run in the controller: they send prompts, replace an engine
that died, and keep rollouts ahead of the update.
"""
