"""Looped model architectures; a new model is one file here."""
