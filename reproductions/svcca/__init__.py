"""Raghu, Gilmer, Yosinski and Sohl-Dickstein (2017), SVCCA, arXiv:1706.05806."""
