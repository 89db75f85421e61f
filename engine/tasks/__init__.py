"""Engines that many tasks share: the thread that steps, and `AsyncEngine`."""
