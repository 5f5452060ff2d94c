"""Runs stages: frames in, tokens and flags out."""
