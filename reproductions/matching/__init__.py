"""Csiszárik, Kőrösi-Szabó, Matszangosz, Papp and Varga (2021), Similarity and Matching, arXiv:2110.14633."""
