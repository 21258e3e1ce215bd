"""Stands in for a sentence encoder of sentence_transformers."""

import torch


class Encoder:
    """A sentence encoder: two features of a text."""

    device = torch.device("cpu")

    def eval(self):
        return self

    def encode(self, texts, **_):
        return torch.tensor([[len(text) + 1.0, float(text.count("a"))] for text in texts])
