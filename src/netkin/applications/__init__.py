"""Questions put to the measures, a folder each; none imports another."""
