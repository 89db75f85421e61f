"""The version of everything here, written once; packaging reads it from this file."""

__version__ = "0.1.0"
