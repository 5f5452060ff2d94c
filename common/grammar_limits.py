"""What a grammar may cost, the same at the edge, where it is one client's error, and in the worker, where all would wait."""

from llguidance import LLParserLimits

LIMITS = LLParserLimits(initial_lexer_fuel=100_000)
"""A tenth of the default, with which the first mask of (a{1000}){1000} takes a second and more, in which no other request
gets a token. A schema of 300 properties with patterns and choices stays below it."""
