"""Runs stages: frames in, tokens and exits out."""
