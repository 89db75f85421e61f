"""The command lines: what `python -m engine.chat` and `python -m engine.batch` are made of."""
