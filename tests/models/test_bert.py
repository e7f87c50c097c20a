"""BERT: what padding and segments do, and which parameters learn."""

import torch

from models.bert import BERT

LENGTH = 12


def tiny(**changes: object) -> BERT:
    torch.manual_seed(5)
    return BERT(**{"vocabulary": 40, "layers": 2, "hidden": 64, "dropout": 0.0, "positions": 16} | changes)


def inputs(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (batch, LENGTH), generator=generator)
    segments = (torch.arange(LENGTH) >= 7).long().expand(batch, -1)
    return tokens, segments, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([[1, 4]] * batch)


def test_padding_has_no_effect_and_segments_have_one() -> None:
    model = tiny().eval()
    tokens, segments, present, places = inputs()
    present[1, 9:] = False
    words, follows = model(tokens, segments, present, places)
    assert words.shape == (3, 2, 40)
    assert follows.shape == (3, 2)
    changed = tokens.clone()
    changed[1, 9:] = 7
    for left, right in zip(model(changed, segments, present, places), (words, follows), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(model(tokens, torch.zeros_like(segments), present, places)[0], words)


def test_only_the_places_asked_for_are_decoded() -> None:
    model = tiny().eval()
    tokens, segments, present, _ = inputs()
    everywhere = torch.arange(LENGTH).expand(3, -1)
    places = torch.tensor([[3, 0], [11, 5], [2, 2]])
    all_words = model(tokens, segments, present, everywhere)[0]
    words = model(tokens, segments, present, places)[0]
    for row in range(3):
        torch.testing.assert_close(words[row], all_words[row, places[row]])


def test_every_word_is_learnt_whatever_its_number() -> None:
    model = tiny().train()
    tokens, *rest = inputs()
    tokens[0, 1] = 0
    model(tokens, *rest)[0].square().sum().backward()
    embedding = model.network.bert.embeddings.word_embeddings.weight
    assert embedding[0].any() and embedding.grad[0].any()
