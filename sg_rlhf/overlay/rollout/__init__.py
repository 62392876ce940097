"""Generation: the vLLM engines, and the controller's side of talking to them.

In each engine's Ray actor: ``engine`` (extends upstream's ``RolloutRayActor``), ``executors``
(reward functions and agents), ``environment_agent``, ``batch_barrier`` (starts requests together).

In the controller: ``generator`` turns prompts into experience; ``dispatch`` sends requests, and
repeats those of a lost engine; ``engine_pool`` restarts lost engines, ``engine_monitor`` finds
engines that do not answer; ``async_buffer`` keeps the samples of an asynchronous run.
"""
