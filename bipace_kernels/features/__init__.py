"""Arguments of `advantage()` made from text and tokens: action keys, fingerprints, tokens of turns."""
