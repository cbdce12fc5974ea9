"""Tang, Maddox, Dickens, Diethe and Damianou (2020), Similarity of Neural Networks with Gradients, arXiv:2003.11498."""
