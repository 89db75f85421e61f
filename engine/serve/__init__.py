"""The server: `python -m engine.serve`, the HTTP interface of OpenAI for every search."""
