"""One script per performance claim; ``bench.gpu`` is the tier that needs a GPU."""
