"""The process that the user starts: arguments, the Ray session, and the end of a run (``run``)."""
