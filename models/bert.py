"""BERT for pre-training: masked words and the next sentence, as in the paper's Wikipedia experiments."""

import torch
from torch import nn

from models.transformer import HEAD

VOCABULARY = 30_522
POSITIONS = 512


class BERT(nn.Module):
    """The encoder of the transformers library with both of its pre-training heads; the decoder is not tied.

    The default, BERT-base, has 133,547,324 parameters. Attention is torch's scaled dot product, in heads of 64 channels,
    and the feed-forward layers are four times as wide as the rest.

    Initial weights come from torch's global generator (normal, 0.02); seed it before. Nothing is ever downloaded.

    Args:
        vocabulary: words, at least 5.
        layers: at least 1.
        hidden: channels, a positive multiple of 64.
        dropout: in [0, 1), of the channels and of the attention.
        positions: tokens of the longest sequence, at least 8.

    Source: Devlin et al., NAACL 2019; sizes as in Li & Hoefler, PPoPP 2022.
    """

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        *,
        layers: int = 12,
        hidden: int = 768,
        dropout: float = 0.1,
        positions: int = POSITIONS,
    ) -> None:
        super().__init__()
        # seconds to import, and images do without it
        from transformers import BertConfig, BertForPreTraining

        self.vocabulary, self.positions = vocabulary, positions
        self.network = BertForPreTraining(
            BertConfig(
                vocab_size=vocabulary,
                pad_token_id=None,  # else the library keeps word 0 from being learnt, whatever it is
                num_hidden_layers=layers,
                hidden_size=hidden,
                num_attention_heads=hidden // HEAD,
                intermediate_size=4 * hidden,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                max_position_embeddings=positions,
                tie_word_embeddings=False,
                attn_implementation="sdpa",
            )
        )
        # The library keeps a second bias beside the decoder's for when both are tied; here nothing would train it.
        self.network.cls.predictions.register_parameter("bias", None)

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, present: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the words at some places, and of whether the second segment follows the first.

        Only what stands at the places is decoded: scores of every token would be most of the memory.

        Args:
            tokens: int64[batch, length], each in [0, vocabulary); length at most `positions`.
            segments: int64[batch, length], 0 in the first segment and 1 in the second.
            present: bool[batch, length], False where a sequence is padded.
            places: int64[batch, count], each in [0, length).

        Returns:
            float[batch, count, vocabulary] and float[batch, 2] (0: follows, 1: does not), logits.
        """
        # In full: of a mask of two dimensions the library would ask the device whether it hides anything.
        hidden = present[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        encoded = self.network.bert(tokens, attention_mask=hidden, token_type_ids=segments)
        states = encoded.last_hidden_state
        chosen = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[2]))
        words, follows = self.network.cls(chosen, encoded.pooler_output)
        return words, follows
