"""Skip-gram with negative sampling: two tables of embeddings, of what a word stands beside and of words."""

import torch
from torch import nn


class SkipGram(nn.Module):
    """Scores how well words stand beside others: products of the rows of two tables.

    Initial rows come from torch's global generator, uniform in ±1/(2 width); those of the words are zero.

    Args:
        rows: of the table that centers are looked up in.
        words: rows of the table of contexts.
        width: elements of a row.
        sparse: gradients are of the rows that a batch has touched, see torch.nn.Embedding.

    Source: Mikolov et al., NeurIPS 2013, section 2.2.
    """

    def __init__(self, rows: int, words: int, *, width: int, sparse: bool) -> None:
        super().__init__()
        self.centers = nn.Embedding(rows, width, sparse=sparse)
        self.contexts = nn.Embedding(words, width, sparse=sparse)
        nn.init.uniform_(self.centers.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, centers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """float[m, k]: the score of each of int64[m, k] words beside its int64[m] center."""
        scores: torch.Tensor = torch.einsum("mw,mkw->mk", self.centers(centers), self.contexts(words))
        return scores
