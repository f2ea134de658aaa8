"""The package's version, in a file without imports so that the build can read it."""

__version__ = "0.1.0"
