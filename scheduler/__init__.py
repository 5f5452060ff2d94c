"""The CPU scheduler: a pure state machine and the process loop around it. Imports no torch."""
