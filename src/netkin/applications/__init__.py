"""Applications of the measures, one package each; none imports another."""
