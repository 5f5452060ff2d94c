"""Training of demo models and exit gates."""
