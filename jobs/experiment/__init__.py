"""Tables of results: the runs of an experiment, their plan, and what they are to show."""
