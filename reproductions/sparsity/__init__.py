"""Ni et al. (2023), Learning Sparse Neural Networks with Identity Layers, arXiv:2307.07389, with its appendix."""
