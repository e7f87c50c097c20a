"""The experiments' data sets: prepared once into HDF5, read by every rank, never communicated.

Ranks appear as plain numbers (`rank`, `size`), and nothing here loads a pickle.
"""


class DataError(ValueError):
    """Data that cannot be used: missing, truncated, out of range, or too little for the ranks."""
