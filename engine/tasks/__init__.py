"""Engines shared by many tasks: the thread that steps, and `AsyncEngine`."""
