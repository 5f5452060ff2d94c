"""What a grammar may cost, the same at the edge, where it is one client's error, and beside the worker."""

INITIAL_LEXER_FUEL = 100_000
"""A tenth of the library's default, with which the first mask of (a{1000}){1000} takes a second and more. A schema of 300
properties with patterns and choices stays below it."""

COMPILE_CPU_S = 0.25  # to the first mask; a schema of 300 properties takes 0.01 s
STEP_CPU_S = 0.1  # tokens taken and the next mask; in a vocabulary of 49,152 masks of good grammars take below 0.01 s
MEMORY_BYTES = 128 << 20  # beyond the vocabulary, which all share
TOKENS_A_STEP = 64  # of a sequence that is told again, within one STEP_CPU_S

ANSWER_WALL_S = 10.0  # that a stage waits for masks: what CPU limits cannot bound, a process that is stopped, say
COMPILE_WALL_S = 5.0  # that a request waits at the edge, once its turn has come
