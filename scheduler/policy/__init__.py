"""Which stage runs next: the policies, what they see and what they learn."""
