"""Trains the demo models and exit gates; the weights that ship are in ``demo/``."""
