"""Small helpers for every package: atomic files, text, arguments, host memory, redaction."""
