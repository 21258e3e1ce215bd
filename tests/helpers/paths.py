"""Folders of the checkout, for tests that read its files or start programs on its helpers."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
