"""What clients talk to: Python and network APIs, validation, tokenising, detokenising."""
