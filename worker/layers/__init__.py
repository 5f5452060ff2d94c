"""Blocks of layers and the operators they are made of."""
