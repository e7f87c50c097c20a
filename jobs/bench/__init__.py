"""The bench: every method on the same gradients, timed by stage, with words, messages and memory."""
