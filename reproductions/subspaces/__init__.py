"""Chen, Miao and Qiu (2023), Inner Product-based Neural Network Similarity, NeurIPS 36."""
