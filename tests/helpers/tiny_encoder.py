"""Stands in for a sentence encoder of sentence_transformers."""

import numpy as np
import torch


class Encoder:
    """A sentence encoder: counts of 64 characters in a text."""

    device = torch.device("cpu")

    def eval(self):
        return self

    def encode(self, texts, *, batch_size=32, convert_to_tensor, show_progress_bar):
        rows = [np.bincount(np.frombuffer(f"{text} ".encode(), np.uint8) % 64, minlength=64) for text in texts]
        return torch.tensor(np.array(rows), dtype=torch.float32)
