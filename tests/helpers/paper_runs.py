"""The runs of the paper, typed from its tables "run-settings" and "hparams"."""

#: By name: model, GPUs, TP, steps, G, horizon, layer, ε.
RUNS = {
    "alfworld_7b": ("Qwen2.5-7B", 4, 2, 150, 8, 50, -8, 0.10),
    "alfworld_1_5b": ("Qwen2.5-1.5B", 2, 1, 200, 8, 50, -12, 0.05),
    "webshop_7b": ("Qwen2.5-7B", 4, 2, 150, 12, 15, -8, 0.10),
    "webshop_1_5b": ("Qwen2.5-1.5B", 2, 1, 200, 12, 15, -12, 0.06),
    "textcraft_7b": ("Qwen2.5-7B", 4, 2, 50, 12, 70, -8, 0.10),
    "textcraft_1_5b": ("Qwen2.5-1.5B", 4, 1, 100, 12, 70, -12, 0.10),
}
