"""The command lines `python -m engine.chat` and `python -m engine.batch`."""
