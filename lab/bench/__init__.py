"""One script per performance claim (``claims.py``), and what they share (``common.py``)."""
