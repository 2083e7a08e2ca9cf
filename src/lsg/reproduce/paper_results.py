"""The figures that the paper prints (section 4), in percent, to stand beside ours. Its plots carry no numbers."""

# Table 1, RoBERTa-base: task -> (rank, None for "full"; sparsity) -> accuracy. Row p = 0 is RGP, "full" Sparse DPSGD.
TABLE1: dict[str, dict[tuple[int | None, float], float]] = {
    "sst2": {
        **{(2, 0.0): 85.4, (4, 0.0): 87.9, (8, 0.0): 88.3, (None, 0.0): 81.0},
        **{(2, 0.1): 87.3, (4, 0.1): 88.6, (8, 0.1): 89.0, (None, 0.1): 80.9},
        **{(2, 0.3): 88.3, (4, 0.3): 89.6, (8, 0.3): 89.9, (None, 0.3): 80.5},
        **{(2, 0.5): 89.4, (4, 0.5): 89.8, (8, 0.5): 90.4, (None, 0.5): 80.3},
    },
    "qqp": {
        **{(2, 0.0): 82.8, (4, 0.0): 82.8, (8, 0.0): 83.1, (None, 0.0): 71.1},
        **{(2, 0.1): 83.3, (4, 0.1): 83.3, (8, 0.1): 83.3, (None, 0.1): 71.2},
        **{(2, 0.3): 83.9, (4, 0.3): 83.7, (8, 0.3): 83.8, (None, 0.3): 71.7},
        **{(2, 0.5): 83.8, (4, 0.5): 83.6, (8, 0.5): 83.6, (None, 0.5): 71.5},
    },
}

# Table 2, wide ResNet on CIFAR-10 from scratch: method -> epsilon -> accuracy.
TABLE2: dict[str, dict[float, float]] = {
    "lsg": {0.8: 42.2, 1.7: 50.9, 3.3: 58.1, 6.8: 62.5},
    "rgp": {0.8: 41.5, 1.7: 50.4, 3.3: 57.2, 6.8: 61.9},
    "sparse-dpsgd": {0.8: 23.4, 1.7: 35.2, 3.3: 48.4, 6.8: 60.2},
    "dpsgd": {0.8: 23.2, 1.7: 35.1, 3.3: 48.4, 6.8: 59.9},
}
TABLE2_NON_PRIVATE = 93.3  # quoted there from RGP's paper
