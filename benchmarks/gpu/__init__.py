"""The check that runs on a GPU machine."""
